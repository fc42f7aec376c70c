"""Any cut into processes and micro-batches reads the same samples, and draws the same for them."""

import multiprocessing
import os
import signal
from itertools import count

import numpy as np
import pytest
import torch

from natgrad.errors import CheckpointError, DataError
from natgrad.lab.data.dataset import Rows
from natgrad.lab.train.mixing import Mixing
from natgrad.lab.train.sample_order import Cut, Micro, Stream, generator, number
from unit.lab.train import digit_runs as runs


class Numbered(Rows):
    """Sample i is the number i, with two random ones."""

    chances = 2

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def take(self, rows, chances):
        if 99 in rows:
            raise DataError("Sample 99 is spoilt: remove it.")
        return torch.tensor(rows), torch.from_numpy(chances)


def read(stream, cut, steps=5, workers=0):
    """All ranks' samples of each step, in the order of their places."""
    found = []
    for step in range(steps):
        parts = {}
        for rank in range(cut.ranks):
            micros = Cut(cut.batch, rank, cut.ranks, cut.at_once).micros(step)
            parts |= {m.first: batch for m, batch in stream.read(iter(micros), workers)}
        ordered = [parts[first] for first in sorted(parts)]
        found.append(tuple(torch.cat(one) for one in zip(*ordered, strict=True)))
    return found


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left[0], right[0])
        assert torch.equal(left[1], right[1])


@pytest.mark.parametrize("count", [23, 24, 7, 60])  # also fewer samples than a batch has
@pytest.mark.parametrize(("ranks", "at_once"), [(1, 5), (2, 12), (3, 8), (4, 1), (2, 5)])
def test_any_cut_reads_the_same(count, ranks, at_once):
    stream = Stream(Numbered(count), 24, seed=3)
    assert_same(read(stream, Cut(24, 0, 1, 24)), read(stream, Cut(24, 0, ranks, at_once)))


