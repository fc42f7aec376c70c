"""Stacks of experts: a parameter ``[E, out, in]`` that is a matrix for each expert.

Mixtures of experts keep the weights of all experts of a layer in one parameter, and multiply rows
of the input with those of their own expert inside of one forward: by a loop, by gathered copies of
the weights, or by a grouped product in one kernel. No module is called for a single expert. Its
inputs and output gradients are seen where the product is (`natgrad.capture.expert_uses`), and each
expert, and each part of a fused one (gate and up), is a linear layer of its own: with factors, with
averages, and with a step of a length that is not shared by experts that had no row.

Found by itself are modules as Hugging Face's: ``gate_up_proj`` (or ``up_proj``) and ``down_proj``,
with axes and the order of rows as they say; others by ``split={"*.experts.w1": Experts()}``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from natgrad.errors import CoverageError, SettingError
from natgrad.layers.base import SharedInput, trainable
from natgrad.layers.row_parts import Interleaved, Split

_UP, _DOWN = ("gate_up_proj", "up_proj", "gate_proj"), "down_proj"


@dataclass(frozen=True)
class Experts:
    """A parameter with a matrix for each expert.

    Arguments:
        parts: rows of the matrices that lie in that of an expert, such as ``(d, d)`` or
            ``Interleaved(2)`` for gate and up; ``None`` is one.
        inputs_first: whether it is stored as ``[E, in, out]``, not as ``[E, out, in]``.
    """

    parts: tuple[int, ...] | Interleaved | None = None
    inputs_first: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.parts, Sequence):
            object.__setattr__(self, "parts", tuple(self.parts))
        elif self.parts is not None and not isinstance(self.parts, Interleaved):
            raise SettingError(
                f"Experts.parts is {self.parts!r} but must be rows of each matrix: pass them as "
                "(d, d), natgrad.layers.Interleaved(2), or None for one matrix."
            )


class Expert(SharedInput[nn.Module]):
    """The matrix of one expert, or some of its rows. Its inputs are the rows ``[n, in]`` that this
    expert saw, in whatever order.

    Arguments:
        name: of the parameter, with the numbers of expert and part behind it.
        module: that has the parameter.
        short: the name that the module has for it.
        weight: of all experts.
        bias: ``[E, out]`` of all experts, or ``None``.
        index: of the expert.
        inputs_first: whether ``weight`` is ``[E, in, out]``.
        first: of the rows in a unit.
        end: behind the rows in a unit.
        unit: rows after which those of the next turn follow.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        short: str,
        weight: Tensor,
        bias: Tensor | None,
        index: int,
        inputs_first: bool,
        first: int,
        end: int,
        unit: int,
    ) -> None:
        super().__init__(name, module)
        self.weight, self.bias = trainable(weight), trainable(bias)
        self.short, self.stack, self.stack_bias = short, weight, bias
        self.index, self.inputs_first = index, inputs_first
        self.first, self.end, self.unit = first, end, unit
        out, self._inputs = weight.shape[:0:-1] if inputs_first else weight.shape[1:]
        self.rows_of_expert = int(out)
        self.turns = self.rows_of_expert // unit

    input_is_rows = True

    @property
    def rows(self) -> int:
        return self.turns * (self.end - self.first)

    @property
    def inputs_per_row(self) -> int:
        return int(self._inputs)

    def as_weight(self, m: Tensor) -> Tensor:
        by_turn: Tensor = m[0].unflatten(0, (self.turns, -1))
        return by_turn

    def split(self, weight: Tensor) -> Tensor:
        one = weight[self.index]
        return self._own(one.mT if self.inputs_first else one)

    def as_bias(self, bias: Tensor) -> Tensor:
        return self._own(bias[self.index])

    def as_bias_shape(self, m: Tensor) -> Tensor:
        return self.as_weight(m)

    def _own(self, t: Tensor) -> Tensor:
        """``[out, …]`` -> ``[turns, rows of a turn, …]``, a view."""
        by_turn: Tensor = t.unflatten(0, (self.turns, self.unit))
        return by_turn[:, self.first : self.end]

    def region(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...]:
        own: tuple[tuple[int, int], ...] = ((self.first, self.end),)
        if self.turns > 1:
            own = ((0, self.turns), *own)
        one, inputs = (self.index, self.index + 1), (0, self.inputs_per_row)
        if parameter.ndim == 2:
            return (one, *own)
        return (one, inputs, *own) if self.inputs_first else (one, *own, inputs)

    def unfolding(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        if self.turns == 1:
            return None
        return 2 if parameter.ndim == 3 and self.inputs_first else 1, self.unit

    @cached_property
    def own_rows(self) -> frozenset[int]:
        """Which rows of the expert's matrix these are."""
        turns = range(0, self.rows_of_expert, self.unit)
        return frozenset(t + row for t in turns for row in range(self.first, self.end))

    def of_all_rows(self, g: Tensor) -> Tensor:
        """The gradient of all outputs of the expert -> of these.

        Arguments:
            g: ``[n, out]``.
        """
        if self.turns == 1:
            return g[:, self.first : self.end]
        by_turn: Tensor = g.unflatten(1, (self.turns, self.unit))
        return by_turn[..., self.first : self.end].flatten(1)

    def inputs(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1)

    def gradients(self, g: Tensor) -> Tensor:
        return g.unsqueeze(1)


def experts_of(name: str, module: nn.Module, split: Split | None) -> list[Expert]:
    """The matrices of all experts in a module for which no layer is registered; none if it does not
    look like one.

    Arguments:
        name: of the module in the model.
        module: one that has parameters of its own.
        split: as the user has given it: what it says of the module's parameters is what is done,
            and where it says nothing of them each expert is one matrix. ``None``: gate and up are
            two.
    """
    found: list[Expert] = []
    own = dict(module.named_parameters(recurse=False))
    known = _known(module, own, fused=split is None)
    for short, weight in own.items():
        full = f"{name}.{short}" if name else short
        how = next((h for p, h in (split or {}).items() if fnmatchcase(full, p)), None)
        how = how if how is not None else known.get(short)
        if how is None:
            continue
        if weight.ndim != 3 or not isinstance(how, Experts):
            raise CoverageError(
                f"split has {how!r} for the parameter {full!r} of shape {list(weight.shape)}, but "
                "only Experts() of three axes can be split by a parameter's name: name a linear "
                "module instead."
            )
        bias = own.get(f"{short}_bias")
        found += _matrices(full, module, short, weight, bias, how)
    return found


def _matrices(
    full: str, module: nn.Module, short: str, weight: Tensor, bias: Tensor | None, how: Experts
) -> Iterator[Expert]:
    experts, out, inputs = weight.shape
    if how.inputs_first:
        out, inputs = inputs, out
    if bias is not None and bias.shape != (experts, out):
        bias = None
    in_turn = isinstance(how.parts, Interleaved)
    sizes = how.parts.sizes(out) if isinstance(how.parts, Interleaved) else how.parts or (out,)
    whole = in_turn or sum(sizes) == out
    if not sizes or not whole or min(sizes) < 1:
        raise CoverageError(
            f"split cuts the {out} rows of {full!r} by {how!r}, which does not make up so many: "
            "pass parts that do, and inputs_first=True if the parameter is [E, in, out]."
        )
    for index in range(experts):
        for part, (first, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
            name = f"{full}.{index}" if len(sizes) == 1 else f"{full}.{index}.{part}"
            sides = (how.inputs_first, first, end, sum(sizes))
            yield Expert(name, module, short, weight, bias, index, *sides)


def _known(module: Any, own: dict[str, nn.Parameter], *, fused: bool) -> dict[str, Experts]:
    """By the names and shapes that mixtures of experts have: ``{}`` if they are not those.
    ``fused``: gate and up are to be told apart."""
    stacks = {name: p for name, p in own.items() if p.ndim == 3}
    up = next((name for name in _UP if name in stacks), None)
    if up is None or _DOWN not in stacks:
        return {}
    down = stacks[_DOWN]
    both = 2 if up == "gate_up_proj" else 1
    ways = {
        inputs_first: _fits(stacks[up].shape, down.shape, both, inputs_first)
        for inputs_first in (False, True)
    }
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool):
        ways[not said] = False
    if sum(ways.values()) != 1:
        return {}
    inputs_first = ways[True]
    plain = Experts(inputs_first=inputs_first)
    known = {name: plain for name in stacks if name in (*_UP, _DOWN)}
    if fused and both == 2:
        half = stacks[up].shape[2 if inputs_first else 1] // 2
        in_turn = getattr(module, "is_concatenated", True) is False
        known[up] = Experts(Interleaved(2) if in_turn else (half, half), inputs_first)
    return known


def _fits(up: Sequence[int], down: Sequence[int], both: int, inputs_first: bool) -> bool:
    """Whether the rows of ``up`` are the inputs of ``down``, and the other way round."""
    rows, inputs = (up[2], up[1]) if inputs_first else (up[1], up[2])
    out, inner = (down[2], down[1]) if inputs_first else (down[1], down[2])
    return up[0] == down[0] and rows == both * inner and inputs == out
