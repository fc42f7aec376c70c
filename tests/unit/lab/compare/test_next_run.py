"""What is run next, and what follows from runs: against what a reader would say."""

import math
from dataclasses import replace
from statistics import median

import pytest

from natgrad.errors import SettingError
from natgrad.lab.compare import CONTENDERS, next_run, summary
from natgrad.lab.compare.next_run import (
    EndedRuns,
    assembled,
    chosen,
    jobs,
    known,
    rate,
    score,
    target,
)
from natgrad.lab.compare.results import Status
from natgrad.lab.schemes import optimizers_by_name
from unit.lab.compare import sample_setups as made

INF = math.inf


def played(asked, lowest):
    """Every run ends at ``1 + |log10 lr - log10 lowest|``; in order, who ran what at which rate."""
    found = {one.key: EndedRuns() for one in asked.contenders}
    told = []
    while left := list(jobs(asked, found)):
        job, had = left[0], found[left[0].contender.key]
        lr = rate(asked, job, found)
        told.append((job.contender.key, job.number, job.seed, lr, len(left)))
        best = lowest[job.contender.key]
        end = 1 + abs(math.log10(lr / best)) if best else None
        run = made.diverged(lr=lr, seed=job.seed)
        if end is not None:
            run = made.run(9.0, end, lr=lr, seed=job.seed)
        (had.trials if job.number else had.runs).append(run)
    return told, found


def test_the_order_of_runs():
    """A trial of each after the other, then a seed of each: what is late is late for all."""
    asked = made.setup("sgd", "kfac", trials=3, seeds=2)
    told, found = played(asked, {"sgd": 0.3, "kfac": 0.03})
    assert [(key, number, seed) for key, number, seed, _, _ in told] == [
        ("sgd", 1, 0),
        ("kfac", 1, 0),
        ("sgd", 2, 0),
        ("kfac", 2, 0),
        ("sgd", 3, 0),
        ("kfac", 3, 0),
        ("sgd", 0, 1),
        ("kfac", 0, 1),
        ("sgd", 0, 2),
        ("kfac", 0, 2),
    ]
    assert [left for *_, left in told] == list(range(10, 0, -1))
    assert [lr for key, number, _, lr, _ in told if (key, number > 0) == ("sgd", True)] == [
        0.1,
        0.4,
        0.025,
    ]
    assert {lr for key, number, _, lr, _ in told if (key, number) == ("sgd", 0)} == {0.4}
    assert {lr for key, number, _, lr, _ in told if (key, number) == ("kfac", 0)} == {0.03}
    assert {key: len(had.trials) for key, had in found.items()} == {"sgd": 3, "kfac": 3}


def test_everybody_gets_more_trials_until_every_best_is_enclosed():
    """A factor of 2 below and above it; nobody gets more than the others."""
    asked = made.setup("sgd", "kfac", trials=3, most_trials=9, seeds=1)
    told, found = played(asked, {"sgd": 0.1, "kfac": 0.03 * 4**2})
    assert {key: len(had.trials) for key, had in found.items()} == {"sgd": 7, "kfac": 7}
    for key, best in (("sgd", 0.1), ("kfac", 0.48)):
        tried = {run.lr for run in found[key].trials}
        assert {best / 2, best, best * 2} <= tried
        assert [run.lr for run in found[key].runs] == [best]
    assert [left for *_, left in told][:8] == [8, 7, 6, 5, 4, 3, 4, 3]  # two more at a time
    assert assembled(asked, found, {}).trials == 7


def test_more_trials_end_at_the_most():
    asked = made.setup("sgd", "kfac", trials=2, most_trials=4, seeds=1)
    _, found = played(asked, {"sgd": 0.1, "kfac": 1e9})
    assert {key: len(had.trials) for key, had in found.items()} == {"sgd": 4, "kfac": 4}
    _, found = played(asked, {"sgd": 0.1, "kfac": None})  # diverges at every rate
    assert {key: len(had.trials) for key, had in found.items()} == {"sgd": 4, "kfac": 4}
    assert not found["kfac"].runs


