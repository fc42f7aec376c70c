"""A root mean square of 1 over the entries of the weight, as Adam's step has about it."""

from dataclasses import dataclass

from torch import Tensor

from natgrad.inverses import Decomposed
from natgrad.lengths.base import Length


@dataclass(frozen=True)
class Rms(Length):
    """The step of a layer has a root mean square of 1, so that the learning rate is how far an
    entry of the weight moves: the rates that people know from AdamW fit."""

    def squares(self, block: Decomposed, step: Tensor) -> Tensor:
        return step.square().mean((1, 2))
