"""The comparison of all tasks: kept small, gone on with, and written into the page."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import comparison, comparison_table, comparison_tasks
from benchmarks.comparison_tasks import TASKS, BenchmarkTask
from natgrad.lab.compare import CONTENDERS, Comparison
from natgrad.lab.compare.contender import MORE
from natgrad.lab.compare.next_run import EndedRuns, assembled, known
from unit.lab.compare import sample_setups as made
from unit.lab.train import digit_runs as runs

TINY = BenchmarkTask(
    "Tiny",
    "digits-cnn",
    {**made.TINY, "steps": 6, "evaluate_every": 2},
    dict.fromkeys((*comparison_tasks.RIVALS[1:], *comparison_tasks.OURS[1:]), "not asked"),
    tuning_steps=3,
    most_trials=5,
)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_asked(name):
    """The same task for all, no weight decay, rates that end at 0, all rivals or a reason."""
    setup = TASKS[name].setup()
    assert setup.task.weight_decay == 0
    assert setup.task.schedule in ("polynomial", "cosine")
    assert (setup.trials, setup.seeds, setup.threads) == (5, 3, 1)
    keys = {one.key for one in setup.contenders}
    assert {*comparison_tasks.OURS, "adamw", "muon", "soap"} <= keys
    assert keys & {"torch-muon", "muon-hidden"}
    assert keys | TASKS[name].left_out.keys() == {
        *comparison_tasks.OURS,
        *comparison_tasks.RIVALS,
    }
    assert all(TASKS[name].left_out.values())
    if setup.tuning_steps is not None:
        assert 0.1 <= setup.tuning_steps / setup.task.steps <= 0.5


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "TASKS", {"tiny": TINY})
    monkeypatch.setattr(comparison_tasks, "TASKS", {"tiny": TINY})
    file = tmp_path / "PAGE.md"
    file.write_text("before\n<!-- comparison -->\nold\n<!-- /comparison -->\nafter\n")
    with runs.made_up_digits():
        yield file


def asked(page, *arguments):
    options = ["--folder", str(page.parent / "results"), "--page", str(page), "--seeds", "1"]
    assert comparison.main([*options, *arguments]) == 0
    return page.read_text()


def test_it_runs_goes_on_and_is_written(page):
    said = asked(page)
    assert said.startswith("before\n<!-- comparison -->\nWritten by")
    assert said.endswith("<!-- /comparison -->\nafter\n")
    assert "old" not in said
    where = page.parent / "results" / "tiny"
    first = Comparison.read(where)
    assert [len(one.runs) for one in first.entries] == [1, 1]
    for one in first.entries:
        assert all(len(trial.curve.steps) == 1 for trial in one.trials)
        assert len(one.runs[0].curve.steps) > 1
    before = (where / "results.json").read_text()
    (where / "runs").rename(page.parent / "elsewhere")  # as in a clone, which has no runs
    assert asked(page) == said
    assert (where / "results.json").read_text() == before
    more = asked(page, "--seeds", "2")
    second = Comparison.read(where)
    assert [one.chosen for one in second.entries] == [one.chosen for one in first.entries]
    for one, other in zip(first.entries, second.entries, strict=True):
        assert [(t.lr, t.curve) for t in one.trials] == [(t.lr, t.curve) for t in other.trials]
    assert [len(one.runs) for one in second.entries] == [2, 2]
    assert "then 2 other seeds" in more
    assert json.loads((where / "facts.json").read_text())["commit"]


def test_rivals_may_come_first(page):
    """And natgrad's own get as many trials when they come, while nothing is run twice."""
    asked(page, "--rivals")
    where = page.parent / "results" / "tiny"
    first = Comparison.read(where)
    assert [one.key for one in first.entries] == ["adamw"]
    asked(page)
    second = Comparison.read(where)
    assert [one.key for one in second.entries] == ["adamw", "naturalmuon"]
    assert second.entries[0] == first.entries[0]
    assert {len(one.trials) for one in second.entries} == {first.trials}


def test_a_budget_ends_it_and_what_is_there_is_written(page):
    said = asked(page, "--budget-minutes", "0.002")
    assert "<!-- /comparison -->" in said
    done = asked(page)
    assert "Tiny" in done


