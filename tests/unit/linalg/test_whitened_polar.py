"""Polar factors between roots, beside singular value decompositions and symmetric powers."""

import pytest
import torch

from natgrad.linalg import whitened_polar as module
from natgrad.linalg.block_diagonal import BlockDiagonal
from natgrad.linalg.polar import exact_polar
from natgrad.linalg.whitened_polar import whitened_polar

SHAPES = [(6, 9), (6, 6), (40, 41), (70, 75)]  # tiny, one call of LAPACK each, in threads


def turned(batch, rows, cols, seed):
    """Orthonormal columns, at random."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, rows, cols, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(noise)[0]


def factor(batch, dim, seed):
    """Powers of a symmetric matrix with eigenvalues between 1/1,000 and 1."""
    q, values = turned(batch, dim, dim, seed), torch.logspace(0, -3, dim, dtype=torch.float64)
    return lambda power: q * values**power @ q.mT


def case(shape, batch=3):
    """Factors, a gradient that is large where they are, and what becomes of it: singular values of
    the whitened one are between 1/20 and 1."""
    rows, cols = shape
    g, a = factor(batch, rows, 1), factor(batch, cols, 2)
    u, v = turned(batch, rows, rows, 3), turned(batch, cols, rows, 4)
    values = torch.logspace(0, -1.3, rows, dtype=torch.float64)
    m = g(0.25) @ (u * values @ v.mT) @ a(0.25)
    return g, a, m, g(-0.25) @ u @ v.mT @ a(-0.25)


def close(found, expected, error):
    return float((found - expected).norm() / expected.norm()) <= error


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
def test_is_the_whitened_polar_factor_brought_back(shape, dtype, error):
    g, a, m, expected = case(shape)
    out = torch.empty_like(m, dtype=dtype)
    found = whitened_polar(g(-0.25).to(dtype), m.to(dtype), a(-0.5).to(dtype), 1e9, out)
    assert found.data_ptr() == out.data_ptr()
    assert close(out, expected, error)
    other = torch.empty_like(m.mT, dtype=dtype)  # a view of another layout, as tall matrices are
    whitened_polar(g(-0.25).to(dtype), m.to(dtype), a(-0.5).to(dtype), 1e9, other.mT)
    assert close(other.mT, expected, error)


def test_sides_that_are_diagonals_or_blocks_or_none():
    m = torch.randn(2, 4, 6, dtype=torch.float64)
    left, square = (torch.rand(2, n, dtype=torch.float64) + 0.5 for n in (4, 6))
    roots = left.unsqueeze(2), square.sqrt().unsqueeze(1)
    expected = roots[0] * exact_polar(roots[0] * m * roots[1]) * roots[1]
    out = torch.empty_like(m)
    assert close(whitened_polar(left, m, square, 1e9, out), expected, 1e-12)
    dense = torch.diag_embed(square)
    blocks = BlockDiagonal.of(dense, ((2, 3),))
    assert close(whitened_polar(left, m, blocks, 1e9, out), expected, 1e-12)
    assert close(whitened_polar(None, m, None, 1e9, out), exact_polar(m), 1e-12)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_the_scale_does_not_matter(scale):
    g, a, m, expected = case((6, 9), batch=1)
    parts = (g(-0.25).float(), (scale * m).float(), a(-0.5).float())
    assert close(whitened_polar(*parts, 1e9, torch.empty_like(parts[1])), expected, 2e-3)


def test_what_is_zero_stays_zero_and_what_is_small_becomes_no_more_than_one():
    u, v = turned(1, 8, 8, 1)[0], turned(1, 20, 8, 2)[0]
    values = torch.tensor([1.0, 0.5, 0.01, 2e-3, 1e-4, 1e-6, 0.0, 0.0], dtype=torch.float64)
    m = (u * values @ v.mT).float().unsqueeze(0)
    found = whitened_polar(None, m, None, 1904.0, torch.empty_like(m))[0].double()
    got = torch.linalg.vecdot((u.mT @ found), v.mT)
    assert (got[:4] - 1).abs().max() <= 0.05
    assert (got[:3] - 1).abs().max() <= 2e-3
    assert 0.05 < got[4] <= 1
    assert (torch.linalg.svdvals(found) <= 1.05).all()
    assert got[5:].abs().max() <= 2e-3
    double = whitened_polar(None, m.double(), None, 100.0, torch.empty_like(m.double()))[0]
    # Relative to the Frobenius norm, which is 1.118.
    assert torch.linalg.vecdot(u.mT @ double, v.mT)[3] == pytest.approx(0.2 / 1.118, rel=1e-3)
    nothing = torch.zeros(2, 5, 7)
    assert torch.equal(
        whitened_polar(None, nothing, None, 1904.0, torch.empty_like(nothing)), nothing
    )


def test_what_is_not_finite_spoils_its_own_matrix_alone():
    g, a, m, expected = case((6, 9))
    m[1, 2, 3] = torch.nan
    found = whitened_polar(g(-0.25), m, a(-0.5), 1e9, torch.empty_like(m))
    assert not found[1].isfinite().any()
    assert close(found[::2], expected[::2], 1e-9)


def test_a_decomposition_that_fails_is_tried_again_in_double_precision(monkeypatch):
    g, a, m, expected = case((6, 9), batch=1)
    eigh, tried = torch.linalg.eigh, []

    def failing(matrix):
        tried.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError
        return eigh(matrix)

    monkeypatch.setattr(module.torch.linalg, "eigh", failing)
    parts = (g(-0.25).float(), m.float(), a(-0.5).float())
    assert close(whitened_polar(*parts, 1e9, torch.empty_like(parts[1])), expected, 2e-3)
    assert tried == [torch.float32, torch.float64]
