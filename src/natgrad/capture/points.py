"""Where samples come in: what stand-ins of bare parameters tell the calls of their modules."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class ModuleCall(Protocol):
    """One call of the module that has the parameter."""

    @property
    def alive(self) -> bool:
        """Whether its forward pass is still running."""
        ...

    @property
    def is_elsewhere(self) -> bool:
        """Whether what runs is a checkpoint inside of it, which is recomputed without its hooks."""
        ...

    @property
    def samples(self) -> int:
        """Their number; 1 if it is not known."""
        ...

    @property
    def axis(self) -> int:
        """Where samples are in a tensor that carries them."""
        ...

    def carries(self, t: Tensor) -> bool:
        """Whether a tensor has samples along that axis."""
        ...

    def take(self, root: "Root", point: "Point") -> None:
        """The rows of a point are those of samples."""
        ...

    def refuse(self, root: "Root", why: str) -> None:
        """A use of a parameter is not understood."""
        ...


@dataclass(eq=False)
class Root:
    """A parameter behind a stand-in. ``start``: the stand-in as a plain tensor; ``use``: the block
    and layer of the parameter."""

    call: ModuleCall
    use: Any
    start: Tensor


@dataclass(eq=False)
class Point:
    """``source`` (or what it is once leading axes of size 1 are added), expanded along ``axis``.

    ``numbers``: it waits as it met numbers without a gradient, not as it was expanded by hand."""

    source: Tensor
    expanded: Tensor
    axis: int
    roots: tuple[Root, ...]
    numbers: bool = False
    taken: bool = False

    def take(self) -> None:
        if not self.taken:
            self.taken = True
            for root in self.roots:
                root.call.take(root, self)
