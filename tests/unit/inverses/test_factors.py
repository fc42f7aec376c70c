"""Decomposed factors that are whole, diagonal or in diagonal blocks, and products of two of them,
against dense matrices in float64. Every factor is a stack of two matrices, which differ."""

import pytest
import torch

from natgrad import Cholesky, Eigen, Relative
from natgrad.errors import CoverageError
from natgrad.inverses import LowRank
from natgrad.inverses.base import ExplicitInverse, contained
from natgrad.inverses.decomposed import FactorProduct
from natgrad.inverses.factor import DecomposedFactor, solved_rows, spectrum
from natgrad.inverses.functions import DampedPower
from natgrad.linalg.block_diagonal import BlockDiagonal
from natgrad.specs import FactorSpec, Routine
from oracles import close

DAMPING = 0.3
SECTIONS = ((2, 3), (1, 2))  # two blocks of three columns, then one of two
KINDS = ["whole", "diagonal", "sections"]


def matrices(d, b=2, seed=0):
    rows = torch.randn(b, 3 * d, d, dtype=torch.float64, generator=torch.manual_seed(seed))
    return rows.mT @ rows / d


def in_blocks(matrix, sections=SECTIONS):
    """Without the rest; and the blocks of each size ``[b * count, size, size]``."""
    kept, blocks, first = torch.zeros_like(matrix), [], 0
    for count, size in sections:
        own = []
        for _ in range(count):
            columns = slice(first, first + size)
            own.append(matrix[:, columns, columns])
            kept[:, columns, columns] = own[-1]
            first += size
        blocks.append(torch.stack(own, 1).flatten(0, 1))
    return kept, blocks


def decomposed(inverse, kind, d=8, seed=0, damping=DAMPING):
    """A factor, and the matrix ``[2, d, d]`` whose powers it has: the damped one, if the inverse
    damps factors."""
    matrix, sections = matrices(d, seed=seed), ()
    if kind == "sections":
        sections = SECTIONS
        matrix, blocks = in_blocks(matrix)
        parts = ()
        for one in blocks:
            each = torch.full((len(one),), damping, dtype=torch.float64)
            parts += inverse.decompose(one.clone(), each)
    elif kind == "diagonal":
        values = matrix.diagonal(dim1=1, dim2=2).clone()
        matrix = torch.diag_embed(values)
        parts = inverse.decompose_diagonal(values, torch.full((2,), damping, dtype=torch.float64))
    else:
        parts = inverse.decompose(matrix.clone(), torch.full((2,), damping, dtype=torch.float64))
    factor = DecomposedFactor(inverse, parts, d, kind == "diagonal", sections)
    if inverse.damps_factors:
        matrix = matrix + damping * torch.eye(d, dtype=torch.float64)
    return factor, matrix


def powered(matrix, exponent):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values.pow(exponent).unsqueeze(-1) * vectors.mT)


def dense(found):
    if isinstance(found, BlockDiagonal):
        return found.dense()
    return torch.diag_embed(found) if found.ndim == 2 else found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(8)], ids=repr)
def test_powers_of_a_factor(inverse, kind):
    factor, matrix = decomposed(inverse, kind)
    m = torch.randn(2, 8, 5, dtype=torch.float64)
    for exponent in (-1.0, -0.5, 1.0):
        expected = powered(matrix, exponent)
        assert close(factor.power(m, exponent), expected @ m, 1e-10)
        assert close(factor.power_rows(m.mT, exponent), m.mT @ expected, 1e-10)
        assert close(dense(factor.matrix(exponent)), expected, 1e-10)
    # Kept as a matrix by Cholesky, and by all of them if it is a diagonal.
    explicit = factor.explicit()
    if inverse == Cholesky() or kind == "diagonal":
        assert close(dense(explicit), powered(matrix, -1.0), 1e-10)
    else:
        assert explicit is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(8)], ids=repr)
