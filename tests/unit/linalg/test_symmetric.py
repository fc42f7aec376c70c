"""Every closed form against the dense matrix."""

import pytest
import torch

from natgrad.linalg.symmetric import DenseBlocks, DiagonalMatrix, KroneckerProduct, Rotated

B, R, C = 2, 3, 5


def symmetric(*shape):
    m = torch.randn(*shape, dtype=torch.float64)
    return m + m.mT


def basis(dim):
    return torch.linalg.qr(torch.randn(B, dim, dim, dtype=torch.float64))[0]


def block_diagonal(blocks):
    return torch.block_diag(*blocks)


def cases():
    torch.manual_seed(0)
    blocks = symmetric(B, 4, 4)
    yield "dense", DenseBlocks(blocks), block_diagonal(blocks)
    large = symmetric(B, 40, 40)  # decomposed one by one
    yield "large", DenseBlocks(large), block_diagonal(large)
    values = torch.randn(7, dtype=torch.float64)
    yield "diagonal", DiagonalMatrix(values), torch.diag(values)
    g, a = symmetric(B, R, R), symmetric(B, C, C)
    dg, da = torch.randn(B, R, dtype=torch.float64), torch.randn(B, C, dtype=torch.float64)
    full_g, full_a = torch.diag_embed(dg), torch.diag_embed(da)
    for name, one, other, left, right in (
        ("kronecker", g, a, g, a),
        ("kronecker, diagonal g", dg, a, full_g, a),
        ("kronecker, diagonal a", g, da, g, full_a),
        ("kronecker, both diagonal", dg, da, full_g, full_a),
    ):
        dense = block_diagonal(
            [torch.kron(left[i].contiguous(), right[i].contiguous()) for i in range(B)]
        )
        yield name, KroneckerProduct(one, other), dense
    s = torch.randn(B, R, C, dtype=torch.float64)
    q_g, q_a = basis(R), basis(C)
    eye_r, eye_c = torch.eye(R, dtype=torch.float64), torch.eye(C, dtype=torch.float64)
    for name, one, other in (("rotated", q_g, q_a), ("left", q_g, None), ("right", None, q_a)):
        whole = [
            torch.kron(
                (eye_r if one is None else one[i]).contiguous(),
                (eye_c if other is None else other[i]).contiguous(),
            )
            for i in range(B)
        ]
        dense = block_diagonal([w @ torch.diag(s[i].flatten()) @ w.mT for i, w in enumerate(whole)])
        yield name, Rotated(one, other, s), dense


CASES = list(cases())
each = pytest.mark.parametrize(
    ("matrix", "dense"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)


def close(found, truth):
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)


@each
def test_entries(matrix, dense):
    assert matrix.size == len(dense)
    close(matrix.dense(), dense)
    close(matrix.diagonal(), dense.diagonal())
    close(matrix.trace(), dense.trace())
    close(matrix.square_norm(), dense.square().sum())


@each
def test_products(matrix, dense):
    m = torch.randn(4, len(dense), dtype=torch.float64)
    close(matrix.product(m), m @ dense)
    close(matrix.product(m[:1]), m[:1] @ dense)


@each
def test_functions(matrix, dense):
    m = torch.randn(3, len(dense), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(dense)
    truth = m @ (vectors * torch.exp(-values)) @ vectors.mT
    close(matrix.apply(lambda t: torch.exp(-t), m), truth)


@each
def test_eigenpairs(matrix, dense):
    found = matrix.eigenvalues()
    close(found.sort().values, torch.linalg.eigvalsh(dense))
    which = torch.tensor([0, len(dense) - 1, 3])
    vectors = matrix.eigenvectors(which)
    close(vectors @ dense, found[which].unsqueeze(1) * vectors)
    close(vectors.norm(dim=1), torch.ones(3, dtype=torch.float64))
