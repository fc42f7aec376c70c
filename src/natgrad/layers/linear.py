"""``nn.Linear``: whatever stands between the batch and the feature axis is shared positions."""

from torch import Tensor, nn

from natgrad.layers.base import SharedInput
from natgrad.layers.registry import register


class RowInputs(SharedInput[nn.Module]):
    """A module whose input and output are ``[n, ..., features]``."""

    input_features = output_features = 1
    input_is_rows = True

    def inputs(self, x: Tensor) -> Tensor:
        return self._positions(x)

    def gradients(self, g: Tensor) -> Tensor:
        return self._positions(g)

    def _positions(self, t: Tensor) -> Tensor:
        """``[n, ..., d]`` -> ``[n, s, d]``."""
        return t.unsqueeze(1) if t.ndim == 2 else t.flatten(1, -2)


@register(nn.Linear)
class Linear(RowInputs):
    module: nn.Linear

    @property
    def rows(self) -> int:
        return self.module.out_features

    @property
    def inputs_per_row(self) -> int:
        return self.module.in_features


@register("transformers.pytorch_utils.Conv1D")
class TransposedLinear(RowInputs):
    """Hugging Face's ``Conv1D``: a linear layer whose weight is stored ``[inputs, outputs]``."""

    @property
    def rows(self) -> int:
        return int(self.module.nf)  # type: ignore[arg-type]

    @property
    def inputs_per_row(self) -> int:
        return int(self.module.nx)  # type: ignore[arg-type]

    def split(self, weight: Tensor) -> Tensor:
        return weight.mT
