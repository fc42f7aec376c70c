"""Batches from a function of the user's, in the model's dtype, and some of their samples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.operators.data import Data


@dataclass(frozen=True)
class Loaded:
    """Iterates over pairs (inputs, targets), as often as asked for."""

    source: Data
    dtype: torch.dtype
    device: torch.device

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.source:
            yield self._typed(batch.inputs), self._typed(batch.targets)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def sampler(self) -> Any:
        """Of the DataLoader, if it is one: whether it shuffles can be read there."""
        return getattr(self.source.source, "sampler", None)

    def differs(self) -> bool:
        """Whether something of the first batch has another dtype or device than the model."""
        first = next(iter(self.source), None)
        return first is not None and any(
            self._typed(one) is not one
            for held in (first.inputs, first.targets)
            for one in _tensors(held)
        )

    def count(self, name: str) -> int:
        """Of samples, which must be rows of tensors that are alike."""
        shapes: set[tuple[torch.Size, torch.Size]] = set()
        total = 0
        for batch in self.source:
            x, y = batch.inputs, batch.targets
            if not (isinstance(x, Tensor) and isinstance(y, Tensor) and y.shape[:1] == x.shape[:1]):
                raise SettingError(
                    f"DATA {name!r} gives batches of {type(x).__name__} and {type(y).__name__}, "
                    "but --samples and --batch-size can only cut pairs of tensors with a row for "
                    "each sample: leave them out, and cut the data in the function."
                )
            shapes.add((x.shape[1:], y.shape[1:]))
            if len(shapes) > 1:
                odd = " and ".join(sorted(str([list(a), list(b)]) for a, b in shapes))
                raise SettingError(
                    f"DATA {name!r} gives samples of unlike shapes, {odd}, which --samples and "
                    "--batch-size cannot put together: leave them out, and cut the data in the "
                    "function."
                )
            total += len(x)
        return total

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The samples ``chosen [k]``, in ascending order; others are not kept."""
        inputs, targets, start = [], [], 0
        for batch in self.source:
            mine = chosen[(chosen >= start) & (chosen < start + batch.samples)] - start
            inputs.append(self._typed(batch.inputs[mine.to(batch.inputs.device)]))
            targets.append(self._typed(batch.targets[mine.to(batch.targets.device)]))
            start += batch.samples
        return torch.cat(inputs), torch.cat(targets)

    def _typed(self, held: Any) -> Any:
        """Real numbers in the model's dtype; all else, such as tokens and masks, as it was."""
        if isinstance(held, Tensor):
            return held.to(self.device, self.dtype if held.is_floating_point() else held.dtype)
        if isinstance(held, Mapping):
            return {key: self._typed(value) for key, value in held.items()}
        if isinstance(held, tuple | list):
            return [self._typed(value) for value in held]
        return held


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping | tuple | list):
        for value in held.values() if isinstance(held, Mapping) else held:
            yield from _tensors(value)
