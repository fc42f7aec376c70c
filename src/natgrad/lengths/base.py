"""How long the step of a layer is, given its direction.

The papers bound one number for the whole model, the KL clip (`natgrad.kfac.clipping`), and while it
binds it cancels the learning rate. A `Length` gives every layer's step a length of its own, 1 in
some measure, so that the learning rate *is* the length: its schedule is obeyed, and one rate fits
layers, networks and batch sizes alike.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from natgrad.inverses import Decomposed
from natgrad.structures import Structure


class Length(ABC):
    """Derived classes write ``squares``."""

    def check(self, name: str, structure: Structure, *, normalises: bool) -> None:
        """Raise CoverageError for a block whose structure does not keep what is needed.

        Arguments:
            name: of the block, for the sentence.
            structure: of the block.
            normalises: whether it is that of a norm layer.
        """
        return

    @property
    def uses_curvature(self) -> bool:
        """Whether it depends on the curvature."""
        return False

    @property
    def of_gradient(self) -> bool:
        """Whether a step shall be as long as the gradient that it follows, that of the loss as it
        was written; otherwise its length is 1."""
        return False

    @property
    def of_update(self) -> bool:
        """Whether it is found beside the update that the optimizer has made of plain gradients,
        after that; the step before it is the natural gradient as it is."""
        return False

    @abstractmethod
    def squares(self, block: Decomposed, step: Tensor) -> Tensor:
        """The squared length of the step of each matrix, ``[b]``; the squared length of a block is
        the mean over those of its groups.

        Arguments:
            block: of one weight or of several that are stacked.
            step: ``[b, rows, cols]``.
        """
