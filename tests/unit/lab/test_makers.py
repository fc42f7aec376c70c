"""Names with arguments, and all words that settings of a run know."""

import pytest

from natgrad import Cholesky, Kronecker, Relative
from natgrad.curvature.subsample import Subsample
from natgrad.errors import SettingError
from natgrad.inverses import LowRank
from natgrad.lab import names
from natgrad.lab.registry import factories
from natgrad.lab.schemes.settings_by_name import RunRequest
from natgrad.schedules import (
    BatchInterval,
    Doubling,
    Drift,
    GrowingInterval,
    LevenbergMarquardt,
    Staggered,
    StepDecay,
    TwoPhaseInterval,
    WarmupDamping,
)
from unit.lab.registered_shapes import Rising, Shape, Square, rising

HERE = "unit.lab.registered_shapes"
ASKED = RunRequest(steps_per_epoch=12.5, batch_size=512, ramp=True)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("every(steps=7)", 7),
        ("doubling(at_most=9)", Doubling(9)),
        ("growing", GrowingInterval(12.5)),
        ("growing(every=2, at_most=6, after=30)", GrowingInterval(12.5, 2, 6, 30)),
        ("two-phase(then=8)", TwoPhaseInterval(12.5, then=8)),
        ("batch", BatchInterval(512)),
        ("step-decay(value=1, factor=2, at=[2, 4])", StepDecay(1, 2, (25, 50))),
        ("step-decay(value=1, factor=2, at=2)", StepDecay(1, 2, (25,))),
        ("drift(tolerance=0.1)", Drift(0.1)),
        ("drift(tolerance=0.1, at_most=50)", Drift(0.1, 50)),
        ("staggered(every=20)", Staggered(20)),
        ("each(A=10, G=growing)", {"A": Doubling(10), "G": GrowingInterval(12.5)}),
        (
            "{each = {A = {drift = {tolerance = 0.5}}, G = 3}}",
            {"A": Drift(0.5), "G": Doubling(3)},
        ),
    ],
)
def test_intervals(given, made):
    assert names.INTERVALS[given](ASKED) == made


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("relative", Relative()),
        ("relative(share=0.3)", Relative(0.3)),
        ("warmup(start=0.1, target=0.001, steps=40)", WarmupDamping(0.1, 0.001, 40)),
        ("levenberg-marquardt(start=0.5, every=2)", LevenbergMarquardt(0.5, 2)),
        ("step-decay(value=0.1, factor=0.5, at=1)", StepDecay(0.1, 0.5, (12,))),
    ],
)
def test_dampings(given, made):
    assert names.DAMPINGS[given](ASKED) == made


def test_other_axes_take_arguments_too():
    assert names.INVERSES["cholesky(pi_corrected=false)"]() == Cholesky(pi_corrected=False)
    assert names.INVERSES["low-rank(rank=8)"]() == LowRank(8)
    assert names.STRUCTURES["kronecker(sharing=reduce)"]() == Kronecker("reduce")
    assert names.SUBSAMPLES["subsample(amount=0.5, seed=3)"]() == Subsample(0.5, 3)
    assert names.CURVATURES["monte-carlo(draws=4)"](names.CurvatureRequest(seed=2)).samples == 4


def test_one_s_own():
    """A function of the step as it is; with arguments, or a class, what makes one."""
    assert names.INTERVALS[f"{HERE}:rising"](ASKED) is rising
    made = names.INTERVALS[f"{HERE}:Rising(by=4)"](ASKED)
    assert isinstance(made, Rising)
    assert made(8) == 3
    pair = names.INTERVALS[f"each(A={HERE}:Rising(by=2), G=5)"](RunRequest())
    assert (pair["A"](4), pair["G"]) == (3, 5)
    assert names.INTERVALS[f"each(A={HERE}:rising, G=5)"](ASKED)["A"] is rising
    shapes = factories("shape", Shape, {"square": Square})
    assert shapes[f"{HERE}:needs(sides=9)"]().sides == 9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "growin(every=5)",
            "There is no interval 'growin': name one of each, every, doubling, growing, two-phase, "
            "batch, step-decay, drift, staggered, or a function of the step as module:function.",
        ),
        (
            "growing(evry=5)",
            "There is no argument evry of interval growing: it takes every, at_most, after.",
        ),
        (
            "each(A=drift, G=1)",
            "Interval drift is given no tolerance but needs it: write drift(tolerance=…).",
        ),
        (
            "each(A=1)",
            "Interval each is given no G but needs it: write each(G=…).",
        ),
        (
            "growing(every=0)",
            "GrowingInterval.every is 0 but must be a whole number of at least 1: pass such an "
            "int.",
        ),
        ("[1, 2]", "refresh_every is '[1, 2]', which is no interval: name one of each, "),
    ],
)
def test_what_is_refused_before_anything_runs(given, message):
    with pytest.raises(SettingError) as error:
        names.INTERVALS.normal(given, "refresh_every")
    assert str(error.value).startswith(message)


def test_what_has_no_arguments():
    with pytest.raises(SettingError) as error:
        names.STRUCTURES.check("unitwise(of=3)")
    assert str(error.value) == "There is no argument of of structure unitwise: it takes none."


def test_what_is_one_s_own_is_not_imported_to_check_it():
    given = "each(A=nowhere:at_all(x=1), G=5)"
    assert names.INTERVALS.normal(given, "refresh_every") == given
    with pytest.raises(SettingError) as error:
        names.INTERVALS[f"{HERE}:Rising(of=4)"](ASKED)
    assert str(error.value).startswith(f"Interval '{HERE}:Rising' could not be built (")
