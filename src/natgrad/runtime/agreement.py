"""Whether all ranks were given the same, found out before anything of theirs can wait in vain."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from natgrad.comm.base import Communicator
from natgrad.curvature.fisher import Fisher
from natgrad.errors import SettingError
from natgrad.runtime.blocks import Block
from natgrad.runtime.settings import Clocks, Settings

T = TypeVar("T")


class Together:
    """``with Together(comm) as agreed``: what fails inside on one rank fails on all of them, so
    that nobody waits for that one; and ``agreed.words`` must be the same on all at the end."""

    def __init__(self, comm: Communicator, what: str = "KFAC") -> None:
        self.comm, self.what = comm, what
        self.words: dict[str, str] = {}

    def __enter__(self) -> "Together":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.comm.size == 1 or not isinstance(error, Exception | None):
            return
        everyone = told(
            self.comm, self.words, error, SettingError, f"{self.what} could not be made on"
        )
        if error is None:
            _compare(everyone, self.what)


def told(
    comm: Communicator, words: T, error: Exception | None, kind: type[Exception], what: str
) -> list[T]:
    """The ``words`` of all ranks. Where one comes with an ``error``, which is its to raise, the
    others raise one of this ``kind``, that begins with ``what``, so that nobody goes on alone."""
    everyone: list[tuple[str | None, T]] = comm.gather(
        (None if error is None else str(error), words)
    )
    if error is None:
        for rank, (failure, _) in enumerate(everyone):
            if failure is not None:
                raise kind(f"{what} rank {rank}: {failure}")
    return [theirs for _, theirs in everyone]


def _compare(everyone: list[dict[str, str]], what: str) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for key in [*first, *(k for k in theirs if k not in first)]:
            one, other = first.get(key, "missing"), theirs.get(key, "missing")
            if one != other:
                raise SettingError(
                    f"Ranks 0 and {rank} differ in {key}: {one} on rank 0, {other} on rank {rank}. "
                    f"Build the same model and pass the same settings to {what} on every rank."
                )


def described(
    model: nn.Module,
    blocks: list[Block],
    settings: Settings,
    clocks: tuple[Clocks, ...],
    curvature: Fisher,
    wire_dtype: torch.dtype | None,
) -> dict[str, str]:
    """Everything that must be the same, by what a user calls it."""
    found = {name: text(value) for name, value in vars(settings).items() if name != "adapted"}
    for each in clocks:
        a, g = (text(each.clocks[key].interval) for key in ("A", "G"))
        found[each.name] = a if a == g else f"A: {a}, G: {g}"
    found["curvature"], found["wire_dtype"] = text(curvature), text(wire_dtype)
    for block in blocks:
        groups, rows, cols = block.shape
        size = f"{groups} x {rows} x {cols}" if groups > 1 else f"{rows} x {cols}"
        found[f"block {block.name!r}"] = (
            f"{block.kind} {size} with {block.structure!r}, {block.inverse!r}, {block.dtype}"
        )
        if block.region_terms is not None:
            found[f"regions of {block.name!r}"] = text(block.region_terms)
    found["the order of blocks"] = ", ".join(block.name for block in blocks)
    for name, p in model.named_parameters():
        if p.requires_grad:  # also those of no block are added up, in one buffer
            found[f"parameter {name!r}"] = f"{tuple(p.shape)} of {p.dtype}"
    return found


def text(value: Any) -> str:
    """A setting as the same words in every process: functions have other addresses in each."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text(item)}" for key, item in sorted(value.items()))
    if isinstance(value, tuple | list):
        return ", ".join(map(text, value)) or "none"
    if callable(value) and not is_dataclass(value):
        return f"the function {getattr(value, '__qualname__', type(value).__name__)}"
    return repr(value)
