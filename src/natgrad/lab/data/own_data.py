"""Data of the user's: a function without arguments that returns training and test data.

Each of the two is a pair of tensors ``(inputs [n, …], targets [n, …])``, a map-style data set with
``len`` and samples ``(input, target)``, a `DataLoader` over one, or `Rows`. Which samples a step
sees, the run decides, so that it goes on as it would have.
"""

from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from natgrad.errors import SettingError
from natgrad.lab import registry
from natgrad.lab.data.by_name import DataRequest, NamedData
from natgrad.lab.data.dataset import Rows
from natgrad.lab.data.random_numbers import Chances

_ALLOWED = (
    "a pair of tensors (inputs, targets), a data set with len and samples (input, target), or a "
    "DataLoader over one"
)


class TensorRows(Rows):
    """``inputs [n, …]`` and ``targets [n, …]``."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(rows)
        return self.inputs[chosen], _labels(self.targets[chosen])


class DatasetRows(Rows):
    """A data set of torch's kind. What a sample draws at random from torch is a function of seed,
    epoch and sample, so that random crops are the same when a run goes on."""

    chances = 1

    def __init__(self, source: Any, collate: Callable[[list[Any]], Any], name: str) -> None:
        self.source, self.collate, self.name = source, collate, name

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Tensor, Tensor]:
        samples = []
        with torch.random.fork_rng([]):
            # Of a seed torch takes the lower 32 bits.
            for row, chance in zip(rows, chances[:, 0], strict=True):
                torch.default_generator.manual_seed(int(chance * 2**32))
                samples.append(self.source[row])
        batch = self.collate(samples)
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not all(isinstance(one, Tensor) for one in batch):
            raise SettingError(
                f"Data {self.name!r} give batches of type {_type_text(batch)} but must give pairs "
                "of tensors (inputs, targets): return samples (input, target), or a DataLoader "
                "with a collate_fn that makes such pairs."
            )
        return batch[0], _labels(batch[1])


def _labels(targets: Tensor) -> Tensor:
    """Indices as torch's losses want them; real numbers as they are."""
    return targets if targets.is_floating_point() else targets.long()


def own_data(path: str, found: Any) -> NamedData:
    """Of a function of the user's."""
    if isinstance(found, NamedData):
        return found
    function = registry.function(path, "Data", "training and test data", found)

    def read(asked: DataRequest) -> tuple[Rows, Rows]:
        made = registry.call(function, path, "Data", object, gives="training and test data")
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise SettingError(
                f"Data {path!r} give an object of type {_type_text(made)} but must give two, "
                f"training and test data, each of them {_ALLOWED}: return such a pair."
            )
        train, test = (_rows(one, path, what) for one, what in zip(made, WHICH, strict=True))
        return train, test

    return NamedData(path, read, losses=(), are="your own", has_folder=False)


WHICH = ("training", "test")


def _rows(found: Any, path: str, which: str) -> Rows:
    if isinstance(found, Rows):
        return found
    rows: Rows | None = None
    tensors = isinstance(found, tuple | list) and all(isinstance(one, Tensor) for one in found)
    if tensors and len(found) == 2:
        inputs, targets = found
        if inputs.ndim and targets.ndim and len(inputs) == len(targets):
            rows = TensorRows(inputs, targets)
    elif isinstance(found, DataLoader):
        if _is_map(found.dataset):
            rows = DatasetRows(found.dataset, found.collate_fn, path)
    elif _is_map(found):
        rows = DatasetRows(found, default_collate, path)
    if rows is None or not len(rows):
        what = "has no samples" if rows is not None else f"is of type {_type_text(found)}"
        raise SettingError(
            f"The {which} data of {path!r} must be {_ALLOWED}, with as many inputs as targets, but "
            f"what was returned {what}: return one of these."
        )
    return rows


def _is_map(found: Any) -> bool:
    return isinstance(found, Sized) and hasattr(found, "__getitem__")


def _type_text(found: Any) -> str:
    """'tuple of Tensor, Tensor'"""
    name = type(found).__name__
    if isinstance(found, tuple | list) and 0 < len(found) < 5:
        return f"{name} of {', '.join(type(one).__name__ for one in found)}"
    return name


def classes_of(train: Rows, test: Rows) -> int:
    """As the data say, or as labels in tensors show; 0 if nobody knows."""
    if (said := _count(train, "classes")) or not isinstance(train, TensorRows):
        return said
    labels = [one.targets for one in (train, test) if isinstance(one, TensorRows)]
    if any(one.is_floating_point() or one.ndim != 1 for one in labels):
        return 0
    return 1 + max(int(one.max()) for one in labels)


def vocabulary_of(train: Rows) -> int:
    return _count(train, "vocabulary")


def _count(rows: Rows, name: str) -> int:
    source = rows.source if isinstance(rows, DatasetRows) else rows
    found = getattr(source, name, 0)
    return len(found) if isinstance(found, Sized) else int(found)


def first_shapes(rows: Rows) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those of one input and of its target."""
    drawn = torch.zeros(1, rows.chances, dtype=torch.float64).numpy()
    inputs, targets = rows.take([0], drawn)
    return tuple(inputs.shape[1:]), tuple(targets.shape[1:])
