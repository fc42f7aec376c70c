"""Squares of gradients of samples without their mean, ``mean_n (s_n - g)² [P]``, layer by layer.

Pieces of a layer's gradients are made one after another and never kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.operators import Problem
from natgrad.operators.hidden_uses import refuse_unseen
from natgrad.operators.structured import sums_of
from natgrad.operators.tape import Tape, positions
from natgrad.operators.vectors import LossGradients
from natgrad.structures import Diagonal
from natgrad.structures.base import AnyLayer, Factors, Sums, add_vectors


@dataclass
class _Center:
    """``mean [groups, rows, cols]`` of a layer is taken off its samples' gradients, which are
    counted in ``seen [1]``."""

    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    seen: Tensor = field(default_factory=lambda: torch.zeros(1))


@dataclass(frozen=True, eq=False)
class _Centred(Diagonal):
    """Of one layer."""

    center: _Center = field(default_factory=_Center)

    def folded(self, layer: AnyLayer, gs: Sequence[Tensor]) -> Sequence[Tensor]:
        return gs  # whose signs count

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, decomposed: Factors
    ) -> None:
        if len(summary) == 2:
            a, g = summary
            summary = (torch.einsum("bnsr,bnsc->nbrc", g, a),)
        away = summary[0] - self.center.mean  # [n, groups, rows, cols]
        self.center.seen += len(away)
        add_vectors(sums["F"], away.flatten(1).unsqueeze(0))


def centred_squares(problem: Problem, g: Tensor) -> Tensor:
    """``[P]`` in float64 for the mean ``g [P]``; raises CoverageError if a layer is not known.

    Arguments:
        problem: model, loss and data.
        g: the mean gradient ``[P]``, which is subtracted.
    """
    tape = Tape(problem, lambda _: _Centred())
    tape.refuse_uncovered()
    refuse_unseen(problem)
    n, kind = problem.samples, "variance"
    part = g * (problem.weight / n)  # layers see the sum of losses, of which s_n is N/W times
    index = {block: positions(problem, block) for block in tape.blocks}
    seen = torch.zeros(len(index), dtype=torch.float64, device=g.device)
    for block, count in zip(index, seen.split(1), strict=True):
        assert isinstance(block.structure, _Centred)
        block.structure.center.mean = part[index[block]].view(block.shape)
        block.structure.center.seen = count
    with problem.ready(), tape:
        kept = sums_of(problem, tape, LossGradients(), {b: ["F"] for b in index}, kind)
    out = torch.zeros_like(g, dtype=torch.float64)
    for block, count in zip(index, problem.totals(seen).tolist(), strict=True):
        here = index[block]
        # Samples whose batch never reached the layer have no gradient there, which is -g away.
        out[here] = kept[block]["F"].double() + (1.0 - count / n) * g[here].double().square()
    return out
