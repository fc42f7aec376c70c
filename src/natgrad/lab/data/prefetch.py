"""Batches by their keys, read here or by processes that read ahead, in the order of the keys."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from natgrad.errors import NatgradError

K = TypeVar("K")


def read(
    batch: Callable[[K], Any],
    keys: Iterable[K],
    workers: int,
    *,
    seed: int = 0,
    pin_memory: bool = False,
    begin: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """``batch(key)`` for each of ``keys``, which are asked for as they are needed, a few ahead.

    ``begin`` is called in each of the ``workers`` first; without workers nothing is read ahead.
    """
    if not workers:
        yield from map(batch, keys)
        return
    ahead: DataLoader[Any] = DataLoader(
        _Batches(batch),
        batch_size=None,  # a key is a whole batch
        sampler=keys,
        num_workers=workers,
        pin_memory=pin_memory,
        # Otherwise torch would draw from its global generator, and change what the model draws.
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=begin,
    )
    for found in ahead:
        if isinstance(found, _Failed):
            raise found.error
        yield found


class _Failed:
    """An error on its way out of a worker, which torch would wrap in a traceback."""

    def __init__(self, error: NatgradError) -> None:
        self.error = error


class _Batches(Dataset[Any], Generic[K]):
    """As torch reads it."""

    def __init__(self, batch: Callable[[K], Any]) -> None:
        self.batch = batch

    def __getitem__(self, key: K) -> Any:
        try:
            return self.batch(key)
        except NatgradError as error:
            return _Failed(error)
