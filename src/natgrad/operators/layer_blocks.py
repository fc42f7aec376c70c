"""Blocks of a matrix by layer: on the diagonal as operators, between layers as tensors.

K-FAC drops the blocks between layers; these are what it drops (KAISA, Pauloski 2021).
"""

import torch
from torch import Tensor

from natgrad.errors import CoverageError, SettingError
from natgrad.operators import requirements
from natgrad.operators.algebra import DiagonalBlock
from natgrad.operators.base import Operator
from natgrad.operators.progress import track
from natgrad.operators.tape import Tape, positions


def indices(operator: Operator) -> dict[str, Tensor]:
    """Where each layer's weights lie; what belongs to no known layer goes by its own name.

    Arguments:
        operator: over all parameters of its problem; one of a single layer raises.
    """
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


def diagonal_blocks(operator: Operator) -> dict[str, Operator]:
    """The diagonal block of every layer, by its name.

    Arguments:
        operator: the whole matrix.
    """
    return {name: DiagonalBlock(operator, index, name) for name, index in indices(operator).items()}


def cross_block(operator: Operator, rows: str, columns: str) -> Tensor:
    """``[size of rows, size of columns]``, the entries between two layers.

    Arguments:
        operator: the whole matrix, over all parameters of its problem.
        rows: name of the layer whose entries are the rows, as ``operator.layers()`` has it; a
            parameter of no known layer goes by its own name.
        columns: name of the layer whose entries are the columns; each of them costs a product.
    """
    found = indices(operator)
    for name in (rows, columns):
        if name not in found:
            raise SettingError(
                f"There is no layer {name!r} in {operator.kind}: give one of {list(found)}."
            )
    own, other = found[rows], found[columns]
    requirements.fits(
        operator.size, len(other), operator.dtype, "What the block needs", "take smaller layers"
    )
    return operator.columns(other)[own]


def block_norms(operator: Operator, samples: int = 0, seed: int = 0) -> tuple[list[str], Tensor]:
    """Names of layers, and Frobenius norms ``[layers, layers]`` of the blocks between them.

    Arguments:
        operator: the whole matrix, over all parameters of its problem.
        samples: random vectors for each layer, from which norms are estimated by ``E |A_ij z|² =
            |A_ij|²``; 0 is exact, with a product for each parameter.
        seed: of the random signs; only used with ``samples``.
    """
    found = indices(operator)
    names = list(found)
    norms = torch.zeros(len(names), len(names), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for j, name in enumerate(track(names, "blocks", operator.problem.progress)):
        count = samples or len(found[name])
        requirements.fits(
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
