"""Whether all ranks were given the same, found out before anything of theirs can wait in vain."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from natgrad.comm.base import Communicator
from natgrad.errors import NatgradError, SettingError
from natgrad.runtime.blocks import Block

T = TypeVar("T")


def together(
    comm: Communicator, make: Callable[[], T], describe: Callable[[T], dict[str, str]]
) -> T:
    """What ``make`` gives here, if it gives something described in the same way on every rank.

    Where it fails on one rank it fails on all, so that nobody waits for that one."""
    failure: NatgradError | None = None
    try:
        made = make()
        mine = describe(made)
    except NatgradError as error:
        failure, mine = error, {"failure": str(error)}
    if comm.size > 1:
        everyone = comm.gather(mine)
        if failure is None:
            _compare(everyone)
    if failure is not None:
        raise failure
    return made


def _compare(everyone: list[dict[str, str]]) -> None:
    for rank, theirs in enumerate(everyone):
        if "failure" in theirs:
            raise SettingError(f"KFAC could not be made on rank {rank}: {theirs['failure']}")
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for key in [*first, *(k for k in theirs if k not in first)]:
            one, other = first.get(key, "missing"), theirs.get(key, "missing")
            if one != other:
                raise SettingError(
                    f"Ranks 0 and {rank} differ in {key}: {one} on rank 0, {other} on rank {rank}. "
                    "Build the same model and pass the same settings to KFAC on every rank."
                )


def described(blocks: list[Block], settings: Mapping[str, Any]) -> dict[str, str]:
    """Everything that must be the same, by what a user calls it."""
    found = {name: text(value) for name, value in settings.items()}
    for block in blocks:
        groups, rows, cols = block.shape
        size = f"{groups} x {rows} x {cols}" if groups > 1 else f"{rows} x {cols}"
        found[f"block {block.name!r}"] = (
            f"{block.kind} {size} with {block.structure!r}, {block.inverse!r}, {block.dtype}"
        )
    found["the order of blocks"] = ", ".join(block.name for block in blocks)
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
