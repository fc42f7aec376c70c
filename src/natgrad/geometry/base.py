"""How a gradient becomes a step: the steepest one under a norm, in coordinates of the curvature.

Write a layer's gradient, or its momentum, in coordinates in which the curvature is (nearly) the
identity, ``M' = G^(-p/2) M A^(-p/2)``; ask for the steepest step of length one; go back. Which step
that is depends on the norm that measures lengths there:

`Euclidean`    the Frobenius norm: M' itself. With p = 1 the natural gradient of the papers.
`Spectral`     the largest singular value: the polar factor of M'. With p = 0 it is Muon.
`Elementwise`  entry by entry in the eigenbasis, over the root of second moments: SOAP's step.

A geometry knows no layer, no structure and no rank: it is handed a `Decomposed` block, or a stack
of them, and matrices. How long the step is then made is `natgrad.lengths`'s business.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from natgrad.damping import Damping
from natgrad.inverses import Decomposed, Function, Inverse

Shape = tuple[int, int, int]
Kept = Mapping[str, Tensor]


class Geometry(ABC):
    """Derived classes write ``step``; what they keep between steps is ``kept`` and ``observe``."""

    @property
    def uses_curvature(self) -> bool:
        """Whether a step depends on the curvature at all; otherwise none is measured."""
        return True

    @property
    def is_linear(self) -> bool:
        """Whether a sum of gradients gives the sum of their steps: then the length of a step says
        how long the gradient was, and the KL clip means something."""
        return False

    @property
    def measures_in_basis(self) -> bool:
        """Whether something is measured along each vector of an eigenbasis, which must then depend
        on the curvature alone, also where any other one would do as well."""
        return False

    def check(self, inverse: Inverse) -> None:
        """Raise CoverageError for an inverse that cannot be used with this geometry.

        Arguments:
            inverse: the one that the user has chosen.
        """
        return

    def kept(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """The shapes of what is kept between steps for a block, by name.

        Arguments:
            shape: ``(groups, rows, cols)`` of the weight.
        """
        return {}

    def operations(self, shape: Shape) -> float:
        """Operations of a step for a block, beside products with its factors.

        Arguments:
            shape: ``(groups, rows, cols)`` of the weight.
        """
        return 0.0

    def observe(self, block: Decomposed, gradient: Tensor, fits: Tensor, kept: Kept) -> None:
        """Take in the gradient of this step, before there is a momentum in it.

        Arguments:
            block: of one weight or of several that are stacked.
            gradient: ``[b, rows, cols]``, zero where it was not finite.
            fits: ``[b]``, whether it was finite.
            kept: what `kept` has named, stacked along the first axis; is written to.
        """
        return

    def function(self, damping: Damping) -> Function | None:
        """The function of the block that a step applies to the gradient, where it is one.

        Arguments:
            damping: of the block.
        """
        return None

    @abstractmethod
    def step(self, block: Decomposed, m: Tensor, kept: Kept, damping: Damping, out: Tensor) -> None:
        """The direction of steepest descent, without its sign.

        Arguments:
            block: of one weight or of several that are stacked.
            m: ``[b, rows, cols]``, the gradient or its momentum.
            kept: what `kept` has named, stacked along the first axis.
            damping: of the block.
            out: ``[b, rows, cols]``, where the step is written; shares no memory with ``m``.
        """
