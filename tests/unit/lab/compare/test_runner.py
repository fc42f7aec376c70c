"""Whole comparisons, of very short runs: all alike for all, resumed, and with failures."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

from natgrad.errors import CheckpointError, DataError, SettingError
from natgrad.lab.compare import (
    CONTENDERS,
    Comparison,
    ComparisonSetup,
    Contender,
    compare,
    runner,
    table,
    trial,
)
from natgrad.lab.compare.contender import neutral
from natgrad.lab.compare.progress_bar import ComparisonLines, NoComparisonProgress
from natgrad.lab.compare.results import Status
from natgrad.lab.schemes import optimizers_by_name
from natgrad.lab.train import logs
from natgrad.lab.train.state import Checkpoints
from natgrad.lab.train.training import Training
from unit.lab.compare import sample_setups as made
from unit.lab.train import digit_runs as runs

ASKED = made.setup(trials=3, seeds=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """No digits that take seconds to import, and no garbage collection, which takes longer than a
    run of these."""
    monkeypatch.setattr(trial.gc, "collect", lambda: 0)
    with runs.made_up_digits():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison that nothing has disturbed."""
    with runs.made_up_digits():
        return compare(ASKED, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def trained(monkeypatch):
    """All steps that are taken from now on but those of the warm-up: the run and what it sees."""
    seen = []
    step = Training.step

    def noted(self, number, batches):
        if self.steps > 2:
            weights = [p.detach().clone() for p in self.network.parameters()]
            samples = [sample for _, pair in batches for sample in pair]
            seen.append((self.settings, number, weights, samples))
        return step(self, number, batches)

    monkeypatch.setattr(Training, "step", noted)
    return seen


def plain(found: Comparison):
    """All that does not depend on time."""
    return [
        (one.key, one.chosen, one.edge, *map(_run, (*one.trials, *one.runs)))
        for one in found.entries
    ]


def _run(run):
    return run.lr, run.seed, run.folder, run.status, run.steps, run.final, dict(run.curve.values)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_everybody_has_the_same_start_and_the_same_batches(trained, tmp_path):
    """On one seed; on another one they differ."""
    compare(made.setup("sgd", "adamw", "kfac", trials=2, seeds=2), tmp_path)
    starts, batches = {}, {}
    for settings, step, weights, samples in trained:
        batches.setdefault((settings.seed, step), []).append(samples)
        if step == 0:
            starts.setdefault(settings.seed, []).append(weights)
    assert [len(starts[seed]) for seed in (0, 1, 2)] == [6, 3, 3]
    assert len(batches) == 12
    for first, *others in (*starts.values(), *batches.values()):
        assert all(equal(first, other) for other in others)
    assert not torch.equal(starts[1][0][0], starts[2][0][0])
    assert not torch.equal(batches[1, 0][0][0], batches[2, 0][0][0])


def test_everybody_has_as_many_trials_and_the_same_task(trained, tmp_path):
    found = compare(made.setup("sgd", "adamw", "kfac", trials=3, seeds=2), tmp_path)
    assert [(len(one.trials), len(one.runs)) for one in found.entries] == [(3, 2)] * 3
    told = {replace(settings, lr=0.1, seed=0) for settings, *_ in trained}
    assert len(told) == 3
    assert {neutral(settings) for settings in told} == {found.task}
    assert [run.seed for one in found.entries for run in one.runs] == [1, 2] * 3
    for one in found.entries:
        assert {run.lr for run in one.runs} == {one.chosen}
        finals = {run.lr: run.final for run in one.trials}
        assert finals[one.chosen] == min(finals.values())


def test_trials_may_be_shorter(trained, tmp_path):
    """The same for all, with a schedule that falls to 0 all the same; runs are as long as ever."""
    asked = made.setup("sgd", "adamw", trials=2, seeds=1, tuning_steps=3)
    asked = replace(asked, task=replace(asked.task, steps=6, warmup_share=0.5))
    found = compare(asked, tmp_path)
    for one in found.entries:
        assert [run.steps for run in (*one.trials, *one.runs)] == [3, 3, 6]
    told = {replace(s, lr=0.1, seed=0, optimizer="sgd") for s, *_ in trained}
    assert sorted(s.steps for s in told) == [3, 6]
    assert (found.task.steps, found.tuning_steps) == (6, 3)
    assert "2 learning rates tried by each in runs of 3, then" in table(found).title
    assert Comparison.read(tmp_path) == found
    assert compare(asked, tmp_path, resume=True) == found
    with pytest.raises(SettingError, match=r"tuning_steps is 2 but the comparison in .* has 3"):
        compare(replace(asked, tuning_steps=2), tmp_path, resume=True)
    with pytest.raises(SettingError, match="tuning_steps is 9 but the runs have 6 steps: pass at"):
        compare(replace(asked, tuning_steps=9), tmp_path / "other")


def test_what_is_in_the_folder(tmp_path):
    found = compare(made.setup(trials=2, seeds=1), tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["comparison.toml", "results.json", "runs"]
    assert Comparison.read(tmp_path) == found
    for one in found.entries:
        for run in (*one.trials, *one.runs):
            files = {path.name for path in (tmp_path / run.folder).iterdir()}
            record = {"kfac.json"} if one.preconditioned else set()
            assert files == {"log.jsonl", "settings.toml", *record}
            tests = [x for x in logs.read(tmp_path / run.folder) if x["kind"] == "fit"]
            assert run.curve.steps == tuple(line["step"] for line in tests) == (1, 2, 3, 4)
            assert run.curve.seconds == tuple(line["elapsed"] for line in tests)
            assert run.final == tests[-1]["loss"]
            assert run.seconds == tests[-1]["elapsed"]
            assert (run.kfac_share is not None) == one.preconditioned


def test_the_target_is_met_at_the_first_test_that_is_as_good(tmp_path):
    found = compare(made.setup("sgd", "adamw", trials=1, seeds=3), tmp_path)
    sgd, adamw = found.entries
    assert found.target == sorted(run.final for run in sgd.runs)[1]
    for run in (*sgd.runs, *adamw.runs):
        points = zip(run.curve.steps, run.curve.values["fit_loss"], strict=True)
        met = [step for step, loss in points if loss <= found.target]
        assert (run.reached.step if run.reached else None) == (met[0] if met else None)


def test_checkpoints_that_a_killed_process_has_left_go(tmp_path):
    asked = made.setup("sgd", trials=1, seeds=1)
    run = compare(asked, tmp_path).entries[0].runs[0]
    left = tmp_path / run.folder / "checkpoints" / "step-00000004"
    left.mkdir(parents=True)
    compare(asked, tmp_path, resume=True)
    assert not left.exists()


def test_results_are_written_before_and_after_every_run(tmp_path, monkeypatch):
    states = []
    write = Comparison.write

    def noted(self, folder):
        write(self, folder)
        values = json.loads((folder / "results.json").read_text())
        states.append([r["status"] for c in values["contenders"] for r in c["trials"] + c["runs"]])

    monkeypatch.setattr(Comparison, "write", noted)
    compare(made.setup("sgd", trials=2, seeds=1), tmp_path)
    assert states == [
        ["running"],
        ["done"],
        ["done", "running"],
        ["done", "done"],
        ["done", "done", "running"],
        ["done", "done", "done"],
    ]


def stop_at(monkeypatch, count):
    """A signal in the ``count``-th step from now on."""
    step, left = Training.step, iter(range(1, 10**6))

    def interrupted(self, *args):
        if next(left) == count:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    monkeypatch.setattr(Training, "step", interrupted)


# 2 · 2 steps of warming up and 4 steps a run, of which there are 8.
@pytest.mark.parametrize("count", [1, 4, 6, 15, 36])
@pytest.mark.slow
def test_going_on_is_as_if_nothing_had_happened(count, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        stop_at(context, count)
        part = compare(ASKED, tmp_path)
    assert part.signal == signal.SIGTERM
    assert not (tmp_path / ".warm-up").exists()
    assert (plain(part) == plain(whole)) == (count == 36)
    again = compare(ASKED, tmp_path, resume=True)
    assert (again.signal, whole.signal) == (0, 0)
    assert plain(again) == plain(whole)
    assert Comparison.read(tmp_path) == again


def test_a_signal_between_two_runs_is_not_lost(whole, tmp_path):
    class Interrupts(NoComparisonProgress):
        def run(self, number, total, text):
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    part = compare(ASKED, tmp_path, Interrupts())
    assert part.signal == signal.SIGTERM
    assert [len(one.trials) for one in part.entries] == [1, 0]
    steps = [line["step"] for line in logs.read(tmp_path / "runs/kfac/trial-1")]
    assert set(steps) == {1}
    assert plain(compare(ASKED, tmp_path, resume=True)) == plain(whole)


def test_going_on_after_a_kill(whole, tmp_path, monkeypatch):
    """Nothing is told in the middle of a run: what is in the files is all there is."""

    class Killed(BaseException):
        pass

    save, left = Checkpoints.save, iter(range(10**6))

    def killed(self, *args):
        save(self, *args)
        if next(left) == 7:
            raise Killed

    with monkeypatch.context() as context:
        context.setattr(Checkpoints, "save", killed)
        with pytest.raises(Killed):
            compare(ASKED, tmp_path)
    before = Comparison.read(tmp_path)
    statuses = [run.status for one in before.entries for run in one.trials]
    assert statuses.count(Status.RUNNING) == 1
    assert plain(compare(ASKED, tmp_path, resume=True)) == plain(whole)


def test_seeds_and_optimizers_that_come_later(trained, tmp_path):
    compare(made.setup("sgd", trials=2, seeds=1), tmp_path / "parts")
    trained.clear()
    more = made.setup("adamw", "sgd", trials=2, seeds=2)
    found = compare(more, tmp_path / "parts", resume=True)
    keys = [(settings.optimizer, settings.seed) for settings, step, *_ in trained if step == 0]
    assert sorted(keys) == [("adamw", 0), ("adamw", 0), ("adamw", 1), ("adamw", 2), ("sgd", 2)]
    assert plain(found) == plain(compare(more, tmp_path / "whole"))
    trained.clear()
    assert compare(more, tmp_path / "parts", resume=True) == found
    assert not trained


def test_a_folder_with_a_comparison_is_not_overwritten(tmp_path):
    asked = made.setup("sgd", trials=1, seeds=1)
    compare(asked, tmp_path)
    with pytest.raises(SettingError) as error:
        compare(asked, tmp_path)
    assert str(error.value) == (
        f"The folder {tmp_path} has a comparison already: pass --resume to go on with it, or "
        "another folder."
    )
    with pytest.raises(SettingError, match="trials is 2 but the comparison in"):
        compare(replace(asked, trials=2), tmp_path, resume=True)


def test_runs_that_diverge_end_early_and_are_the_worst(tmp_path):
    """A momentum of almost 1 at a rate of millions."""
    mad = Contender("mad", "Mad", "", {"optimizer": "sgd", "momentum": 0.99}, 3e7)
    asked = ComparisonSetup(made.task(steps=30), (mad,), trials=4, seeds=1)
    said = []
    found = compare(asked, tmp_path, ComparisonLines(said.append))
    (one,) = found.entries
    assert {run.status for run in one.trials} == {Status.DIVERGED}
    assert all(run.steps < 30 and run.final is None for run in one.trials)
    assert [run.lr for run in one.trials] == [3e7, 1.2e8, 7.5e6, 1.88e6]
    assert (one.chosen, one.runs, found.target) == (None, (), None)
    assert said[0] == "[1/5] Mad: trial 1 of 4, learning rate 3e+07"
    assert [line.split()[0] for line in said] == ["[1/5]", "[2/5]", "[3/5]", "[4/5]"]
    assert compare(asked, tmp_path, resume=True) == found


@pytest.mark.parametrize(
    "error",
    [torch.linalg.LinAlgError("It has no end."), DataError("Sample 3 is spoilt: remove it.")],
    ids=["linalg", "ours"],
)
def test_one_that_fails_does_not_stop_the_others(error, tmp_path, monkeypatch):
    step = Training.step

    def fails(self, number, batches):
        if self.settings.optimizer == "adamw" and number == 2:
            raise error
        return step(self, number, batches)

    monkeypatch.setattr(Training, "step", fails)
    adamw, sgd = compare(made.setup("adamw", "sgd", trials=2, seeds=1), tmp_path).entries
    assert [run.status for run in adamw.trials] == [Status.FAILED] * 2
    said = str(error) if isinstance(error, DataError) else f"LinAlgError: {error}"
    assert {run.said for run in adamw.trials} == {said}
    assert {run.steps for run in adamw.trials} == {2}
    assert (adamw.chosen, adamw.runs) == (None, ())
    assert [run.status for run in (*sgd.trials, *sgd.runs)] == [Status.DONE] * 3


def test_a_full_disk_ends_all_of_it(whole, tmp_path, monkeypatch):
    """And it goes on when there is room."""

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:

        class Fills(NoComparisonProgress):
            def run(self, number, total, text):
                if number == 2:
                    context.setattr(os, "fsync", full)

        with pytest.raises(CheckpointError, match="No space left on device"):
            compare(ASKED, tmp_path, Fills())
    assert plain(compare(ASKED, tmp_path, resume=True)) == plain(whole)


def test_missing_libraries_are_told_and_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers_by_name, "find_spec", lambda name: None)
    said = []
    found = compare(
        made.setup("muon", "sgd", trials=1, seeds=1), tmp_path, ComparisonLines(said.append)
    )
    muon, sgd = found.entries
    sentence = CONTENDERS["muon"].missing()
    assert said[0] == muon.missing == sentence
    assert (muon.trials, sgd.missing, len(sgd.runs)) == ((), "", 1)
    assert found.target == sgd.runs[0].final
    with pytest.raises(SettingError) as error:
        compare(made.setup("muon", "soap"), tmp_path / "other")
    assert str(error.value) == f"{sentence} {CONTENDERS['soap'].missing()}"


def test_a_task_that_cannot_be_is_refused_before_anything_is_run(tmp_path):
    with pytest.raises(SettingError, match="network resnet20 takes images of 3 channels"):
        compare(made.setup(task=made.task(network="resnet20")), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        compare(made.setup(), tmp_path / "file" / "folder")


def test_threads_are_set_and_set_back(tmp_path, monkeypatch):
    set_to, before = [], torch.get_num_threads()
    monkeypatch.setattr(runner.torch, "set_num_threads", set_to.append)
    compare(made.setup("sgd", trials=1, seeds=1, threads=3), tmp_path)
    assert set_to == [3, before]


def test_everybody_is_warmed_up_before_the_first_run(tmp_path, monkeypatch):
    steps = []
    step = Training.step

    def noted(self, number, batches):
        steps.append((self.settings.optimizer, self.steps))
        return step(self, number, batches)

    monkeypatch.setattr(Training, "step", noted)
    compare(made.setup("sgd", "adamw", trials=1, seeds=1), tmp_path)
    assert steps[:5] == [("sgd", 2), ("sgd", 2), ("adamw", 2), ("adamw", 2), ("sgd", 4)]


def test_what_is_told(tmp_path):
    said = []
    asked = made.setup(trials=1, seeds=1, task=made.task(schedule="constant"))
    compare(asked, tmp_path, ComparisonLines(said.append))
    assert said[:2] == [
        "Learning rates fall linearly to 0 by the last step: schedule constant would leave 100% of "
        "them.",
        "[1/4] SGD: trial 1 of 1, learning rate 0.1",
    ]
    starts = [line.partition(", about")[0] for line in said[2:]]
    assert starts == [
        "[2/4] K-FAC, SGD: trial 1 of 1, learning rate 0.03",
        "[3/4] SGD: seed 1, learning rate 0.1",
        "[4/4] K-FAC, SGD: seed 1, learning rate 0.03",
    ]
    assert all(line.endswith(" left") for line in said[2:])
