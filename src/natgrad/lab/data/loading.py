"""Batches of one rank, the same in every run, that can be resumed at any step."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from natgrad.errors import CheckpointError, SettingError
from natgrad.lab.data import prefetch, random_numbers
from natgrad.lab.data.dataset import Rows
from natgrad.lab.data.sampling import Sampling

Key = tuple[int, tuple[int, ...]]  # epoch, rows


def loader(
    dataset: Dataset[Any],
    batch: int,
    *,
    seed: int = 0,
    rank: int = 0,
    ranks: int = 1,
    shuffle: bool = True,
    drop_last: bool = False,
    device: torch.device | str | None = None,
    workers: int = 0,
) -> "Loader":
    """Batches for one of several ranks; see `Loader` and `Sampling`.

    Arguments:
        dataset: `Rows`, or any map-style data set with a length.
        batch: samples of a step on each rank, at least 1.
        seed: of the order and of all that is random.
        rank: number of this process, from 0.
        ranks: number of processes.
        shuffle: whether the order differs from epoch to epoch.
        drop_last: whether samples that do not fill a step are left out; otherwise the last step has
            fewer or more of them.
        device: where batches are moved to; ``None`` leaves them on the CPU.
        workers: processes that read ahead; 0 reads when a batch is asked for.
    """
    try:
        samples = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise SettingError(
            f"dataset is a {type(dataset).__name__}, which has no length, but an order that can be "
            "resumed needs one: pass a map-style data set."
        ) from None
    sampling = Sampling(samples, batch, seed, rank, ranks, shuffle, drop_last)
    return Loader(dataset, sampling, device, workers)


class Loader:
    """Iterating gives the batches of one epoch, and of the next one the next time.

    `state_dict()` says where the next batch comes from. A loader that was given one begins there;
    an epoch that was left early is not gone on with. With ``shuffle=False`` all epochs are alike,
    in their order and in what is drawn at random. For a data set that is no `Rows` torch's
    `default_collate` makes the batches, and what it draws at random is its own affair.

    Arguments:
        dataset: `Rows`, or any map-style data set with a length.
        sampling: which samples this rank reads when.
        device: where batches are moved to; ``None`` leaves them on the CPU.
        workers: processes that read ahead; 0 reads when a batch is asked for.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampling: Sampling,
        device: torch.device | str | None = None,
        workers: int = 0,
    ) -> None:
        if workers < 0:
            raise SettingError(
                f"workers is {workers} but must be at least 0: pass the number of processes that "
                "read ahead, or 0 for none."
            )
        self.dataset, self.sampling, self.workers = dataset, sampling, workers
        self.device = None if device is None else torch.device(device)
        self.epoch = self.position = 0
        self._left_early = False

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.sampling.cuts())

    def __iter__(self) -> Iterator[Any]:
        if self._left_early:
            self.epoch, self.position = self.epoch + 1, 0
        cuts = self.sampling.cuts(self.position)
        if not cuts:  # resumed where, for this number of ranks, nothing is left
            self.epoch, self.position = self.epoch + 1, 0
            cuts = self.sampling.cuts()
        epoch, self._left_early = self.epoch, True
        order = self.sampling.order(epoch)
        drawn = epoch if self.sampling.shuffle else 0
        keys = [(drawn, tuple(order[self.sampling.share(*cut)].tolist())) for cut in cuts]
        for (_, end), batch in zip(cuts, self._read(keys), strict=True):
            # Before the batch is handed out: a checkpoint that is written after its step has it.
            last = end == cuts[-1][1]
            self.epoch, self.position = (epoch + 1, 0) if last else (epoch, end)
            self._left_early = not last
            yield batch if self.device is None else _moved(batch, self.device)

    def state_dict(self) -> dict[str, int]:
        """The same on all ranks, and for any number of them."""
        sampling = self.sampling
        where = {"epoch": self.epoch, "position": self.position}
        return where | {"samples": sampling.samples, "seed": sampling.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin where the next batch would have come from; the number of ranks and the batch may be
        others.

        Arguments:
            state: what `state_dict` has returned, for the same number of samples and the same seed;
                others raise `CheckpointError`.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise CheckpointError(
                f"The state of a loader has {sorted(own)} but this one has {sorted(state)}: pass "
                "what state_dict() gave."
            )
        for name in ("samples", "seed"):
            if state[name] != own[name]:
                raise CheckpointError(
                    f"The state was saved with {name} {state[name]} but this loader has "
                    f"{own[name]}: resume with the same data and seed."
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._left_early = False

    def _read(self, keys: Sequence[Key]) -> Iterator[Any]:
        return prefetch.read(
            partial(_batch, self.dataset, self.sampling.seed),
            keys,
            self.workers,
            seed=int(random_numbers.bits(self.sampling.seed, keys[0][0])[0] >> np.uint64(1)),
            pin_memory=self.device is not None and self.device.type == "cuda",
        )


def _batch(dataset: Dataset[Any], seed: int, key: Key) -> Any:
    epoch, rows = key
    if not isinstance(dataset, Rows):
        return default_collate([dataset[row] for row in rows])
    drawn = random_numbers.uniform(seed, epoch, np.array(rows), dataset.chances)
    return dataset.take(rows, drawn)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
