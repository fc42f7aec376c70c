"""Pictures of a comparison against its numbers, and medians against a slow count."""

import math
import re
from dataclasses import replace
from statistics import median

import pytest

from natgrad.lab.compare import table
from natgrad.lab.compare.results import ComparedCurve, ComparedRun, Status
from natgrad.lab.compare.setup import Measure
from natgrad.lab.report.page import comparison_curves, medians, target_bars, tuning
from natgrad.lab.report.page.medians import curve as middle_of
from unit.lab.report import sample_folders as made
from unit.lab.report.read_back import curve, parsed

pytest.importorskip("matplotlib")

LOSS, ACCURACY = Measure("loss", "fit"), Measure("accuracy", "test")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    _, comparison = made.comparison(tmp_path_factory.mktemp("compared"))
    return comparison


def ran(steps, values, status=Status.DONE, key="fit_loss", pace=1.0):
    seconds = tuple(pace * step for step in steps)
    return ComparedRun(
        0.1, 1, "", status, curve=ComparedCurve(tuple(steps), seconds, {key: tuple(values)})
    )


def test_medians_of_runs_that_all_came_to_their_end():
    runs = [ran((2, 4), (3.0, 1.0)), ran((2, 4), (9.0, 2.0)), ran((2, 4), (4.0, 7.0), pace=3.0)]
    found = middle_of(runs, LOSS)
    assert found.steps == (2, 4)
    assert found.values == (4.0, 2.0)
    assert found.seconds == (2.0, 4.0)


@pytest.mark.parametrize(("measure", "worst"), [(LOSS, math.inf), (ACCURACY, -math.inf)])
def test_a_run_that_failed_is_worse_than_all_others(measure, worst):
    key = measure.key
    runs = [
        ran((2, 4, 6), (3.0, 1.0, 0.5), key=key),
        ran((2, 4, 6), (4.0, 2.0, 0.7), key=key),
        ran((2,), (1.0,), Status.DIVERGED, key=key),
        ran((2, 4), (5.0, 6.0), Status.RUNNING, key=key),
    ]
    found = middle_of(runs, measure)
    slow = {
        2: median([3.0, 4.0, 1.0, 5.0]),
        4: median([1.0, 2.0, worst, 6.0]),
        6: median([0.5, 0.7, worst]),
    }
    assert dict(zip(found.steps, found.values, strict=True)) == slow


def test_where_most_have_failed_there_is_no_median():
    runs = [ran((2, 4), (3.0, 1.0)), ran((2,), (1.0,), Status.FAILED), ran((), (), Status.FAILED)]
    found = middle_of(runs, LOSS)
    assert (found.steps, found.values) == ((2,), (3.0,))  # of 1, 3 and what never began
    assert middle_of(runs[1:], LOSS).steps == ()
    assert middle_of([], LOSS).values == ()


def test_what_is_measured_comes_in_order(found):
    assert medians.measures(found) == [LOSS, Measure("loss", "test"), ACCURACY]
    on_test = replace(found, measure=ACCURACY)
    assert medians.measures(on_test) == [ACCURACY, Measure("loss", "test")]


def test_the_run_in_the_middle(found):
    runs = tuple(
        replace(run, seconds=seconds)
        for run, seconds in zip(found.entries[0].runs, (9.0, 2.0, 5.0), strict=True)
    )
    assert medians.middle(replace(found.entries[0], runs=runs)) is runs[2]
    assert medians.middle(replace(found.entries[0], runs=runs[:2])) is runs[1]
    assert medians.middle(replace(found.entries[0], runs=())) is None


@pytest.mark.parametrize("against", ["steps", "seconds"])
def test_curves_are_all_seeds_and_their_median(found, against):
    (picture,) = (
        one
        for one in comparison_curves.curves(found, LOSS, "p1")
        if one.name == f"p1-fit_loss-{against}"
    )
    assert picture.title == f"Training loss against {against}"
    plot = parsed(picture.drawn(None)).one(kind="plot")
    drawn = {one.one("title").text: curve(plot, one) for one in plot.all(kind="curve")}
    for entry in found.entries[:3]:
        for run in entry.runs:
            shown = drawn.pop(f"{entry.name}, seed {run.seed}")
            x = run.curve.steps if against == "steps" else run.curve.seconds
            y = run.curve.values["fit_loss"]
            assert [a for a, _ in shown] == pytest.approx(x, rel=2e-3, abs=2e-3)
            assert [b for _, b in shown] == pytest.approx(y, rel=4e-3)
        shown = drawn.pop(f"{entry.name}, median of {len(entry.runs)} seeds")
        middle = middle_of(entry.runs, LOSS)
        x = middle.steps if against == "steps" else middle.seconds
        assert [a for a, _ in shown] == pytest.approx(x, rel=2e-3, abs=2e-3)
        assert [b for _, b in shown] == pytest.approx(middle.values, rel=4e-3)
    assert not drawn
    ends = middle_of(found.entries[0].runs, LOSS).values[-1]
    assert f"SGD ends at {ends:.3g}" in picture.alt


def test_one_seed_is_a_strong_line_without_a_median(found):
    alone = tuple(replace(one, runs=one.runs[:1]) for one in found.entries)
    picture, _ = comparison_curves.curves(replace(found, entries=alone), LOSS, "p1")
    groups = list(parsed(picture.drawn(None)).all(kind="curve"))
    assert len(groups) == 3
    assert not any("median" in one.one("title").text for one in groups)
    assert all("opacity" not in one.one("path").attributes["style"] for one in groups)


