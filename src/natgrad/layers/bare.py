"""Parameters that sit bare on a module and are used in an expression of its forward.

Class tokens, position tables, tables of relative positions, layer scales and the like are in no
product with an input that rows would share, so that there are no Kronecker factors, and what an
expression computes of them is not for a layer to know. What is known are gradients of samples: the
forward is run with a stand-in that says where samples come in (`natgrad.capture.bare_uses`), and
the gradient that comes back there has the samples in front. The parameter is a column ``W [numel,
1]``; the structure of such a block is the diagonal, unless one of whole gradients was asked for.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from natgrad.layers.axes import per_sample
from natgrad.layers.base import Layer, real, trainable


class Bare(Layer[nn.Module]):
    """One parameter of a module that no layer stands for.

    Arguments:
        name: of the parameter in the model.
        module: that has the parameter.
        short: the name that the module has for it.
    """

    inputs_per_row = 1
    prefers_diagonal = True

    def __init__(self, name: str, module: nn.Module, short: str) -> None:
        super().__init__(name, module)
        parameter = module._parameters[short]
        assert parameter is not None
        self.short, self.weight, self.bias = short, trainable(parameter), None
        self._shape = parameter.shape

    @property
    def rows(self) -> int:
        return self._shape.numel()

    def as_weight(self, m: Tensor) -> Tensor:
        column = m[0, :, 0]
        return column.unflatten(0, self._shape) if len(self._shape) else column[0]

    def sample_gradients(self, x: Any, g: Tensor, samples: int | None) -> Iterator[Tensor]:
        # g is [n, numel]: what comes of a use is pulled back to the parameter, sample by sample.
        own = per_sample(g.to(real(g.dtype))[None, :, None], samples)[0].sum(1)
        yield own[:, None, :, None]