def test_costs_are_of_whole_cycles_and_make_the_seconds(page):
    asked(page)
    said = asked(page, "--cost", "--rounds", "1")
    timed = json.loads((page.parent / "results" / "tiny" / "costs.json").read_text())
    assert timed["seconds"].keys() == {"adamw", "naturalmuon"}
    assert all(seconds > 0 for seconds in timed["seconds"].values())
    assert "medians of 1 interleaved rounds, 1 thread, commit" in said


def test_a_page_without_marks_is_not_written_to(page):
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="has no lines <!-- comparison -->"):
        asked(page, "--table")
    assert page.read_text() == "nothing"


def findings(ends, costs, **others):
    """Each ends as told, 10 steps apart."""
    contenders = tuple({**CONTENDERS, **MORE}[key] for key in ends)
    setup = replace(made.setup("sgd", trials=1, seeds=1), contenders=contenders)
    had = {
        key: EndedRuns(
            [] if key.endswith("untuned") else [made.run(1.0)],
            [one if not isinstance(one, tuple) else made.run(*one, seed=1) for one in curves],
        )
        for key, curves in ends.items()
    }
    return comparison_table.TaskFindings("Toy", assembled(setup, had, {}), costs, **others)


def test_the_overview_says_who_is_first():
    one = findings(
        {
            "adamw": [(0.9, 0.8, 0.7, 0.5)],
            "muon": [(0.8, 0.6, 0.5, 0.4)],
            "naturalmuon": [(0.6, 0.4, 0.3, 0.2)],
            "naturalmuon-untuned": [(0.7, 0.6, 0.55, 0.45)],
        },
        {"adamw": 1.0, "muon": 1.0, "naturalmuon": 2.5, "naturalmuon-untuned": 2.5},
    )
    said = comparison_table.overview([one])
    row = next(line for line in said.splitlines() if line.startswith("| Toy"))
    assert row == (
        "| Toy | 0.400 (what Muon ends with) | Muon, 40 | 20 | – | never | Muon, 40.0 | 50.0 | – |"
    )
    assert said.splitlines()[-2:] == [
        "NaturalMuon is first in steps on 1 of 1, ends lowest on 1, and is first in seconds on 0 "
        "of 1; at worst it takes 1.25 times the first rival's seconds.",
        "Untuned, NaturalMuon ends lower than AdamW with the best of its learning rates on 1 of 1.",
    ]


def test_failures_are_in_every_column():
    lost = made.diverged(seed=2)
    one = findings(
        {
            "muon": [(0.8, 0.6, 0.5, 0.4), (0.8, 0.6, 0.5, 0.4)],
            "naturalmuon": [(0.6, 0.4, 0.3, 0.2), lost],
        },
        {"muon": 1.0, "naturalmuon": 0.5},
        left_out={"shampoo": "too slow"},
    )
    said = comparison_table.details(one)
    row = next(line for line in said.splitlines() if line.startswith("| NaturalMuon"))
    assert "0.200, 1 of 2 end" in row
    assert "20, 1 of 2 reach it" in row
    assert "10.0, 1 of 2 reach it" in row
    assert "1 of 2 runs diverged" in row
    assert "Not among them: shampoo: too slow." in said
    claims = comparison_table.claims([one])[0]
    assert claims == (
        "NaturalMuon is first in steps on 0 of 1, ends lowest on 0, and is first in seconds on 0 "
        "of 1; at worst it takes inf times the first rival's seconds."
    )


def test_small_results_choose_the_same_rates():
    setup = made.setup("sgd", "adamw", trials=3, seeds=1)
    had = {
        key: EndedRuns([made.run(9.0, end) for end in ends], [made.run(1 / 3, 2 / 3, seed=1)])
        for key, ends in (("sgd", (0.3, 0.2, 0.4)), ("adamw", (0.1, 0.2, 0.4)))
    }
    whole = assembled(setup, had, {})
    small = comparison.small(whole)
    again = assembled(setup, known(setup, small), {})
    assert [one.chosen for one in again.entries] == [one.chosen for one in whole.entries]
    assert again.entries[0].runs[0].curve.values["fit_loss"] == (0.3333333, 0.6666667)
