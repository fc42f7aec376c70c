"""Runs: large batches from small ones, logs, early stops, and going on bit for bit."""

import json
import os
import random
import signal
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from natgrad.comm.torchrun import joined
from natgrad.errors import CheckpointError, SettingError
from natgrad.lab.train import loop, optimizers, train
from natgrad.lab.train.interruption import Interruption
from natgrad.lab.train.logs import read
from natgrad.lab.train.state import Checkpoints
from natgrad.lab.train.training import Training
from unit.lab.train import digit_runs as runs

pytest.importorskip("sklearn")


@pytest.mark.parametrize("micro", [7, 32])
def test_accumulation_is_the_large_batch(micro, tmp_path):
    """Osawa 2019, sec. 5.1, with unequal micro-batches, too."""
    train(runs.settings(precision="float64"), tmp_path / "whole")
    train(runs.settings(precision="float64", micro_batch=micro), tmp_path / "parts")
    runs.assert_close(tmp_path / "whole", tmp_path / "parts")


def test_tests_and_checkpoints_change_nothing(tmp_path):
    train(runs.settings(), tmp_path / "quiet")
    often = {"evaluate_every": 1, "checkpoint_every": 1, "log_every": 2, "workers": 1}
    train(runs.settings(**often), tmp_path / "busy")
    runs.assert_same(tmp_path / "quiet", tmp_path / "busy")


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"optimizer": "adamw", "kfac": False, "lr": 1e-3},
        {"optimizer": "lamb", "fisher": "monte-carlo", "network": "mlp"},
        {"optimizer": "lars", "schedule": "polynomial", "decay_end": 1.0, "mixup": 0.0},
        {"displacement": True, "coupled": True, "precision": "bfloat16", "micro_batch": 20},
        {"optimizer": "naturalmuon", "kfac": False, "lr": 1e-2, "fisher": "monte-carlo"},
        {"optimizer": "adamw", "lr": 1e-3, "length": "dogleg(most=1.5)"},
    ],
    ids=["default", "adamw", "lamb", "lars", "displacement", "naturalmuon", "dogleg"],
)
def test_going_on_is_bit_identical(others, tmp_path):
    """In one process: the second half knows of the first only what is in the checkpoint."""
    train(runs.settings(**others), tmp_path / "whole")
    train(runs.settings(**{**others, "steps": 5}), tmp_path / "parts")
    outcome = train(runs.settings(**others), tmp_path / "parts", resume=True)
    assert (outcome.step, outcome.steps) == (8, 8)
    runs.assert_same(tmp_path / "whole", tmp_path / "parts")


def test_the_rest_of_the_state_is_the_same(tmp_path):
    train(runs.settings(), tmp_path / "whole")
    train(runs.settings(steps=5), tmp_path / "parts")
    train(runs.settings(), tmp_path / "parts", resume=True)
    one, other = (
        runs.checkpoint(tmp_path / "whole"),
        runs.checkpoint(tmp_path / "parts"),
    )
    for part in ("optimizer", "kfac"):
        left, right = flat(one[part]), flat(other[part])
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def flat(value, name=""):
    if isinstance(value, dict):
        value = value.items()
    elif isinstance(value, list | tuple):
        value = enumerate(value)
    else:
        return {name: value} if isinstance(value, torch.Tensor) else {}
    return {key: t for k, v in value for key, t in flat(v, f"{name}.{k}").items()}


def test_a_finished_run_is_left_alone(tmp_path):
    train(runs.settings(), tmp_path)
    before = runs.checkpoint(tmp_path)
    outcome = train(runs.settings(), tmp_path, resume=True)
    assert (outcome.step, outcome.signal) == (8, 0)
    assert outcome.metrics == before["metrics"]
    kinds = Counter(line["kind"] for line in read(tmp_path))
    assert (kinds["train"], kinds["test"]) == (8, 1)


def test_stopping_at_a_target(tmp_path):
    settings = runs.settings(steps=400, target=0.5, evaluate_every=2, mixup=0.0, erasing=0.0)
    outcome = train(settings, tmp_path)
    assert outcome.reached
    assert outcome.step < 400
    assert outcome.metrics["accuracy"] >= 0.5
    assert runs.checkpoint(tmp_path)["step"] == outcome.step
    tests = [line for line in read(tmp_path) if line["kind"] == "test"]
    assert all(line["accuracy"] < 0.5 for line in tests[:-1])
    again = train(settings, tmp_path, resume=True)
    assert (again.step, again.reached) == (outcome.step, True)


