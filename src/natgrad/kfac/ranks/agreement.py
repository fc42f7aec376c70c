"""What all ranks must be given alike, as text that is the same in every process.

Ranks with different settings would wait for each other in different collectives, and hang. So they
compare what they were given when `natgrad.KFAC` is made, and say where it differs.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from natgrad.capture.blocks import Block
from natgrad.comm.wire import WireFormat
from natgrad.curvature.fisher import Fisher
from natgrad.curvature.subsample import Subsample
from natgrad.kfac.clocks import Clocks
from natgrad.kfac.motion import Motion
from natgrad.kfac.settings import KFACSettings

_FOUND = ("adapted", "found", "unknown", "keep_scale")  # in training


def settings_to_compare(
    model: nn.Module,
    blocks: list[Block],
    settings: KFACSettings,
    clocks: tuple[Clocks, ...],
    curvature: Fisher,
    wire_dtype: WireFormat | None,
    motion: Motion,
    statistics: Subsample | None,
) -> dict[str, str]:
    """Everything that must be the same, by what a user calls it."""
    given = (field.name for field in fields(settings) if field.name not in _FOUND)
    found = {name: text(getattr(settings, name)) for name in given}
    for each in clocks:
        a, g = (text(each.clocks[key].interval) for key in ("A", "G"))
        found[each.name] = a if a == g else f"A: {a}, G: {g}"
    found["curvature"], found["wire_dtype"] = text(curvature), text(wire_dtype)
    found["statistics"] = "all samples" if statistics is None else text(statistics)
    found["geometry"], found["length"] = text(motion.geometry), text(motion.length)
    return found | blocks_to_compare(model, blocks)


def blocks_to_compare(model: nn.Module, blocks: list[Block]) -> dict[str, str]:
    """What must be the same of the model and its blocks, also where they have changed since."""
    found = {}
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
