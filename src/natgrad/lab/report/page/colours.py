"""Who is drawn how: a colour for each, and a dash where there are more than colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from natgrad.lab.report.canvas import COLOURS, INK

Dash = Literal["solid", "dashed", "dotted", "dashdot"]

# Black is that of the text. Two more are for eight contenders and more.
_INKS = (*COLOURS[:-1], INK, "#9467bd", "#8c6d31")
_DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted", "dashdot")


@dataclass(frozen=True)
class Owner:
    """Of curves: ``key`` is what they are hidden by."""

    key: str
    name: str
    colour: str
    dash: Dash = "solid"

    @property
    def ink(self) -> str:
        """As a page writes it."""
        return "currentColor" if self.colour == INK else self.colour


def owners(named: Sequence[tuple[str, str]]) -> list[Owner]:
    """One for each key and name."""
    return [
        Owner(key, name, _INKS[i % len(_INKS)], _DASHES[i // len(_INKS) % len(_DASHES)])
        for i, (key, name) in enumerate(named)
    ]


# From blue over green to orange: in order for those who see no green, light enough for a dark
# ground and dark enough for a light one.
_STOPS = ((0.0, (0, 114, 178)), (0.5, (0, 158, 115)), (1.0, (230, 159, 0)))


def depth(share: float) -> str:
    """The colour of a layer, from the first (0) to the last (1)."""
    for (left, low), (right, high) in pairwise(_STOPS):
        if share <= right:
            part = (share - left) / (right - left)
            mixed = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
            return "#" + "".join(f"{one:02x}" for one in mixed)
    raise AssertionError(share)
