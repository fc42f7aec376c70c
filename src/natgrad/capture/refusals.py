"""Why a block has no statistics of a parameter that is used in a way that is not understood."""

from torch import Tensor


class Refusals:
    """Of one block. What a stand-in sees is known at once; that uses are missing is a tensor, which
    only a report reads, so that no accelerator has to wait."""

    def __init__(self) -> None:
        self._why = ""
        self._short: Tensor | None = None
        self._missing = ""

    def add(self, why: str) -> None:
        """A use was seen that is not understood. The first reason stays."""
        self._why = self._why or f"in forward it {why}"

    def fall_short(self, short: Tensor, missing: str) -> None:
        """At a step. ``short []``: whether the uses that were seen do not make up the gradient;
        ``missing``: what is to be said then."""
        self._short, self._missing = short, missing

    def reason(self) -> str:
        """Empty if there is none."""
        if not self._why and self._short is not None and bool(self._short):
            return self._missing
        return self._why