def test_an_epoch_has_every_sample_once_and_each_another_order():
    stream = Stream(Numbered(10), 4, seed=3)
    rows = torch.cat([rows for rows, _ in read(stream, Cut(4, 0, 1, 4), 5)])
    first, second = rows[:10].tolist(), rows[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    other = Stream(Numbered(10), 4, seed=4)
    assert (
        torch.cat([rows for rows, _ in read(other, Cut(4, 0, 1, 4), 5)]).tolist() != rows.tolist()
    )


def test_a_sample_draws_anew_in_each_epoch():
    stream = Stream(Numbered(4), 4, seed=0)
    (rows, drawn), (again, others) = read(stream, Cut(4, 0, 1, 4), 2)
    by_row = {int(row): chances for row, chances in zip(rows, drawn, strict=True)}
    assert all(
        not torch.equal(by_row[int(row)], other) for row, other in zip(again, others, strict=True)
    )


def test_micro_batches_have_nearly_one_size():
    sizes = [len(micro) for micro in Cut(100, 1, 2, 16).micros(0)]
    assert sum(sizes) == 50
    assert max(sizes) <= 16
    assert max(sizes) - min(sizes) <= 1


def test_workers_read_the_same_and_pass_errors_on():
    stream = Stream(Numbered(50), 8, seed=1)
    state = torch.get_rng_state()
    micros = [Micro(step, 0, 8) for step in range(3)]
    ahead = list(stream.read(iter(micros), 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert [micro for micro, _ in ahead] == micros
    here = [batch for _, batch in stream.read(iter(micros), 0)]
    assert_same([batch for _, batch in ahead], here)
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"^Sample 99 is spoilt: remove it\.$"):
            list(Stream(Numbered(100), 100, seed=1).read(iter([Micro(0, 0, 100)]), workers))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_signals_to_all(number):
    """torchrun, or a terminal, sends them to workers as well, and the step needs its batch."""
    reading = Stream(Numbered(50), 8, seed=1).read((Micro(step, 0, 8) for step in range(9)), 1)
    next(reading)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    assert len(list(reading)) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_a_long_run_is_not_listed_before_it_begins(workers):
    asked = (Micro(step, 0, 8) for step in count())
    reading = Stream(Numbered(50), 8, seed=1).read(asked, workers)
    assert [next(reading)[0].step for _ in range(3)] == [0, 1, 2]
    assert next(asked).step < 3 + 4


def test_no_data():
    with pytest.raises(DataError, match=r"^There are no training data: name others\.$"):
        Stream(Numbered(0), 4, seed=0)


def test_random_numbers_depend_on_the_keys_alone():
    assert number(1, 2, 3) == number(1, 2, 3)
    assert len({number(a, b, c) for a in range(4) for b in range(4) for c in range(4)}) == 64
    draws = [torch.rand(3, generator=generator(0, step, 1)) for step in (4, 5, 4)]
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


BATCH = 12


def images(step):
    draw = generator(9, step, 9)
    return torch.rand(BATCH, 1, 8, 8, generator=draw) + 1, torch.randint(
        10, (BATCH,), generator=draw
    )


def mixed(cut, steps, start=0, states=()):
    """Each step's batch as all ranks together make it, and their states at the end."""
    settings = runs.settings(batch_size=BATCH)
    cuts = [Cut(BATCH, rank, cut.ranks, cut.at_once) for rank in range(cut.ranks)]
    mixings = [Mixing(settings, 10, one) for one in cuts]
    for mixing in mixings:
        mixing.load_state_dict(states)
    found = []
    for step in range(start, steps):
        parts = []
        for one, mixing in zip(cuts, mixings, strict=True):
            for micro in one.micros(step):
                inputs, targets = images(step)
                parts.append(mixing(micro, inputs[micro.places], targets[micro.places]))
        found.append(tuple(torch.cat(one) for one in zip(*parts, strict=True)))
    return found, [piece for mixing in mixings for piece in mixing.state_dict()]


@pytest.mark.parametrize(("ranks", "at_once"), [(1, 5), (2, 6), (3, 3), (4, 1)])
def test_any_cut_mixes_and_erases_the_same(ranks, at_once):
    assert_same(mixed(Cut(BATCH, 0, 1, BATCH), 3)[0], mixed(Cut(BATCH, 0, ranks, at_once), 3)[0])


@pytest.mark.parametrize(
    ("before", "after"), [((3, 3), (2, 6)), ((2, 6), (3, 4)), ((1, 12), (4, 2)), ((4, 3), (1, 5))]
)
def test_mixing_goes_on_with_another_cut(before, after):
    whole, _ = mixed(Cut(BATCH, 0, 1, BATCH), 4)
    _, states = mixed(Cut(BATCH, 0, *before), 2)
    after, _ = mixed(Cut(BATCH, 0, *after), 4, start=2, states=states)
    assert_same(whole[2:], after)


def test_it_does_mix_and_erase():
    ((first, _), (inputs, targets)), _ = mixed(Cut(BATCH, 0, 1, BATCH), 2)
    assert (first == 0).any()
    assert ((first == 0) | (first == images(0)[0])).all()
    assert not torch.allclose(inputs, images(1)[0])
    assert targets.shape == (BATCH, 10)
    assert ((targets > 0).sum(1) > 1).any()
    np.testing.assert_allclose(targets.sum(1), 1, rtol=1e-6)


def test_it_erases_what_is_mixed():
    """The next batch is mixed with one that has no holes, and has holes of its own."""
    ((first, _), (second, _)), states = mixed(Cut(BATCH, 0, 1, BATCH), 2)
    assert (first == 0).any()
    assert (second == 0).any()
    assert (states[0]["inputs"] >= 1).all()  # as raw images are
    kept = second != 0
    assert torch.equal(second[kept], states[0]["inputs"][kept])


def test_a_rank_keeps_its_own_share():
    _, states = mixed(Cut(BATCH, 0, 1, BATCH), 1)
    mixing = Mixing(runs.settings(batch_size=BATCH), 10, Cut(BATCH, 2, 4, 2))
    mixing.load_state_dict(states)
    own = mixing.state_dict()
    assert [(one["first"], one["last"]) for one in own] == [(6, 7), (7, 9)]
    for one in own:
        part = states[0]["inputs"][one["first"] : one["last"]]
        assert torch.equal(one["inputs"], part)
        assert one["inputs"].untyped_storage().nbytes() == part.nbytes  # not a view of all


def test_a_lost_share_is_found_out():
    _, states = mixed(Cut(BATCH, 0, 3, 4), 1)
    with pytest.raises(CheckpointError) as error:
        Mixing(runs.settings(batch_size=BATCH), 10, Cut(BATCH, 0, 1, 12)).load_state_dict(
            states[:2]
        )
    assert str(error.value) == (
        "The checkpoint has no mixed samples from 8 of 12 on: take one that is complete."
    )
