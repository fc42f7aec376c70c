"""Modules that call functions on their parameters: linear projections that no module hook sees.

A function mode is entered for the time of the module's forward and reports every projection in it.
Attention needs nothing else. A recurrence in one fused kernel shows no projections, so that it is
written out step by step, on steps that update the curvature only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.layers.base import M, SharedInput, trainable

# Called for every projection seen: layer, what it keeps of its input, output, and what makes the
# layer's own gradient, samples first, of the gradient of that output.
Seen = Callable[["Projection[Any]", Any, Tensor, Callable[[Tensor], Tensor]], None]


class Projection(SharedInput[M]):
    """Some rows of a module's parameter, applied to ``[n, s, features]``.

    Arguments:
        name: of the layer: that of the module and the role of the projection.
        module: that has the parameter, itself or in a child.
        weight: the parameter ``[rows, features]``, which may hold the rows of several projections.
        bias: ``[rows]``, or ``None``.
        rows: those of the parameter that are this matrix; ``None`` is all.
    """

    input_is_rows = True

    def __init__(
        self, name: str, module: M, weight: Tensor, bias: Tensor | None, rows: slice | None = None
    ) -> None:
        super().__init__(name, module)
        self._path = next(path for path, p in module.named_parameters() if p is weight)
        self.weight, self.bias = trainable(weight), trainable(bias)
        self.slice = rows or slice(0, weight.shape[0])
        self._inputs = weight.shape[1]

    @property
    def source(self) -> Tensor:
        """The weight that the module computes with: FSDP puts another tensor there meanwhile."""
        return self.module.get_parameter(self._path)

    @property
    def rows(self) -> int:
        return int(self.slice.stop - self.slice.start)

    @property
    def inputs_per_row(self) -> int:
        return self._inputs

    def split(self, weight: Tensor) -> Tensor:
        return weight[self.own(weight)]

    def as_bias(self, bias: Tensor) -> Tensor:
        return bias[self.slice].unsqueeze(0)

    def own(self, weight: Tensor) -> slice:
        """Which rows of a tensor are this matrix.

        Arguments:
            weight: the whole parameter, or what a call used of it.
        """
        # A packed projection has the rows of all; a separate weight has its own only.
        return self.slice if weight.shape[0] > self.rows else slice(None)

    def region(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...]:
        first, end, _ = self.own(parameter).indices(parameter.shape[0])
        return (first, end), *super().region(parameter)[1:]

    @classmethod
    @abstractmethod
    def watch(cls, layers: Sequence[Any], seen: Seen, inputs: tuple[Any, ...]) -> "Watch[Any]":
        """The function mode that sees the calls of a module's projections.

        Arguments:
            layers: all layers of one module.
            seen: is called for every projection with the layer, what it keeps of its input, a
                tensor of the graph, and a function from that tensor's gradient to the layer's own,
                samples in front.
            inputs: positional arguments that the module is called with.
        """

    def inputs(self, x: Any) -> Tensor:
        rows: Tensor = x
        return rows

    def gradients(self, g: Tensor) -> Tensor:
        return g


P = TypeVar("P", bound=Projection[Any])


class Watch(TorchFunctionMode, ABC, Generic[P]):
    """A function mode that sees every torch function that one call of a module makes.

    Arguments:
        layers: all layers of one module.
        seen: is called for every projection with the layer, what it keeps of its input, a tensor of
            the graph, and a function from that tensor's gradient to the layer's own, samples in
            front.
        inputs: positional arguments that the module is called with.
    """

    def __init__(self, layers: Sequence[P], seen: Seen, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.layers, self.seen, self.inputs = layers, seen, inputs

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})

    @abstractmethod
    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the function does, and report the projections in it. A mode is off inside itself.

        Arguments:
            func: a torch function.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
