"""One suite for all inverses: solves, measures of error, and failures that stay contained."""

import warnings

import pytest
import torch

import natgrad
from cases import MODELS, losses
from documented import OWN_INVERSES, LowRank, NewtonSchulz
from natgrad import EKFAC, KFAC, Cholesky, Eigen, Kronecker, UnitWise
from natgrad.errors import SettingError
from natgrad.inverses import Basis, DampedPower, DecomposedFactor, Diagonalization, contained
from natgrad.inverses.functions import floored
from natgrad.specs import FactorSpec
from oracles import close

# Of full rank on everything here, and so exact; tests/unit/inverses has those that are not.
INVERSES = [Eigen(), Cholesky(), natgrad.inverses.LowRank(1000), *OWN_INVERSES]
DAMPING = 0.3
every = pytest.mark.parametrize("inverse", INVERSES, ids=repr)


def symmetric(b, d, rank=None, dtype=torch.float64):
    m = torch.randn(b, d, d + 2 if rank is None else rank, dtype=dtype)
    return m @ m.mT / d


def dampings(b, damping=DAMPING):
    return torch.full((b,), damping, dtype=torch.float64)


def decomposed(inverse, matrix, damping=DAMPING):
    return inverse.decompose(matrix.clone(), dampings(len(matrix), damping))


def solve(inverse, parts, m, damping=DAMPING, *, diagonal=False):
    """The damped system, through the object that a structure of one factor applies."""
    factor = DecomposedFactor(inverse, parts, m.shape[1], diagonal)
    return inverse.blocks(factor).apply(DampedPower(-1.0, damping), m)


def multiply(inverse, parts, m, *, diagonal=False):
    factor = DecomposedFactor(inverse, parts, m.shape[1], diagonal)
    return inverse.blocks(factor).multiply(m, DAMPING)


def damped(matrix, damping=DAMPING):
    return matrix + damping * torch.eye(matrix.shape[-1], dtype=matrix.dtype)


# Solving.


@pytest.mark.pairs
@every
@pytest.mark.parametrize("rank", [None, 1, 0], ids=["full", "one", "zero"])
@pytest.mark.parametrize(("b", "d"), [(1, 1), (1, 5), (3, 4), (4, 1), (2, 40), (1, 200)])
def test_solve(inverse, b, d, rank):
    matrix, m = symmetric(b, d, rank), torch.randn(b, d, 1, dtype=torch.float64)
    parts = decomposed(inverse, matrix)
    assert close(solve(inverse, parts, m), torch.linalg.solve(damped(matrix), m))
    assert tuple(part.shape for part in parts) == inverse.shapes(FactorSpec(d, b, b * d * d))


@every
def test_multiply(inverse):
    """With the damped matrix, whenever the damping was added."""
    matrix, m = symmetric(2, 5), torch.randn(2, 5, 1, dtype=torch.float64)
    assert close(multiply(inverse, decomposed(inverse, matrix), m), damped(matrix) @ m)


@every
@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.5, 1.0])
def test_powers_and_other_functions(inverse, exponent):
    """Of the damped matrix, by its eigenvalues; a function that is no power of it, too."""
    matrix, m = symmetric(2, 5), torch.randn(2, 5, 1, dtype=torch.float64)
    block = inverse.blocks(DecomposedFactor(inverse, decomposed(inverse, matrix), 5))
    values, vectors = torch.linalg.eigh(damped(matrix))
    expected = vectors @ (values.pow(exponent).unsqueeze(-1) * (vectors.mT @ m))
    assert close(block.apply(DampedPower(exponent, DAMPING), m), expected)
    assert close(block.whiten(m, -2 * exponent, DAMPING), expected)
    inside = 0.0 if inverse.damps_factors else DAMPING
    found = block.apply(lambda values: torch.log1p(values + inside), m)
    assert close(found, vectors @ (values.log1p().unsqueeze(-1) * (vectors.mT @ m)))


