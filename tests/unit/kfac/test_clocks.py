"""Settings at a step, the ranges that hold them, and the clocks that intervals drive."""

import math

import pytest
import torch

from natgrad.checks import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, Range
from natgrad.errors import SettingError
from natgrad.kfac.clocks import Clock
from natgrad.schedules import Drift, GrowingInterval, StepDecay, value_at


def due_steps(clock, steps):
    """The steps on which the clock is due when each of them is marked."""
    found = []
    for step in range(steps):
        if clock.due(step):
            clock.mark(step)
            found.append(step)
    return found


class TestValueAt:
    def test_number_and_function(self):
        assert value_at(0.5, 3, "decay", FRACTION) == 0.5
        assert value_at(lambda step: step / 10, 3, "decay", FRACTION) == 0.3
        assert value_at(torch.tensor(2.0), 0, "damping", POSITIVE) == 2.0

    @pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "0.1", True, None, [1.0]])
    def test_bad_number(self, bad):
        with pytest.raises(SettingError) as error:
            value_at(bad, 3, "damping", POSITIVE)
        assert str(error.value) == (
            f"damping is {bad!r} but must be finite and above 0: "
            "pass such a number, or a function of the step that returns one."
        )

    def test_tensor_of_many_numbers(self):
        with pytest.raises(SettingError, match=r"damping is tensor\(\[1., 1.\]\) but must be"):
            value_at(torch.ones(2), 0, "damping", POSITIVE)

    def test_bad_function(self):
        with pytest.raises(SettingError) as error:
            value_at(lambda step: step / 2, 4, "decay", FRACTION)
        assert str(error.value) == (
            "decay is 2.0 at step 4 but must be in [0, 1): correct the function passed as decay."
        )

    @pytest.mark.parametrize(
        ("allowed", "text", "inside", "outside"),
        [
            (POSITIVE, "finite and above 0", [1e-300], [0]),
            (NOT_NEGATIVE, "finite and at least 0", [0], [-1e-300, math.inf]),
            (AT_LEAST_ONE, "finite and at least 1", [1], [0.99]),
            (FRACTION, "in [0, 1)", [0, 0.99], [1, -0.1]),
            (Range(0, 1, open_low=True), "in (0, 1]", [1], [0]),
            (Range(high=2), "finite and at most 2", [2, -1e300], [2.1, -math.inf]),
            (Range(high=2, open_high=True), "finite and below 2", [1.9], [2]),
            (Range(), "finite", [-5, 5], [math.nan, math.inf]),
        ],
    )
    def test_range(self, allowed, text, inside, outside):
        assert str(allowed) == text
        assert all(x in allowed for x in inside)
        assert not any(x in allowed for x in outside)


class TestClock:
    @pytest.mark.parametrize("interval", [1, 2, 7, 100])
    def test_constant_and_function_agree(self, interval):
        constant = due_steps(Clock(interval), 250)
        assert constant == list(range(0, 250, interval))
        assert constant == due_steps(Clock(lambda step: interval), 250)

    def test_function_counts_from_the_last_mark(self):
        clock = Clock(lambda step: 1 if step < 3 else 4)
        assert due_steps(clock, 15) == [0, 1, 2, 6, 10, 14]

    def test_fractions_are_rounded(self):
        assert due_steps(Clock(lambda step: 2.6), 10) == [0, 3, 6, 9]

    def test_a_due_step_stays_due_once_marked(self):
        clock = Clock(lambda step: 5)
        clock.mark(0)
        assert clock.due(0)
        assert not clock.due(1)

    def test_state(self):
        clock = Clock(lambda step: 5)
        assert clock.state_dict() == {"last": -1}
        clock.mark(7)
        assert clock.state_dict() == {"last": 7}
        other = Clock(lambda step: 5)
        other.load_state_dict(clock.state_dict())
        assert [step for step in range(8, 14) if other.due(step)] == [12, 13]

    def test_steps_counted_anew_do_not_wait_for_an_old_mark(self):
        clock = Clock(lambda step: 5)
        clock.load_state_dict({"last": 1000})
        assert clock.due(0)

    def test_drift(self):
        clock = Clock(Drift(0.1, at_most=10))
        assert clock.due(0)
        clock.mark(0)
        assert not clock.due(1)
        assert not clock.due(1, error=0.1)
        assert clock.due(1, error=0.11)
        assert clock.due(1, error=math.nan)
        assert not clock.due(9, error=0.0)
        assert clock.due(10, error=0.0)

    def test_drift_without_a_longest_interval(self):
        clock = Clock(Drift(0.1))
        clock.mark(0)
        assert not clock.due(10**6, error=0.0)

    @pytest.mark.parametrize("bad", [0, -1, 2.0, True, "10", None])
    def test_bad_interval(self, bad):
        with pytest.raises(SettingError) as error:
            Clock(bad, "update_every")
        assert str(error.value) == (
            f"update_every is {bad!r} but must be a whole number of at least 1: pass such an int."
        )

    def test_bad_function(self):
        message = r"^refresh_every is 0 at step 0 but must be finite and at least 1: correct the"
        with pytest.raises(SettingError, match=message):
            Clock(lambda step: 0, "refresh_every")
        clock = Clock(lambda step: 1 - step, "refresh_every")
        clock.mark(0)
        with pytest.raises(SettingError, match="refresh_every is -2 at step 3"):
            clock.due(3)

    def test_bad_drift(self):
        with pytest.raises(SettingError) as error:
            Drift(0.0)
        assert str(error.value) == (
            "Drift.tolerance is 0.0 but must be finite and above 0: pass such a number."
        )
        with pytest.raises(SettingError, match=r"Drift.at_most is 0 but must be a whole number"):
            Drift(0.1, at_most=0)

    def test_growing_interval(self):
        clock = Clock(GrowingInterval(steps_per_epoch=4, every=2, at_most=6, after=6))
        # Intervals: 1 up to step 7, 3 from 8, 5 from 16, 6 from 24.
        assert due_steps(clock, 40) == [0, 1, 2, 3, 4, 5, 6, 7, 10, 13, 18, 23, 29, 35]

    def test_step_decay(self):
        # Intervals: 2, 4 from step 4, 8 from step 12.
        assert due_steps(Clock(StepDecay(2, 2, at=(4, 12))), 32) == [0, 2, 6, 10, 18, 26]
        # 3, then 4.2 from step 3, which is rounded.
        assert due_steps(Clock(StepDecay(3, 1.4, at=(3,))), 14) == [0, 4, 8, 12]
