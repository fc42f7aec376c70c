"""Batches that are the same in every run, resumed or not, with workers or without."""

from typing import NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from natgrad.errors import CheckpointError, DataError, SettingError
from natgrad.lab.data import Loader, Rows, Sampling, loader
from unit.lab.data.error_text import says


class Numbered(Rows):
    """Sample i is i, with two random numbers."""

    chances = 2

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def take(self, rows, chances):
        return torch.as_tensor(rows), torch.from_numpy(chances)


class Broken(Numbered):
    def take(self, rows, chances):
        raise DataError(f"Row {rows[0]} is broken: replace it.")


def same(left, right):
    left, right = list(left), list(right)
    return len(left) == len(right) and all(
        torch.equal(a, b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_epochs_follow_each_other():
    it = loader(Numbered(23), 5)
    first, second = list(it), list(it)
    assert len(it) == len(first) == len(second) == 5
    for epoch in (first, second):
        assert sorted(torch.cat([rows for rows, _ in epoch]).tolist()) == list(range(23))
    assert not same(first, second)
    again = loader(Numbered(23), 5)
    assert same(again, first)
    assert same(again, second)
    assert not same(loader(Numbered(23), 5, seed=1), first)


@pytest.mark.parametrize("done", [0, 1, 4, 5, 7, 10])
def test_resumed_at_any_step(done):
    whole, rest = loader(Numbered(23), 5), []
    every = [*whole, *whole, *whole]
    it, seen = loader(Numbered(23), 5), 0
    while seen < done:
        for _ in it:
            seen += 1
            if seen == done:
                break
    state = it.state_dict()
    assert state == {
        "epoch": done // 5,
        "position": done % 5 * 5,
        "samples": 23,
        "seed": 0,
    }
    other = loader(Numbered(23), 5)
    other.load_state_dict(state)
    while len(rest) < len(every) - done:
        rest += list(other)
    assert same(rest, every[done:])


def test_resumed_on_other_ranks():
    it = loader(Numbered(48), 6, rank=0, ranks=2)
    other = loader(Numbered(48), 6, rank=1, ranks=2)
    seen = []
    for mine, its in zip(it, other, strict=True):
        seen += [*mine[0].tolist(), *its[0].tolist()]
        if len(seen) == 24:
            break
    state = it.state_dict()
    assert state == other.state_dict()
    alone = loader(Numbered(48), 12)
    alone.load_state_dict(state)
    rest = list(alone)
    assert sorted(seen + torch.cat([rows for rows, _ in rest]).tolist()) == list(range(48))
    whole = loader(Numbered(48), 12)
    assert same(rest, list(whole)[2:])  # with the same random numbers, too


def test_resumed_where_nothing_is_left():
    it = loader(Numbered(10), 2, ranks=4)
    it.load_state_dict({"epoch": 3, "position": 8, "samples": 10, "seed": 0})
    assert len(list(it)) == 1
    assert it.epoch == 5


def test_an_epoch_left_early_is_not_gone_on_with():
    it = loader(Numbered(20), 5)
    first, _ = next(iter(it))
    assert it.state_dict()["position"] == 5
    whole = list(it)
    assert sorted(torch.cat([rows for rows, _ in whole]).tolist()) == list(range(20))
    assert not torch.equal(whole[0][0], first)
    assert it.epoch == 2


def test_a_state_counts_more_than_what_was_left_early():
    it = loader(Numbered(20), 5)
    state = next(iter(it)) and it.state_dict()
    rest = list(loader(Numbered(20), 5))[1:]
    it.load_state_dict(state)
    assert same(it, rest)


def test_without_shuffling_all_epochs_are_alike():
    it = loader(Numbered(10), 4, shuffle=False)
    first = list(it)
    assert [rows.tolist() for rows, _ in first] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert same(first, it)


def test_what_is_drawn_depends_on_the_sample_and_the_epoch():
    alone = {
        int(row): chances
        for rows, drawn in loader(Numbered(20), 20)
        for row, chances in zip(rows, drawn, strict=True)
    }
    for rank in (0, 1):
        for rows, drawn in loader(Numbered(20), 3, rank=rank, ranks=2):
            for row, chances in zip(rows, drawn, strict=True):
                assert torch.equal(chances, alone[int(row)])
    it = loader(Numbered(20), 20)
    next(iter(it))
    ((rows, drawn),) = it
    assert not torch.equal(drawn[rows == 3][0], alone[3])


def test_workers_change_nothing():
    state = torch.random.get_rng_state()
    assert same(loader(Numbered(23), 5, workers=2), loader(Numbered(23), 5))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_stays_one_sentence(workers):
    it = loader(Broken(4), 2, workers=workers, shuffle=False)
    says(DataError, "Row 0 is broken: replace it.", lambda: list(it))


def test_a_data_set_of_torch():
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    read = list(loader(data, 4))
    assert [len(x) for x, _ in read] == [4, 4, 2]
    assert all(torch.equal(2 * x, y) for x, y in read)


class Pair(NamedTuple):
    x: torch.Tensor
    y: list[torch.Tensor]


class Nested(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, row):
        return {"pair": Pair(torch.tensor(row), [torch.tensor(row)]), "name": str(row)}


def test_batches_are_moved():
    (batch,) = loader(Nested(), 3, device="meta")
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].x.device.type == batch["pair"].y[0].device.type == "meta"
    assert sorted(batch["name"]) == ["0", "1", "2"]
    ((rows, chances),) = loader(Numbered(4), 4, device=torch.device("meta"))
    assert rows.is_meta
    assert chances.is_meta


def test_messages():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    says(
        SettingError,
        "dataset is a Endless, which has no length, but an order that can be resumed needs one: "
        "pass a map-style data set.",
        lambda: loader(Endless(), 2),
    )
    says(
        SettingError,
        "workers is -1 but must be at least 0: pass the number of processes that read ahead, or 0 "
        "for none.",
        lambda: Loader(Numbered(3), Sampling(3, 1), workers=-1),
    )
    it = loader(Numbered(10), 2)
    says(
        CheckpointError,
        "The state of a loader has ['epoch', 'position', 'samples', 'seed'] but this one has "
        "['epoch']: pass what state_dict() gave.",
        lambda: it.load_state_dict({"epoch": 1}),
    )
    says(
        CheckpointError,
        "The state was saved with samples 11 but this loader has 10: resume with the same data and "
        "seed.",
        lambda: it.load_state_dict(loader(Numbered(11), 2).state_dict()),
    )
    says(
        CheckpointError,
        "The state was saved with seed 1 but this loader has 0: resume with the same data and "
        "seed.",
        lambda: it.load_state_dict(loader(Numbered(10), 2, seed=1).state_dict()),
    )
