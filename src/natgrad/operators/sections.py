"""Blocks of a matrix by layer: on the diagonal as operators, between layers as tensors (K2)."""

import torch
from torch import Tensor

from natgrad.errors import CoverageError, SettingError
from natgrad.operators import checks
from natgrad.operators.algebra import Section
from natgrad.operators.base import Operator
from natgrad.operators.progress import track
from natgrad.operators.tape import Tape, positions


def indices(operator: Operator) -> dict[str, Tensor]:
    """Where each layer's weights lie; what belongs to no known layer goes by its own name."""
    if operator.space is None:
        raise SettingError(
            f"{operator.kind} is not made of layers: take those of the whole matrix."
        )
    problem = operator.problem
    try:
        tape = Tape(problem, None)
    except CoverageError:  # no layer is known
        found, others = {}, list(operator.space.names)
    else:
        found = {block.name: positions(problem, block) for block in tape.blocks}
        others = list(tape.uncovered)
    for name in others:
        part = operator.space.slices[name]
        found[name] = torch.arange(part.start, part.stop, device=problem.device)
    return found


def sections(operator: Operator) -> dict[str, Operator]:
    return {name: Section(operator, index, name) for name, index in indices(operator).items()}


def cross_block(operator: Operator, rows: str, columns: str) -> Tensor:
    """``[size of rows, size of columns]``, the entries between two layers."""
    found = indices(operator)
    for name in (rows, columns):
        if name not in found:
            raise SettingError(
                f"There is no layer {name!r} in {operator.kind}: give one of {list(found)}."
            )
    own, other = found[rows], found[columns]
    checks.fits(
        operator.size, len(other), operator.dtype, "What the block needs", "take smaller layers"
    )
    return operator.columns(other)[own]


def block_norms(operator: Operator, samples: int = 0, seed: int = 0) -> tuple[list[str], Tensor]:
    """Names of layers, and Frobenius norms ``[layers, layers]`` of the blocks between them.

    ``samples``: from that many random vectors a layer, ``E |A_ij z|² = |A_ij|²``; 0 is exact.
    """
    found = indices(operator)
    names = list(found)
    norms = torch.zeros(len(names), len(names), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for j, name in enumerate(track(names, "blocks", operator.problem.progress)):
        count = samples or len(found[name])
        checks.fits(
            operator.size, count, operator.dtype, f"The columns of {name!r}", "give samples=64"
        )
        if samples:
            signs = torch.randint(2, (len(found[name]), count), generator=generator) * 2 - 1
            v = torch.zeros(operator.size, count, dtype=operator.dtype, device=operator.device)
            v[found[name]] = signs.to(v)
            columns = operator.product(v)
        else:
            columns = operator.columns(found[name])
        for i, other in enumerate(names):
            square = columns[found[other]].double().square().sum() / (count if samples else 1)
            norms[i, j] = square.sqrt()
    if samples:  # two estimates of one number
        norms = ((norms.square() + norms.mT.square()) / 2).sqrt()
    return names, norms