def test_low_losses_are_good(tmp_path):
    values = {"network": "autoencoder", "loss": "reconstruction", "mixup": 0.0, "steps": 100}
    settings = runs.settings(**values, metric="loss", target=30.0, evaluate_every=2)
    outcome = train(settings, tmp_path)
    assert outcome.reached
    assert outcome.metrics["loss"] <= 30.0


def test_the_log(tmp_path):
    train(runs.settings(steps=4, log_every=2, evaluate_every=2), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    kinds = [(line["kind"], line["step"]) for line in lines]
    assert kinds == [
        ("train", 1),
        ("train", 2),
        ("test", 2),
        ("stages", 2),
        ("train", 4),
        ("drift", 4),  # nothing has changed before
        ("test", 4),
        ("stages", 4),
    ]
    assert {"loss", "lr", "seconds", "share"} <= lines[0].keys()
    assert 0 < lines[0]["share"] < 1
    assert {"loss", "accuracy"} <= lines[2].keys()
    assert 0 < lines[0]["elapsed"] < lines[1]["elapsed"] <= lines[2]["elapsed"]


def test_seconds_go_on_with_a_run(tmp_path):
    train(runs.settings(steps=5), tmp_path)
    before = read(tmp_path)[-1]["elapsed"]
    train(runs.settings(), tmp_path, resume=True)
    elapsed = [line["elapsed"] for line in read(tmp_path)]
    assert elapsed == sorted(elapsed)
    assert next(line for line in read(tmp_path) if line["step"] == 6)["elapsed"] > before


def test_metrics_of_training_data(tmp_path):
    """They are those that the network has on the samples it was given, without anything random."""
    settings = runs.settings(train_samples=48, fit_samples=32, test_samples=20)
    train(settings, tmp_path)
    with joined() as (comm, device):
        training = Training(settings, comm, device)
    assert (len(training.task.train), len(training.task.test)) == (48, 20)
    training.network.load_state_dict(runs.checkpoint(tmp_path)["model"])
    inputs, labels = training.task.fit.take(range(32), np.zeros((32, 0)))
    used = {tuple(one.tolist()) for one in training.task.train.take(range(48), None)[0].flatten(1)}
    assert all(tuple(one.tolist()) in used for one in inputs.flatten(1))
    with torch.no_grad():
        output = training.network.eval()(inputs)
    (told,) = (line for line in read(tmp_path) if line["kind"] == "fit")
    assert told["loss"] == pytest.approx(float(F.cross_entropy(output, labels)), rel=1e-5)
    assert told["accuracy"] == float((output.argmax(1) == labels).float().mean())


def test_more_samples_than_there_are(tmp_path):
    with pytest.raises(SettingError) as caught:
        train(runs.settings(train_samples=5000), tmp_path)
    assert str(caught.value) == (
        "5000 samples are asked for but the data have 1437: pass fewer, or 0 for all of them."
    )


def test_a_log_that_goes_on_has_every_step_once(tmp_path):
    train(runs.settings(steps=5), tmp_path)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6}\n{"kind": "tra')  # after the checkpoint
    train(runs.settings(), tmp_path, resume=True)
    steps = [line["step"] for line in read(tmp_path) if line["kind"] == "train"]
    assert steps == list(range(1, 9))


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    train(runs.settings(steps=1), tmp_path)
    with pytest.raises(SettingError) as error:
        train(runs.settings(steps=1), tmp_path)
    assert str(error.value) == (
        f"The folder {tmp_path} has a run of 1 steps already: pass --resume to go on with it, or "
        "another folder."
    )


def test_a_full_disk_during_a_run(tmp_path, monkeypatch):
    """The sentence names the last good checkpoint, from which the run goes on."""
    saved = Checkpoints.save

    def fails_later(self, step, state, share):
        if step == 6:
            monkeypatch.setattr(os, "fsync", full)
        saved(self, step, state, share)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", os.fsync)
        context.setattr(Checkpoints, "save", fails_later)
        with pytest.raises(CheckpointError, match=r"\(No space left .* step 3 is intact"):
            train(runs.settings(), tmp_path / "full")
    monkeypatch.undo()
    train(runs.settings(), tmp_path / "full", resume=True)
    train(runs.settings(), tmp_path / "whole")
    runs.assert_same(tmp_path / "whole", tmp_path / "full")


def test_kfac_must_be_the_same(tmp_path):
    train(runs.settings(steps=1), tmp_path)
    (tmp_path / "settings.toml").unlink()
    with pytest.raises(CheckpointError) as error:
        train(runs.settings(steps=2, kfac=False), tmp_path, resume=True)
    assert str(error.value) == (
        "The checkpoint was written with K-FAC but the run is not: go on with the same settings."
    )


def test_another_run_is_not_gone_on_with(tmp_path):
    train(runs.settings(steps=1), tmp_path)
    with pytest.raises(SettingError) as error:
        train(runs.settings(steps=2, lr=0.5), tmp_path, resume=True)
    assert str(error.value) == (
        f"lr is 0.5 but the run in {tmp_path} has 0.02, and would be another: leave it out to go "
        "on, or name another folder with --out."
    )
    assert runs.checkpoint(tmp_path)["step"] == 1
    train(runs.settings(steps=2, log_every=3, micro_batch=16), tmp_path, resume=True)


def test_no_run_goes_on_to_what_is_behind_it(tmp_path):
    train(runs.settings(steps=3), tmp_path)
    with pytest.raises(SettingError) as error:
        train(runs.settings(steps=2), tmp_path, resume=True)
    assert str(error.value) == (
        f"The run lasts for 2 steps but that in {tmp_path} has 3 already: pass at least as many to "
        "go on."
    )


def test_the_clock_of_a_run_that_goes_on(monkeypatch):
    """Four steps after the fifth, of two seconds each, with a test of three in between."""
    now = 100.0
    monkeypatch.setattr(loop, "perf_counter", lambda: now)
    clock = loop.TrainingClock(SimpleNamespace(kfac=None), 5, 10.0)
    now += 6.0
    with clock.paused():
        now += 3.0
        assert clock.elapsed == 16.0
    now += 2.0
    assert clock.read(9) == {"seconds": 2.0}
    assert clock.elapsed == 18.0
    now += 1.0
    assert clock.read(10) == {"seconds": 1.0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "polynomial", "decay_power": 2.0}, [1, 0.75**2, 0.25, 0]),
        ({"schedule": "cosine"}, [1, (1 + 0.5**0.5) / 2, 0.5, 0]),
        ({"schedule": "cosine", "decay_begin": 2.0, "decay_end": 3.0}, [1, 1, 1, 0]),
        ({"schedule": "steps", "decay_at": (0.9, 2.0)}, [1, 0.1, 0.01, 0.01]),
        ({"schedule": "constant", "warmup": 2.0}, [0.05, 0.05 + 0.95 / 2, 1, 1]),
    ],
)
def test_learning_rates(values, expected):
    """At epochs 0, 1, 2 and 4 of 4, each of ten steps."""
    rate = optimizers.rate(runs.settings(lr=1.0, **values), 10.0, 40)
    assert [rate(step) for step in (0, 10, 20, 40)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
@pytest.mark.slow
def test_interrupted_by_a_signal_at_a_random_step(name, tmp_path):
    """Far from its end; then it goes on for a few steps. The settings are such that no step depends
    on the length of a run, which may therefore be another one. The command itself is killed; the
    other signals are those of a process that has imported torch already."""
    folder = tmp_path / "run"
    number, after = getattr(signal, name), random.Random(name).randint(2, 25)
    started = runs.command if name == "SIGKILL" else runs.forked_command
    with started(runs.settings(steps=2000), folder) as process:
        runs.wait_for(process, folder, after, 120)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number), err
    stopped = max(Checkpoints(folder / "checkpoints", 2, None).steps(), default=0)
    if not killed:
        assert after <= stopped < 2000
        assert out == (
            f"Stopped by {name} after step {stopped} of 2000; natgrad train --resume --out "
            f"{folder} goes on.\n"
        )
    length = runs.settings(steps=stopped + 5)
    train(length, folder, resume=True)
    train(length, tmp_path / "undisturbed")
    runs.assert_same(tmp_path / "undisturbed", folder)


def test_a_second_signal_ends_at_once():
    # A shell may have started the tests in the background, where Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert interruption.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_other_threads_leave_signals_alone():
    found = []

    def run():
        with Interruption() as interruption:
            found.append(interruption.signal)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0]
