"""``nn.Bilinear``: a linear layer on all products ``x1_i x2_j`` of its two inputs.

``y_r = x1^T W_r x2 + b_r``, so row ``r`` of the matrix is ``W_r`` flattened, and the input that all
rows share is the outer product. It is as large as it sounds: factor A has ``in1 * in2`` columns.
"""

from typing import Any

from torch import Tensor, nn

from natgrad.layers.linear import RowInputs
from natgrad.layers.registry import register


@register(nn.Bilinear)
class Bilinear(RowInputs):
    module: nn.Bilinear
    input_is_rows = False  # no other layer sees these products

    @property
    def rows(self) -> int:
        return self.module.out_features

    @property
    def inputs_per_row(self) -> int:
        return self.module.in1_features * self.module.in2_features

    def split(self, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Any:
        first, second = (self.samples_first(x.detach(), 1) for x in (*args, *kwargs.values())[:2])
        return (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