def test_who_comes_later_has_as_many_trials_as_the_others():
    """And nobody has a further one: the others' runs have the rate that was chosen."""
    asked = made.setup("sgd", trials=3, most_trials=9, seeds=1)
    _, found = played(asked, {"sgd": 0.1})
    assert len(found["sgd"].trials) == 5
    more = made.setup("sgd", "kfac", trials=3, most_trials=9, seeds=1)
    both = {**found, "kfac": EndedRuns()}
    assert [job.number for job in jobs(more, both) if job.contender.key == "kfac"] == [
        *range(1, 6),
        0,
    ]
    both["kfac"].trials.extend(made.run(float(i)) for i in range(5))  # the last is the outermost
    assert [job.number for job in jobs(more, both)] == [0]


def test_what_is_not_tuned_has_no_trials():
    one = CONTENDERS["sgd"]
    fixed = replace(one, key="fixed", tuned=False, lr=0.7)
    asked = replace(made.setup("sgd", trials=2, seeds=2), contenders=(one, fixed))
    told, found = played(asked, {"sgd": 0.1, "fixed": 0.1})
    assert [(number, lr) for key, number, _, lr, _ in told if key == "fixed"] == [(0, 0.7)] * 2
    entry = assembled(asked, found, {}).entries[1]
    assert (entry.chosen, entry.edge, entry.untuned) == (0.7, 0, True)
    assert summary.rate_text(entry) == "0.7, as it is"
    assert assembled(asked, found, {}).trials == 2


def test_none_of_whose_trials_comes_to_its_end_has_no_runs():
    asked = made.setup("sgd", "kfac", trials=2, seeds=2)
    told, found = played(asked, {"sgd": 0.1, "kfac": None})
    assert [key for key, number, *_ in told if not number] == ["sgd", "sgd"]
    assert chosen(asked, CONTENDERS["kfac"], found["kfac"].trials) == (None, 0)
    assert [left for *_, left in told] == [8, 7, 6, 5, 2, 1]


def test_those_that_cannot_take_part_are_left_out_of_the_plan():
    asked = made.setup("sgd", "muon", trials=1, seeds=1)
    assert {job.contender.key for job in jobs(asked, {"sgd": EndedRuns()})} == {"sgd"}


def test_folders():
    asked = made.setup("sgd", trials=2, seeds=1)
    folders = [job.folder for job in jobs(asked, {"sgd": EndedRuns()})]
    assert folders == ["runs/sgd/trial-1", "runs/sgd/trial-2", "runs/sgd/seed-1"]


def test_more_seeds_are_added():
    asked = made.setup("sgd", trials=1, seeds=3)
    had = EndedRuns(
        [made.run(1.0)],
        [made.run(1.0, seed=1), made.run(1.0, seed=2)],
    )
    (job,) = jobs(asked, {"sgd": had})
    assert (job.seed, job.number) == (3, 0)
    assert rate(asked, job, {"sgd": had}) == 0.1


def test_scores():
    """Lowest first: done before diverged; the target, then the end, then the loss."""
    accuracy = {"metric": "accuracy", "on": "test"}
    exact = made.setup(**accuracy)
    a, b, c = (
        made.run(1.0, 1.0, values={"test_accuracy": (0.5, last), "test_loss": (1.0, loss)})
        for last, loss in ((0.9, 0.3), (0.9, 0.2), (0.8, 0.1))
    )
    order = sorted((c, made.diverged(), a, b), key=lambda run: score(exact, run))
    assert order[:3] == [b, a, c]
    soon, low = made.run(0.4, 0.39, 0.38), made.run(0.6, 0.5, 0.1)
    assert score(made.setup(), low) < score(made.setup(), soon)
    given = made.setup(target=0.4)
    assert score(given, soon) < score(given, low)
    never = score(made.setup(target=0.01), low)
    assert never[:2] == (0.0, INF)
    failed = made.run(0.1, status=Status.FAILED)
    assert never < score(made.setup(target=0.01), failed) == (INF,) * 4


def test_the_edge():
    asked = made.setup("sgd", trials=3)
    low, middle, high = (
        made.run(3.0),
        made.run(2.0),
        made.run(1.0),
    )
    assert chosen(asked, CONTENDERS["sgd"], [middle, high, low]) == (0.4, 1)
    assert chosen(asked, CONTENDERS["sgd"], [middle, low, high]) == (0.025, -1)
    assert chosen(asked, CONTENDERS["sgd"], [high, middle, low]) == (0.1, 0)