def test_a_low_rank_is_that_of_the_largest_eigenvalues():
    matrix, m = symmetric(2, 6), torch.randn(2, 6, 1, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(matrix)
    values = torch.cat([values[:, :4].mean(1, keepdim=True).expand(-1, 4), values[:, 4:]], 1)
    kept = vectors @ torch.diag_embed(values) @ vectors.mT
    inverse = LowRank(2)
    parts = decomposed(inverse, matrix)
    assert tuple(part.shape for part in parts) == inverse.shapes(FactorSpec(6, 2, 72))
    assert close(solve(inverse, parts, m), torch.linalg.solve(damped(kept), m))
    assert close(multiply(inverse, parts, m), damped(kept) @ m)
    assert not close(solve(inverse, parts, m), torch.linalg.solve(damped(matrix), m), 1e-3)


def test_newton_schulz_says_where_it_does_not_converge():
    with pytest.raises(torch.linalg.LinAlgError, match="did not converge"):
        decomposed(NewtonSchulz(iterations=3), symmetric(1, 5, rank=1), 1e-6)


@every
def test_diagonal_factors(inverse):
    values, m = torch.rand(2, 5, dtype=torch.float64), torch.randn(2, 5, 1, dtype=torch.float64)
    values[0, 0] = 0.0
    matrix = torch.diag_embed(values)
    parts = inverse.decompose_diagonal(values, dampings(2))
    expected = torch.linalg.solve(damped(matrix), m)
    assert close(solve(inverse, parts, m, diagonal=True), expected)
    assert close(multiply(inverse, parts, m, diagonal=True), damped(matrix) @ m)
    assert inverse.diagonal_error(parts, values, dampings(2)) < 1e-12
    assert inverse.diagonal_error(parts, values * 1.5, dampings(2)) > 0.01
    shapes = inverse.diagonal_shapes(FactorSpec(5, 2, 10, diagonal=True))
    assert tuple(part.shape for part in parts) == shapes


@every
@pytest.mark.parametrize("d", [1, 5, 40])
def test_only_one_triangle_is_read_or_both_are_the_same(inverse, d):
    """Parts of a symmetric matrix; rows of the parts keep the leading batch."""
    matrix = symmetric(3, d)
    for part in decomposed(inverse, matrix):
        assert len(part) == 3
    alone = [decomposed(inverse, one[None]) for one in matrix]
    together = decomposed(inverse, matrix)
    m = torch.randn(3, d, 1, dtype=torch.float64)
    apart = torch.cat([solve(inverse, p, m[i : i + 1]) for i, p in enumerate(alone)])
    assert close(solve(inverse, together, m), apart)


def test_damping_of_eigen_acts_when_solving():
    matrix, m = symmetric(1, 5), torch.randn(1, 5, 1, dtype=torch.float64)
    parts = decomposed(Eigen(), matrix)
    for damping in (1e-3, 1.0, 50.0):
        expected = torch.linalg.solve(damped(matrix, damping), m)
        assert close(solve(Eigen(), parts, m, damping), expected)


# No damping.


@pytest.mark.parametrize("rank", [2, 0])
def test_eigen_without_damping_divides_by_no_zero(rank):
    matrix, m = symmetric(2, 5, rank), torch.randn(2, 5, 1, dtype=torch.float64)
    parts = decomposed(Eigen(), matrix, 0.0)
    found = solve(Eigen(), parts, m, 0.0)
    assert torch.isfinite(found).all()
    if rank:  # where the matrix has something to say it is inverted
        inside = matrix @ m
        again = matrix @ solve(Eigen(), parts, inside, 0.0)
        assert close(again, inside, 1e-6)


def test_diagonal_without_damping_divides_by_no_zero():
    values = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    m = torch.ones(1, 3, 1, dtype=torch.float64)
    for inverse in INVERSES:
        parts = inverse.decompose_diagonal(values, dampings(1, 0.0))
        found = solve(inverse, parts, m, 0.0, diagonal=True)
        assert torch.isfinite(found).all()
        assert close(found[0, 1:, 0], torch.tensor([1.0, 0.5], dtype=torch.float64))


def test_no_damping_is_exact_where_it_can_be():
    matrix, m = symmetric(1, 4), torch.randn(1, 4, 1, dtype=torch.float64)
    for inverse in INVERSES:
        found = solve(inverse, decomposed(inverse, matrix, 0.0), m, 0.0)
        assert close(found, torch.linalg.solve(matrix, m), 1e-8)


def test_floor_is_relative_to_the_largest():
    values = torch.tensor([[1e-30, 1.0], [1e-30, 1e10]], dtype=torch.float64)
    eps = torch.finfo(torch.float64).eps
    found = floored(values, values.amax(1))
    assert found[0, 0] == eps
    assert found[1, 0] == 1e10 * eps
    assert torch.equal(found[:, 1], values[:, 1])


# How far a decomposition lags behind.


@every
@pytest.mark.parametrize("d", [1, 5, 40])
def test_error_is_nothing_for_the_matrix_itself(inverse, d):
    matrix = symmetric(2, d)
    assert inverse.error(decomposed(inverse, matrix), matrix, dampings(2)) < 1e-10


@every
def test_error_grows_with_the_distance(inverse):
    matrix, other = symmetric(2, 5), symmetric(2, 5)
    parts = decomposed(inverse, matrix)
    errors = [
        float(inverse.error(parts, matrix.lerp(other, t), dampings(2)))
        for t in (0.0, 0.1, 0.3, 1.0)
    ]
    assert errors == sorted(errors)
    assert errors[1] > 1e-3


def test_error_of_eigen_is_what_is_left_beside_the_diagonal():
    matrix, other = symmetric(1, 4), symmetric(1, 4)
    q = torch.linalg.eigh(matrix[0])[1]
    rotated = q.T @ other[0] @ q
    expected = (rotated - rotated.diagonal().diag()).norm() / other.norm()
    assert close(Eigen().error(decomposed(Eigen(), matrix), other, dampings(1)), expected)


def test_error_of_cholesky_is_the_residual_of_the_damped_inverse():
    matrix, other = symmetric(1, 4), symmetric(1, 4)
    eye = torch.eye(4, dtype=torch.float64)
    residual = torch.linalg.inv(damped(matrix[0])) @ damped(other[0]) - eye
    found = Cholesky().error(decomposed(Cholesky(), matrix), other, dampings(1))
    assert close(found, residual.norm() / 2)


# Failure.


class Failing:
    """A decomposition that raises the first `times` times."""

    def __init__(self, original, times):
        self.original, self.times, self.calls, self.dtypes = original, times, 0, []

    def __call__(self, matrix, *args, **kwargs):
        self.calls += 1
        self.dtypes.append(matrix.dtype)
        if self.calls <= self.times:
            raise torch.linalg.LinAlgError("did not converge")
        return self.original(matrix, *args, **kwargs)


# A Newton-Schulz iteration calls nothing that could be made to fail.
fragile = pytest.mark.parametrize("inverse", [i for i in INVERSES if i != NewtonSchulz()], ids=repr)


def failing(monkeypatch, inverse, times):
    name = "cholesky" if inverse == Cholesky() else "eigh"
    fail = Failing(getattr(torch.linalg, name), times)
    monkeypatch.setattr(torch.linalg, name, fail)
    return fail


@fragile
@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_failure_is_tried_again(monkeypatch, inverse, times):
    """In float64, then with more on the diagonal: at most 1% of its mean."""
    matrix = symmetric(1, 5, dtype=torch.float32)
    damping = torch.full((1,), DAMPING)
    fail = failing(monkeypatch, inverse, times)
    parts = contained(inverse, matrix.clone, damping)
    assert fail.calls == times + 1
    assert fail.dtypes == [torch.float32] + [torch.float64] * times
    assert all(part.dtype == torch.float32 for part in parts)
    m = torch.randn(1, 5, 1)
    expected = torch.linalg.solve(matrix + DAMPING * torch.eye(5), m)
    tolerance = {1: 1e-5, 2: 1e-5, 4: 0.1}[times]
    assert close(solve(inverse, parts, m), expected, tolerance)


@fragile
def test_a_failure_that_stays_gives_nothing(monkeypatch, inverse):
    failing(monkeypatch, inverse, 10**9)
    assert contained(inverse, lambda: symmetric(1, 5), dampings(1)) is None


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_give_nothing(inverse, bad):
    matrix = symmetric(2, 3)
    matrix[1, 0, 0] = bad
    assert contained(inverse, matrix.clone, dampings(2)) is None


def test_singular_matrices_without_damping_are_contained():
    matrix = torch.zeros(1, 3, 3, dtype=torch.float64)
    matrix[0, 0, 0] = 1.0
    (inverse,) = contained(Cholesky(), matrix.clone, dampings(1, 0.0))
    assert torch.isfinite(inverse).all()
    assert abs(inverse[0, 0, 0] - 1) < 0.05


# Failure inside of a step.


def step(model, kfac, case, seed=1):
    model.zero_grad()
    losses(case, model(*case.data(6, seed))).mean().backward()
    raw = {k: p.grad.clone() for k, p in model.named_parameters()}
    kfac.step()
    return raw


def start(inverse, structure=None):
    case = MODELS[0]
    model = case.model()
    kfac = KFAC(
        model,
        kl_clip=None,
        damping=0.1,
        update_every=1,
        refresh_every=1,
        inverse=inverse,
        structure=structure,
    )
    return case, model, kfac


@fragile
@pytest.mark.parametrize("structure", [Kronecker(), UnitWise()], ids=repr)
def test_the_first_decomposition_fails_for_good(monkeypatch, inverse, structure):
    """Gradients stay as they are, each factor is named once, and later all is well."""
    case, model, kfac = start(inverse, structure)
    with monkeypatch.context() as patch:
        failing(patch, inverse, 10**9)
        with pytest.warns(
            UserWarning, match="could not be decomposed, so its gradient stays"
        ) as all_:
            raw = step(model, kfac, case)
        assert len({str(w.message) for w in all_}) == len(all_)
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, raw[name])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the same sentence is not said twice
            step(model, kfac, case)
    step(model, kfac, case)
    _, expected, other = start(inverse, structure)
    step(expected, other, case)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert close(p.grad, q.grad)


