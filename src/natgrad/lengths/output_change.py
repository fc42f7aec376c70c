"""A root mean square of 1 of how far the layer's outputs move, over the data behind its factor A.

A step ``D`` changes the output of a layer by ``D a``, whose mean square over samples and output
units is ``tr(D A D^T) / rows`` with ``A`` the second moments of the inputs: no further pass over
the data is needed. The learning rate then says by how much outputs move, however large inputs are.
"""

from dataclasses import dataclass

from torch import Tensor

from natgrad.errors import CoverageError
from natgrad.inverses import Decomposed
from natgrad.lengths.base import Length
from natgrad.structures import Structure


@dataclass(frozen=True)
class OutputChange(Length):
    """The step of a layer changes its outputs by a root mean square of 1.

    Needs a structure with a factor A of the inputs, ``Kronecker()`` or ``EKFAC()``. Inputs of norm
    layers are normalised, so that a root mean square of 1 of the step itself is the same.
    """

    @property
    def uses_curvature(self) -> bool:
        return True

    def check(self, name: str, structure: Structure, *, normalises: bool) -> None:
        if ("A" not in structure.needs or structure.whole) and not normalises:
            raise CoverageError(
                f"OutputChange() needs the second moments of a layer's inputs, which {structure!r} "
                f"of {name!r} does not keep: use Kronecker() or EKFAC() there, or pass "
                "length=natgrad.Rms()."
            )

    def squares(self, block: Decomposed, step: Tensor) -> Tensor:
        curved = block.along_inputs(step)
        if curved is None:
            return step.square().mean((1, 2))
        return (curved * step).sum((1, 2)).clamp_(min=0.0) / step.shape[1]