def test_the_spectrum_of_a_factor(inverse, kind):
    factor, matrix = decomposed(inverse, kind)
    values, vectors = spectrum(factor)
    assert values.shape == (2, 8)
    if kind == "diagonal":
        assert vectors is None
        assert close(values, matrix.diagonal(dim1=1, dim2=2), 1e-10)
    else:
        q = dense(vectors)
        assert close(q @ (values.unsqueeze(-1) * q.mT), matrix, 1e-10)
        assert close(q @ q.mT, torch.eye(8, dtype=torch.float64).expand(2, 8, 8), 1e-10)


@pytest.mark.parametrize("constant", [False, True], ids=["as they are", "with a 1 behind"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(8)], ids=repr)
def test_rows_are_solved(inverse, kind, constant):
    """The gradient of few samples is ``g^T a``: each side is solved before they are multiplied."""
    both, matrix = decomposed(inverse, kind)
    count = [many for many, _ in both.sections] or [1]
    own = len(both.parts) // len(count)
    parts = tuple(part[: count[i // own]] for i, part in enumerate(both.parts))
    factor = DecomposedFactor(inverse, parts, 8, both.diagonal, both.sections)
    rows = torch.randn(4, 7 if constant else 8, dtype=torch.float64)
    whole = torch.cat([rows, torch.ones(4, 1, dtype=torch.float64)], 1) if constant else rows
    assert close(solved_rows(factor, rows), whole @ torch.linalg.inv(matrix[0]), 1e-10)
    assert solved_rows(None, rows) is rows


@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(8)], ids=repr)
def test_any_function_of_a_product(inverse):
    """``f(G x A)`` with the eigenvalues of the damped factors, of which one is in blocks."""
    g, left = decomposed(inverse, "whole", d=3, seed=1)
    a, right = decomposed(inverse, "sections")
    m = torch.randn(2, 3, 8, dtype=torch.float64)
    for sides, product in (
        ((g, a), [torch.kron(x, y) for x, y in zip(left, right, strict=True)]),
        ((None, a), [torch.kron(torch.eye(3, dtype=torch.float64), y) for y in right]),
        ((g, None), [torch.kron(x, torch.eye(8, dtype=torch.float64)) for x in left]),
    ):
        whole, block = torch.stack(product), FactorProduct(*sides)
        flat = m.flatten(1).unsqueeze(-1)
        values, vectors = torch.linalg.eigh(whole)
        expected = vectors @ (torch.tanh(values).unsqueeze(-1) * (vectors.mT @ flat))
        assert close(block.apply(torch.tanh, m), expected.view(m.shape), 1e-10)
        assert close(block.multiply(m, DAMPING), (whole @ flat).view(m.shape), 1e-10)
        out = torch.empty_like(m)
        assert block.apply(DampedPower(-1.0), m, out) is out
        assert close(out, torch.linalg.solve(whole, flat).view(m.shape), 1e-10)
        for exponent in (-2.0, -0.5, 1.0):
            expected = (powered(whole, exponent) @ flat).view(m.shape)
            assert close(block.apply(DampedPower(exponent), m), expected, 1e-10)
        if sides == (g, a):
            roots = block.sides(0.7, DAMPING)
            assert close(dense(roots[0]), powered(left, -0.35), 1e-10)
            assert close(dense(roots[1]), powered(right, -0.35), 1e-10)
            roots = block.sides(0.7, DAMPING, squared=2)
            assert close(dense(roots[0]), powered(left, -0.35), 1e-10)
            assert close(dense(roots[1]), powered(right, -0.7), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("squared", [None, 1, 2])
def test_both_sides_of_a_whitening(kind, squared):
    """Eigen damps a product as Cholesky damps its factors: ``sqrt(damping) / pi`` for G and
    ``pi sqrt(damping)`` for A, ``pi^2 = mean(l_A) / mean(l_G)``."""
    inverse, eye = Eigen(), [torch.eye(d, dtype=torch.float64) for d in (3, 8)]
    (g, left), (a, right) = decomposed(inverse, "whole", 3, seed=1), decomposed(inverse, kind)
    block, m = inverse.kronecker(g, a), torch.randn(2, 3, 8, dtype=torch.float64)
    mean_g, mean_a = (x.diagonal(dim1=1, dim2=2).mean(1) for x in (left, right))
    pi = (mean_a / mean_g).sqrt()
    for damping, own in (
        (DAMPING, (DAMPING**0.5 / pi, DAMPING**0.5 * pi)),
        (Relative(0.2), (0.2 * mean_g, 0.2 * mean_a)),
    ):
        roots = [
            powered(x + added.view(2, 1, 1) * one, -0.7 if squared == place else -0.35)
            for place, x, added, one in zip((1, 2), (left, right), own, eye, strict=True)
        ]
        found = block.sides(0.7, damping, squared)
        assert close(dense(found[0]), roots[0], 1e-10)
        assert close(dense(found[1]), roots[1], 1e-10)
        if squared is None:
            assert close(block.whiten(m, 0.7, damping), roots[0] @ m @ roots[1], 1e-10)
    # Eigenvalues that are no product have no sides: the root of the whole block.
    values = torch.rand(2, 24, dtype=torch.float64)
    turned = inverse.rotated(g, a, values)
    assert turned.sides(0.7, DAMPING) is None
    (qg, _), (qa, _) = (inverse.basis_of(one) for one in (g, a))
    qg, qa = (eye[1] if q.numel() == 0 else dense(q) for q in (qg, qa))
    inside = (qg @ m @ qa.mT) * (values.view(2, 3, 8) + DAMPING).pow(-0.35)
    assert close(turned.whiten(m, 0.7, DAMPING), qg.mT @ inside @ qa, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(8), Eigen()], ids=repr)
def test_products_with_the_second_moments_of_inputs(inverse, kind):
    """Of which there are none where a layer has no factor of its inputs."""
    g, _ = decomposed(inverse, "whole", d=3, seed=1)
    a, right = decomposed(inverse, kind)
    m = torch.randn(2, 3, 8, dtype=torch.float64)
    assert close(inverse.kronecker(g, a).along_inputs(m), m @ right, 1e-10)
    assert close(inverse.kronecker(None, a).along_inputs(m), m @ right, 1e-10)
    assert inverse.kronecker(g, None).along_inputs(m) is None


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("other", ["whole", "diagonal", None])
def test_into_the_eigenbasis_and_back(kind, other):
    """Coordinates along the eigenvectors, in which the block is a diagonal; of a side that is a
    diagonal or the identity these are its own."""
    if kind is None and other is None:
        pytest.skip("of one side at least there is a factor")
    inverse, eye = Eigen(), [torch.eye(n, dtype=torch.float64).expand(2, n, n) for n in (3, 8)]
    g, left = (None, eye[0]) if other is None else decomposed(inverse, other, d=3, seed=1)
    a, right = (None, eye[1]) if kind is None else decomposed(inverse, kind)
    block, m = inverse.kronecker(g, a), torch.randn(2, 3, 8, dtype=torch.float64)
    turned = block.rotate(m)
    assert close(block.rotate_back(turned), m, 1e-10)
    assert close(turned.flatten(1).norm(dim=1), m.flatten(1).norm(dim=1), 1e-10)
    values = block.values(m.shape)
    assert close(block.rotate(left @ m @ right), values * turned, 1e-10)
    if other in ("diagonal", None) and kind in ("diagonal", None):
        assert torch.equal(turned, m)


@pytest.mark.parametrize("blocks", ["g", "a"])
def test_parts_that_were_overwritten_are_read_again(blocks):
    """A refresh writes into the parts. Eigenvalues of blocks of several sizes are put together in a
    tensor of their own, which must follow; those of a whole factor are the parts."""
    wide, _ = decomposed(Eigen(), "sections")
    other, _ = decomposed(Eigen(), "whole", 3, seed=1)
    new_wide, right = decomposed(Eigen(), "sections", seed=2)
    new_other, left = decomposed(Eigen(), "whole", 3, seed=3)
    g, a = (wide, other) if blocks == "g" else (other, wide)
    left, right = (right, left) if blocks == "g" else (left, right)
    m = torch.randn(2, len(left[0]), len(right[0]), dtype=torch.float64)
    function = DampedPower(-1.0, DAMPING)
    both, alone = Eigen().kronecker(g, a), Eigen().kronecker(None, a)
    before = both.apply(function, m)
    alone.apply(function, m)
    for old, new in ((wide, new_wide), (other, new_other)):
        for one, two in zip(old.parts, new.parts, strict=True):
            one.copy_(two)
    for block, first in ((both, left), (alone, torch.eye(m.shape[1]).double().expand_as(left))):
        block.forget()
        whole = torch.stack([torch.kron(x, y) for x, y in zip(first, right, strict=True)])
        whole = whole + DAMPING * torch.eye(whole.shape[1], dtype=torch.float64)
        expected = torch.linalg.solve(whole, m.flatten(1).unsqueeze(-1)).view(m.shape)
        assert close(block.apply(function, m), expected, 1e-10)
    assert not close(before, both.apply(function, m), 0.01)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("inverse", [Cholesky(), Eigen()], ids=repr)
def test_some_rows_or_columns_of_a_diagonal_side(inverse, axis):
    """Of a vocabulary on several ranks: as the same rows or columns of the whole result, with a
    relative damping of the whole block."""
    wide, _ = decomposed(inverse, "diagonal")
    other, _ = decomposed(inverse, "whole", 3, seed=1)
    block = inverse.kronecker(wide, other) if axis == 1 else inverse.kronecker(other, wide)
    m = torch.randn((2, 8, 3) if axis == 1 else (2, 3, 8), dtype=torch.float64)
    for damping in (DAMPING, Relative(0.1)):
        function = DampedPower(-1.0, damping)
        some = m.narrow(axis, 2, 4).contiguous()
        found = block.apply_part(function, some, axis, slice(2, 6), torch.empty_like(some))
        assert close(found, block.apply(function, m).narrow(axis, 2, 4), 1e-10)


class Failing(ExplicitInverse):
    """Remembers what it was given."""

    def __init__(self):
        self.seen = []

    def decompose(self, matrix, damping):
        self.seen.append(matrix.clone())
        raise torch.linalg.LinAlgError("not positive definite")


def test_what_fails_gets_a_growing_share_of_its_own_mean_diagonal():
    """As it is, in float64, then with 1e-8, 1e-5 and 1e-2 of the mean diagonal of each matrix."""
    matrix = matrices(4).float() * torch.tensor([1.0, 1e4]).view(2, 1, 1)
    inverse, damping = Failing(), torch.zeros(2)
    assert contained(inverse, matrix.clone, damping) is None
    assert [one.dtype for one in inverse.seen] == [torch.float32] + [torch.float64] * 4
    means = matrix.double().diagonal(dim1=1, dim2=2).mean(1)
    for seen, share in zip(inverse.seen, (0, 0, 1e-8, 1e-5, 1e-2), strict=True):
        added = seen.double() - matrix.double()
        expected = torch.diag_embed((share * means).unsqueeze(1).expand(2, 4))
        torch.testing.assert_close(added, expected, rtol=1e-6, atol=1e-10)


def test_what_the_planner_is_told_of_decompositions():
    spec = FactorSpec(6, batch=3, numel=63)
    wide = FactorSpec(2000, batch=2, numel=1)
    diagonal = FactorSpec(6, batch=3, numel=18, diagonal=True)
    assert Cholesky().workspace(spec) == Routine.CHOLESKY.workspace(6, 3)
    assert Cholesky().workspace(diagonal) == 4 * 18
    assert Cholesky().diagonal_shapes(diagonal) == ((3, 6),)
    assert LowRank(20).shapes(wide) == ((2, 20, 2000), (2, 20), (2, 1))
    assert LowRank(20).shapes(spec) == ((3, 6, 6), (3, 6), (3, 1))
    assert LowRank(20).cost(spec).apply == 4.0 * 6
    # The factors themselves, and spans, bases and products of 28 vectors.
    assert LowRank(20).workspace(wide) == 2 * (2000**2 + 4 * 2000 * 28)
    assert LowRank(20).workspace(spec) == Routine.EIGEN.workspace(6, 3)


def test_an_inverse_without_eigenvectors_has_no_basis_for_ekfac():
    g, a = (decomposed(Cholesky(), "whole")[0] for _ in range(2))
    with pytest.raises(CoverageError, match=r"which Cholesky\(\) does not give. Use inverse"):
        Cholesky().rotated(g, a, torch.ones(2, 64))
