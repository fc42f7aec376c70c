"""The length that the plain gradient has, layer by layer: the curvature only turns the step.

    step <- step |grad| / |step|            norms of the layer's whole matrix, bias included

"Grafting" (Agarwal et al. 2020; Anil et al. 2020): one method says where to go and the
other how far. A learning rate, schedule, clipping norm and weight decay that were tuned for SGD
then mean what they meant, since every layer's update is as long as it was. What the lengths of a
natural gradient would say beyond that, that flat layers may move further, is given up.

The gradient is that of the loss as it was written: a sum keeps the length of a sum. It is taken
after K-FAC's own momentum, where that is used, since the step follows that.
"""

from dataclasses import dataclass

from torch import Tensor

from natgrad.inverses import Decomposed
from natgrad.lengths.base import Length


@dataclass(frozen=True)
class Graft(Length):
    """The step of a layer is as long as its plain gradient, so that learning rates that were tuned
    without K-FAC stay valid."""

    @property
    def of_gradient(self) -> bool:
        return True

    def squares(self, block: Decomposed, step: Tensor) -> Tensor:
        return step.square().sum((1, 2))