@fragile
def test_the_last_good_inverse_stays(monkeypatch, inverse):
    case, model, kfac = start(inverse)
    step(model, kfac, case)
    before = {b.name: {n: [t.clone() for t in p] for n, p in b.parts.items()} for b in kfac.blocks}
    with monkeypatch.context() as patch:
        failing(patch, inverse, 10**9)
        with pytest.warns(UserWarning, match="last good inverse stays"):
            raw = step(model, kfac, case, seed=2)
    for block in kfac.blocks:
        assert block.failures > 0
        for name, parts in block.parts.items():
            for part, old in zip(parts, before[block.name][name], strict=True):
                assert torch.equal(part, old)
    assert not any(close(p.grad, raw[k], 1e-3) for k, p in model.named_parameters())


@fragile
def test_one_failure_costs_nothing(monkeypatch, inverse):
    case, model, kfac = start(inverse)
    with monkeypatch.context() as patch:
        failing(patch, inverse, 1)
        step(model, kfac, case)
    _, expected, other = start(inverse)
    step(expected, other, case)
    assert all(block.failures == 0 for block in kfac.blocks)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert close(p.grad, q.grad)


class Growing(LowRank):
    """Keeps one more eigenpair than it says."""

    def shapes(self, spec):
        return LowRank(self.rank - 1).shapes(spec)


