"""Which samples enter: each as often as any other, the same on any ranks and in micro-batches."""

import numpy as np
import pytest
from torch import nn

from natgrad import KFAC, NaturalMuon
from natgrad.curvature import Subsample
from natgrad.errors import SettingError

N = 48


def chosen(subsample, step, n=N, ranks=1):
    """Of all ranks, by number in the step."""
    found = []
    for rank in range(ranks):
        mine = subsample(step, 0, n // ranks, rank, ranks)
        found += [int(j) * ranks + rank for j in (range(n // ranks) if mine is None else mine)]
    return sorted(found)


@pytest.mark.parametrize("amount", [0.25, 0.1, 0.3, 0.75, 0.9, 12, 7, 1])
def test_every_sample_enters_equally_often(amount):
    subsample, steps = Subsample(amount), 3000
    times = np.zeros(N)
    share = amount if isinstance(amount, float) else amount / N
    for step in range(steps):
        some = chosen(subsample, step)
        assert abs(len(some) - share * N) < 2
        times[some] += 1
    deviation = (share * (1 - share) * steps) ** 0.5
    assert np.abs(times - share * steps).max() < 4.5 * deviation


@pytest.mark.parametrize("amount", [0.25, 0.3, 0.9, 0.03, 12, 5])
def test_the_same_on_any_ranks(amount):
    for step in range(40):
        alone = chosen(Subsample(amount), step)
        assert alone
        assert all(chosen(Subsample(amount), step, ranks=r) == alone for r in (2, 3, 4, 8))


def test_the_same_in_micro_batches():
    for step in range(40):
        parts = [Subsample(0.3)(step, first, 16) + first for first in (0, 16, 32)]
        assert np.concatenate(parts).tolist() == chosen(Subsample(0.3), step)


def test_periodic_data_are_not_of_one_kind():
    """Classes in turn, as many as lie between two that enter."""
    kinds = [len({k % 4 for k in chosen(Subsample(0.25), step)}) for step in range(20)]
    assert min(kinds) > 1


def test_the_seed_decides():
    assert chosen(Subsample(0.25, seed=1), 0) != chosen(Subsample(0.25), 0)
    assert chosen(Subsample(0.25), 1) != chosen(Subsample(0.25), 0)
    assert chosen(Subsample(0.25), 1) == chosen(Subsample(0.25), 1)


def test_at_least_one_and_at_most_all():
    assert all(len(chosen(Subsample(0.01), step, 3)) == 1 for step in range(50))
    assert Subsample(1.0)(0, 0, 8) is None
    assert Subsample(8)(0, 0, 4) is None
    assert Subsample(8)(0, 0, 4, 1, 2) is None
    assert Subsample(0.5)(0, 0, 0) is None


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_outside_of_its_range(wrong):
    said = rf"statistics is {wrong!r} but must be in \(0, 1\]: pass a share such as 0.25"
    with pytest.raises(SettingError, match=said):
        Subsample(wrong)


@pytest.mark.parametrize("wrong", [0, -3])
def test_a_number_below_one(wrong):
    said = f"statistics is {wrong} samples but must be finite and at least 1: pass a number"
    with pytest.raises(SettingError, match=said):
        Subsample(wrong)


@pytest.mark.parametrize("made", [KFAC, NaturalMuon])
@pytest.mark.parametrize("wrong", ["0.5", True, [3]])
def test_what_is_no_amount(made, wrong):
    said = "statistics is .* but must say which samples"
    with pytest.raises(SettingError, match=said):
        made(nn.Linear(2, 2), statistics=wrong)
    with pytest.raises(SettingError, match=r"Subsample\.seed is -1 but must be a whole number"):
        Subsample(0.5, seed=-1)
