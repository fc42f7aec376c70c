"""Squares of gradients of samples without their mean, ``mean_n (s_n - g)² [P]``, layer by layer.

Pieces of a layer's gradients are made one after another and never kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.inverses import Parts
from natgrad.operators import Problem
from natgrad.operators.structured import sums_of
from natgrad.operators.tape import Tape, positions
from natgrad.operators.unseen import refuse_unseen
from natgrad.operators.vectors import Gradients
from natgrad.structures import Diagonal
from natgrad.structures.base import AnyLayer, Sums, add_vectors


@dataclass(frozen=True)
class _Centred(Diagonal):
    """``parts["center"]``: what is taken off, ``[groups, rows, cols]``, and how often it was."""

    def folded(self, layer: AnyLayer, gs: Sequence[Tensor]) -> Sequence[Tensor]:
        return gs  # whose signs count

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, parts: dict[str, Parts]
    ) -> None:
        center, seen = parts["center"]
        if len(summary) == 2:
            a, g = summary
            summary = (torch.einsum("bnsr,bnsc->nbrc", g, a),)
        away = summary[0] - center  # [n, groups, rows, cols]
        seen += len(away)
        add_vectors(sums["F"], away.flatten(1).unsqueeze(0))


def centred_squares(problem: Problem, g: Tensor) -> Tensor:
    """``[P]`` in float64 for the mean ``g [P]``; raises CoverageError if a layer is not known."""
    tape = Tape(problem, _Centred())
    tape.refuse_uncovered()
    refuse_unseen(problem)
    n, kind = problem.samples, "variance"
    part = g * (problem.weight / n)  # layers see the sum of losses, of which s_n is N/W times
    index = {block: positions(problem, block) for block in tape.blocks}
    seen = torch.zeros(len(index), dtype=torch.float64, device=g.device)
    for block, count in zip(index, seen.split(1), strict=True):
        block.parts = {"center": (part[index[block]].view(block.shape), count)}
    with problem.ready(), tape:
        kept = sums_of(problem, tape, Gradients(), {b: ["F"] for b in index}, kind)
    out = torch.zeros_like(g, dtype=torch.float64)
    for block, count in zip(index, problem.totals(seen).tolist(), strict=True):
        here = index[block]
        # Samples whose batch never reached the layer have no gradient there, which is -g away.
        out[here] = kept[block]["F"].double() + (1.0 - count / n) * g[here].double().square()
    return out