def test_parts_of_other_shapes_than_stated_are_refused():
    case, model, kfac = start(Growing(3), Kronecker())
    says = r"^Growing\(rank=3\) decomposed factor A of Linear .* but its shapes\(\) says .*two\.$"
    with pytest.raises(SettingError, match=says):
        step(model, kfac, case)


class Singular(Diagonalization):
    """A diagonalization of one's own: the singular vectors of a definite matrix."""

    def __repr__(self):
        return "Singular()"

    def decompose(self, matrix, damping):
        _, values, rows = torch.linalg.svd(matrix)
        return values, rows

    def shapes(self, spec):
        return (spec.batch, spec.dim), (spec.batch, spec.dim, spec.dim)

    def basis(self, parts):
        values, rows = parts
        return Basis(rows, values)


@pytest.mark.parametrize("structure", [Kronecker(), EKFAC(), UnitWise()], ids=repr)
def test_a_diagonalization_of_one_s_own(structure):
    """Its parts lie in another order than those of `Eigen`, and nobody minds: not even an
    embedding, with a diagonal factor."""
    found = []
    for inverse in (Singular(), Eigen()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3)).double()
        kfac = KFAC(model, kl_clip=None, update_every=1, inverse=inverse, structure=structure)
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([0, 3, 1, 1, 4, 0])).square().sum(1).mean().backward()
            kfac.step()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert close(one, other, 1e-8)
