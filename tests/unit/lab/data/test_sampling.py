"""Every sample once, on one rank, whatever their numbers."""

import itertools

import numpy as np
import pytest

from natgrad.errors import SettingError
from natgrad.lab.data import Sampling
from unit.lab.data.error_text import says


def batches(sampling, epoch=0, position=0):
    order = sampling.order(epoch)
    return [order[sampling.share(*cut)].tolist() for cut in sampling.cuts(position)]


def of_all_ranks(samples, batch, ranks, **options):
    """By step, then by rank."""
    found = [
        batches(Sampling(samples, batch, rank=rank, ranks=ranks, **options))
        for rank in range(ranks)
    ]
    return list(zip(*found, strict=True))  # strict: all ranks take the same number of steps


SIZES = [
    (samples, batch, ranks)
    for samples, batch, ranks in itertools.product(
        (1, 5, 16, 17, 23, 24, 25), (1, 3, 8), (1, 2, 3, 4)
    )
    if samples >= ranks
]


@pytest.mark.parametrize(("samples", "batch", "ranks"), SIZES)
def test_every_sample_once(samples, batch, ranks):
    steps = of_all_ranks(samples, batch, ranks)
    read = [row for step in steps for share in step for row in share]
    assert sorted(read) == list(range(samples))
    for step in steps[:-1]:
        assert [len(share) for share in step] == [batch] * ranks
    last = [len(share) for share in steps[-1]]
    assert min(last) >= 1
    assert max(last) <= min(min(last) + 1, batch + 1)


@pytest.mark.parametrize(("samples", "batch", "ranks"), SIZES)
def test_only_full_batches(samples, batch, ranks):
    if samples < batch * ranks:
        with pytest.raises(SettingError):
            Sampling(samples, batch, ranks=ranks, drop_last=True)
        return
    steps = of_all_ranks(samples, batch, ranks, drop_last=True)
    assert len(steps) == samples // (batch * ranks)
    assert all(len(share) == batch for step in steps for share in step)
    read = [row for step in steps for share in step for row in share]
    assert len(set(read)) == len(read)


def test_ranks_together_see_what_one_process_sees():
    alone = of_all_ranks(100, 12, 1)
    for ranks in (2, 3, 4):
        together = of_all_ranks(100, 12 // ranks, ranks)
        for step, (whole,) in zip(together, alone, strict=True):
            assert list(itertools.chain(*step)) == whole


def test_a_position_means_the_same_for_any_number_of_ranks():
    """Three steps on two ranks, then the rest on three."""
    first = of_all_ranks(50, 4, 2)[:3]
    rest = [batches(Sampling(50, 4, rank=rank, ranks=3), position=24) for rank in range(3)]
    read = [row for step in first for share in step for row in share]
    read += [row for share in rest for batch in share for row in batch]
    assert sorted(read) == list(range(50))


def test_nothing_is_left_where_there_are_too_few_for_all_ranks():
    assert batches(Sampling(10, 2, ranks=4), position=8) == []


def test_an_epoch_has_an_order_of_its_own():
    sampling = Sampling(100, 10)
    assert np.array_equal(sampling.order(3), Sampling(100, 7, rank=1, ranks=2).order(3))
    assert not np.array_equal(sampling.order(3), sampling.order(4))
    assert not np.array_equal(sampling.order(3), Sampling(100, 10, seed=1).order(3))
    assert Sampling(5, 2, shuffle=False).order(3).tolist() == [0, 1, 2, 3, 4]


def test_messages():
    says(
        SettingError,
        "batch is 0 but must be at least 1: pass such an int.",
        lambda: Sampling(10, 0),
    )
    says(
        SettingError,
        "ranks is 0 but must be at least 1: pass such an int.",
        lambda: Sampling(10, 1, ranks=0),
    )
    says(
        SettingError,
        "rank is 2 but must be from 0 to 1, as there are 2 ranks: pass the rank of this process.",
        lambda: Sampling(10, 1, rank=2, ranks=2),
    )
    says(
        SettingError,
        "The data set has 3 samples but a step of 4 ranks needs 4: take a smaller batch, fewer "
        "ranks or more data.",
        lambda: Sampling(3, 8, ranks=4),
    )
    says(
        SettingError,
        "The data set has 30 samples but a step of 4 ranks needs 32: take a smaller batch, fewer "
        "ranks or more data.",
        lambda: Sampling(30, 8, ranks=4, drop_last=True),
    )
