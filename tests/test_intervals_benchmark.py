"""The benchmark of intervals counts what it says."""

import pytest
from torch import nn

from benchmarks.intervals import EVERY, INTERVALS, Curve, Linear, Trial, table, trials
from natgrad import NaturalMuon


def test_steps_to_a_loss():
    curve = Curve([0.9, 0.5, 0.6, 0.2], 3, 1.5)
    assert curve.steps_to(0.5) == 2 * EVERY
    assert curve.steps_to(0.3) == 4 * EVERY
    assert curve.steps_to(0.1) == float("inf")


def test_a_row_has_the_median_and_the_range():
    trial = Trial(trials(0.01)["digits-cnn"].settings, 0.5)
    curves = [Curve(losses, 3, 1.5) for losses in ([0.4, 0.1], [0.9, 0.3], [0.5, 0.2])]
    text = table("digits-cnn", trial, {"4, 20": curves}, markdown=True)
    assert "| 4 (4 to 8) | 0.2 " in " ".join(text.split())


@pytest.mark.parametrize("name", INTERVALS)
def test_intervals_are_ones_that_an_optimizer_takes(name):
    update, refresh = INTERVALS[name]
    assert NaturalMuon(nn.Linear(2, 2), update_every=update, refresh_every=refresh)


def test_an_interval_that_grows():
    assert [Linear(10, 10)(step) for step in (0, 9, 10, 55, 500)] == [1, 1, 2, 6, 10]