def test_the_target_belongs_to_what_is_compared(found):
    for measure, lines in ((LOSS, 1), (Measure("loss", "test"), 0)):
        picture, _ = comparison_curves.curves(found, measure, "p1")
        text = picture.drawn(None)
        assert text.count("<title>target: 0.12</title>") == lines


def test_no_run_has_ended(found):
    begun = tuple(replace(one, runs=()) for one in found.entries)
    assert comparison_curves.curves(replace(found, entries=begun), LOSS, "p1") == []
    assert target_bars.pictures(replace(found, entries=begun), "p1") == []
    untried = tuple(replace(one, trials=()) for one in begun)
    assert tuning.picture(replace(found, entries=untried), "p1") is None


def test_tuning_shows_every_trial_and_marks_the_chosen(found):
    picture = tuning.picture(found, "p1")
    plot = parsed(picture.drawn(None)).one(kind="plot")
    titled = {one.one("title").text: one for one in plot.all("g") if _titled(one)}
    for entry in found.entries[:3]:
        done = sorted((t.lr, t.final) for t in entry.trials if t.final is not None)
        shown = curve(plot, titled[entry.name])
        assert [x for x, _ in shown] == pytest.approx([lr for lr, _ in done], rel=5e-3)
        assert [y for _, y in shown] == pytest.approx([end for _, end in done], rel=5e-3)
        (ring,) = titled[f"{entry.name}: chosen"].all("use")
        assert _place(plot, ring)[0] == pytest.approx(entry.chosen, rel=5e-3)
        (cross,) = titled[f"{entry.name}: diverged or failed"].all("use")
        at, height = _place(plot, cross)
        assert at == pytest.approx(entry.trials[-1].lr, rel=5e-3)
        assert height > max(end for _, end in done)
    assert "chosen: SGD 0.1, AdamW <3 0.001, K-FAC, SGD 0.1; 3 of 9 trials failed" in picture.alt


def _titled(group):
    return any(child.tag == "title" for child in group.children)


def _place(plot, use):
    from unit.lab.report.read_back import _scale

    x, y = (float(use.attributes[name]) for name in "xy")
    return _scale(plot.attributes["data-x"])(x), _scale(plot.attributes["data-y"])(y)


def test_all_trials_failed(found):
    lost = tuple(
        replace(
            one,
            chosen=None,
            trials=tuple(replace(t, status=Status.FAILED, final=None) for t in one.trials),
        )
        for one in found.entries
    )
    picture = tuning.picture(replace(found, entries=lost), "p1")
    assert "chosen: none; 9 of 9 trials failed" in picture.alt
    assert len(list(parsed(picture.drawn(None)).all("use"))) >= 9


@pytest.fixture
def sooner(found):
    """With a target that some meet, at different steps."""
    entries = (
        replace(one, runs=tuple(run.judged(LOSS, 0.25) for run in one.runs))
        for one in found.entries
    )
    return replace(found, entries=tuple(entries), target=0.25)


def test_bars_say_what_the_table_says(sooner):
    steps, seconds = target_bars.pictures(sooner, "p1")
    assert (steps.name, steps.title) == ("p1-to-steps", "Steps to training loss 0.250")
    cells = table(sooner)
    for picture, column in ((steps, "steps to target"), (seconds, "seconds to target")):
        words = {one.text for one in parsed(picture.drawn(None)).all("text")}
        said = picture.alt.partition(": ")[2].removesuffix(".").split("; ")
        for name, cell in zip(cells.column("optimizer"), cells.column(column), strict=True):
            if name != "Shampoo":
                value = re.match("[^ ,]+", cell)[0]
                (own,) = (one for one in said if one.startswith(f"{name} {value}"))
                assert own.removeprefix(f"{name} ") in words
        assert sum("2 of 3 reach it" in one for one in said) == 1


def test_bars_are_as_long_as_the_median(sooner):
    from natgrad.lab.report.canvas import figure
    from natgrad.lab.report.page.figure import Sheet

    steps, _ = target_bars.pictures(sooner, "p1")
    with figure(steps.width, steps.height, None) as drawn:
        steps.draw(Sheet(drawn))
    lengths = [patch.get_width() for patch in drawn.axes[0].patches]
    there = [[run.reached.step for run in one.runs if run.reached] for one in sooner.entries[:3]]
    assert len(set(there[0])) > 1
    assert lengths == [median(one) if one else 0.0 for one in there]
    strokes = [sorted(line.get_xdata()) for line in drawn.axes[0].lines]
    assert strokes == [sorted(one) for one in there]


def test_failures_are_listed(found):
    assert comparison_curves.failures(found) == [
        ("SGD", "trial, learning rate 1", "diverged after 40 steps"),
        ("AdamW <3", "trial, learning rate 0.01", "diverged after 40 steps"),
        ("AdamW <3", "seed 4", "failed after 12 steps: No."),
        ("K-FAC, SGD", "trial, learning rate 1", "diverged after 40 steps"),
    ]


def test_k_fac_has_the_first_colours(found):
    looks = comparison_curves.looks(found, "p1")
    assert looks["kfac"].colour == "#0072b2"
    assert len({one.colour for one in looks.values()}) == 4
    assert looks["sgd"].key == "p1-sgd"
