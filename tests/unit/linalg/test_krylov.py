"""The space of a chain of products: its basis, its projection, and where it ends."""

import pytest
import torch

from natgrad.linalg.krylov import KrylovSpace, orthogonalise
from natgrad.linalg.matrix_free import MatrixFree


def space(matrix, capacity=8):
    return KrylovSpace(MatrixFree(lambda m: matrix @ m, len(matrix), dtype=matrix.dtype), capacity)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("distinct", [1, 2, 4])
def test_a_chain_ends_where_nothing_is_new(distinct, scale):
    """A vector with parts along eigenvectors of so many eigenvalues spans no more than that, and
    rounding is no direction."""
    n = 9
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    values = scale * (1.0 + torch.arange(n, dtype=torch.float64) % distinct)
    own = space(q @ torch.diag(values) @ q.T)
    pending = [own.append(torch.randn(n, dtype=torch.float64))]
    born = 0
    while pending[0] is not None:
        pending = own.expand(pending)
        born += 1
        assert born <= distinct
    assert own.size == distinct
    rows = own.rows
    torch.testing.assert_close(rows @ rows.T, torch.eye(distinct, dtype=torch.float64))
    found, _, residuals = own.ritz()
    torch.testing.assert_close(found, values.unique().flip(0))
    assert residuals.norm() < 1e-9 * scale


def test_what_is_taken_away_and_what_is_left():
    """Also of a vector that lies nearly in the span: one pass would leave rounding along it."""
    torch.manual_seed(0)
    rows = torch.linalg.qr(torch.randn(20, 6, dtype=torch.float64))[0].T
    inside = rows.T @ torch.randn(6, dtype=torch.float64)
    for outside in (1.0, 1e-6, 1e-12):
        w = inside + outside * torch.randn(20, dtype=torch.float64)
        rest, components, norm = orthogonalise(rows, w)
        torch.testing.assert_close(rows.T @ components + rest, w)
        assert norm == pytest.approx(float(rest.norm()))
        assert (rows @ rest).abs().max() < 1e-14 * norm + 1e-28


def test_a_vector_of_the_space_is_not_taken_in_again():
    own = space(torch.eye(5, dtype=torch.float64))
    first, second = torch.randn(2, 5, dtype=torch.float64)
    assert own.append(first) == 0
    assert own.append(3 * first) is None
    assert own.append(second) == 1
    assert own.append(first - second) is None