@pytest.mark.parametrize("order", [("kfac", "sgd"), ("sgd", "kfac")])
def test_the_target_is_what_a_rival_ends_with(order):
    asked = made.setup(*order)
    ends = (0.3, 0.1, 0.2)
    found = {
        "kfac": EndedRuns([], [made.run(0.01)]),
        "sgd": EndedRuns([], [made.run(1.0, end) for end in ends]),
    }
    assert target(asked, found) == (median(ends), "what SGD ends with")
    found["sgd"].runs.append(made.diverged())
    assert target(asked, found) == (0.2, "what SGD ends with")


def test_the_target_is_that_of_the_best_rival():
    asked = made.setup("sgd", "adamw", "kfac", "naturalmuon")
    ends = {"sgd": 0.3, "adamw": 0.2, "kfac": 0.1, "naturalmuon": 0.05}
    found = {key: EndedRuns([], [made.run(end)]) for key, end in ends.items()}
    assert target(asked, found) == (0.2, "what AdamW ends with")
    assert [one.is_natgrads for one in asked.contenders] == [False, False, True, True]


def test_the_target_without_sgd_or_any_end():
    asked = made.setup("adamw", "kfac")
    found = {
        "adamw": EndedRuns([], [made.diverged()]),
        "kfac": EndedRuns([], [made.run(0.5)]),
    }
    assert target(asked, found) == (0.5, "what K-FAC, SGD ends with")
    found["kfac"].runs.clear()
    assert target(asked, found) == (None, "nothing has come to its end yet")
    assert target(made.setup("sgd", target=3.0), {}) == (3.0, "given")


def test_a_run_that_is_under_way_is_shown():
    asked = made.setup("sgd", "kfac", trials=1, seeds=1)
    found = {"sgd": EndedRuns(), "kfac": EndedRuns()}
    job = next(jobs(asked, found))
    sgd, kfac = assembled(asked, found, {}, (job, 0.1)).entries
    assert [(run.status, run.lr) for run in sgd.trials] == [(Status.RUNNING, 0.1)]
    assert not kfac.trials
    assert sgd.chosen is None


def test_all_runs_are_judged_by_the_target():
    asked = made.setup("sgd", "kfac", trials=1, seeds=1)
    found = {
        "sgd": EndedRuns([made.run(0.9, 0.8)], [made.run(0.9, 0.5, seed=1)]),
        "kfac": EndedRuns([made.run(0.5, 0.1)], [made.run(0.4, 0.1, seed=1)]),
    }
    seen = assembled(asked, found, {})
    assert seen.target == 0.5
    steps = [
        [run.reached and run.reached.step for run in (*one.trials, *one.runs)]
        for one in seen.entries
    ]
    assert steps == [[None, 20], [10, 10]]


def test_only_ended_runs_count_when_a_comparison_goes_on():
    asked = made.setup("sgd", "kfac", trials=1, seeds=2)
    found = {
        "sgd": EndedRuns([made.run(0.9)], [made.run(0.9, seed=1)]),
        "kfac": EndedRuns(),
    }
    job = next(jobs(asked, found))
    before = assembled(asked, found, {}, (job, 0.03))
    again = known(asked, before)
    assert [len(had.trials) + len(had.runs) for had in again.values()] == [2, 0]
    assert list(jobs(asked, again)) == list(jobs(asked, found))
    assert known(asked, None) == {"sgd": EndedRuns(), "kfac": EndedRuns()}


def test_results_are_not_lost_with_a_library(monkeypatch):
    asked = made.setup("sgd", "soap", trials=1, seeds=1)
    both = {"sgd": EndedRuns([made.run(1.0)]), "soap": EndedRuns([made.run(1.0)])}
    monkeypatch.setattr(optimizers_by_name, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="SOAP comes with pytorch_optimizer, which is not"):
        known(asked, assembled(asked, both, {}))
    without = known(asked, assembled(asked, {"sgd": both["sgd"]}, {}))
    assert list(without) == ["sgd"]
    entry = next_run.assembled(asked, without, {}).entries[1]
    assert entry.missing.startswith("SOAP comes with")
