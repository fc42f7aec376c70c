"""Squared lengths of steps, one for each matrix of a stack, by hand."""

import pytest
import torch

from natgrad import (
    EKFAC,
    Cholesky,
    Diagonal,
    Eigen,
    Full,
    Kronecker,
    OutputChange,
    Rms,
    UnitWise,
)
from natgrad.errors import CoverageError
from natgrad.inverses import DecomposedFactor
from natgrad.lengths import Dogleg, Graft

SCALES = [1e-3, 1.0, 1e3]


def blocks(inverse, inputs):
    """Of two groups, with the second moments of their inputs; or without."""
    factors = []
    for matrix in (torch.eye(3, dtype=torch.float64).expand(2, 3, 3), inputs):
        if matrix is None:
            factors.append(None)
            continue
        damping = torch.zeros(2, dtype=torch.float64)
        parts = inverse.decompose(matrix.clone(), damping)
        factors.append(DecomposedFactor(inverse, parts, matrix.shape[1]))
    return inverse.kronecker(*factors)


def second_moments():
    rows = torch.randn(2, 9, 4, dtype=torch.float64)
    return rows.mT @ rows / 9


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("length", [Graft(), Dogleg()], ids=repr)
def test_a_norm(length, scale):
    step = scale * torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.stack([torch.linalg.matrix_norm(one) ** 2 for one in step])
    torch.testing.assert_close(length.squares(blocks(Eigen(), second_moments()), step), expected)


@pytest.mark.parametrize("scale", SCALES)
def test_a_root_mean_square(scale):
    step = scale * torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.stack([sum(x**2 for x in one.flatten()) / 12 for one in step])
    found = Rms().squares(blocks(Eigen(), second_moments()), step)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("inverse", [Eigen(), Cholesky()], ids=repr)
def test_how_far_outputs_move(inverse, scale):
    """``tr(D A D^T) / rows``, of the smallest steps, too; without inputs, a mean of all squares."""
    step, a = scale * torch.randn(2, 3, 4, dtype=torch.float64), second_moments()
    moved = torch.stack([(d @ m @ d.T).trace() / 3 for d, m in zip(step, a, strict=True)])
    torch.testing.assert_close(OutputChange().squares(blocks(inverse, a), step), moved)
    alone = OutputChange().squares(blocks(inverse, None), step)
    torch.testing.assert_close(alone, torch.stack([(d**2).sum() / 12 for d in step]))


@pytest.mark.parametrize("length", [Graft(), Dogleg(), Rms(), OutputChange()], ids=repr)
def test_whether_it_depends_on_the_curvature(length):
    step = torch.randn(2, 3, 4, dtype=torch.float64)
    one, other = (length.squares(blocks(Eigen(), second_moments()), step) for _ in range(2))
    assert length.uses_curvature == (not torch.equal(one, other))


@pytest.mark.parametrize(
    ("structure", "known"),
    [
        (Kronecker(), True),
        (EKFAC(), True),
        (Kronecker(sharing="traces"), False),  # whose A is of whole gradients
        (Diagonal(), False),
        (UnitWise(), False),
        (Full(), False),
    ],
    ids=repr,
)
def test_outputs_need_the_second_moments_of_inputs(structure, known):
    """Those of norm layers are 1, whatever is kept of them."""
    OutputChange().check("layer", structure, normalises=True)
    if known:
        OutputChange().check("layer", structure, normalises=False)
    else:
        with pytest.raises(CoverageError, match=r"of 'layer' does not keep: use Kronecker\(\)"):
            OutputChange().check("layer", structure, normalises=False)
