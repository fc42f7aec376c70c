"""One suite for all inverses: solves, measures of error, and failures that stay contained."""

import warnings

import pytest
import torch

from cases import MODELS, losses
from natgrad import KFAC, Cholesky, Eigen, Kronecker, UnitWise
from natgrad.inverses import contained, floored
from oracles import close

INVERSES = [Eigen(), Cholesky()]
DAMPING = 0.3
every = pytest.mark.parametrize("inverse", INVERSES, ids=repr)


def symmetric(b, d, rank=None, dtype=torch.float64):
    m = torch.randn(b, d, d + 2 if rank is None else rank, dtype=dtype)
    return m @ m.mT / d


def dampings(b, damping=DAMPING):
    return torch.full((b,), damping, dtype=torch.float64)


def decomposed(inverse, matrix, damping=DAMPING):
    return inverse.decompose(matrix.clone(), dampings(len(matrix), damping))


def damped(matrix, damping=DAMPING):
    return matrix + damping * torch.eye(matrix.shape[-1], dtype=matrix.dtype)


# Solving.


@every
@pytest.mark.parametrize("rank", [None, 1, 0], ids=["full", "one", "zero"])
@pytest.mark.parametrize(("b", "d"), [(1, 1), (1, 5), (3, 4), (4, 1), (2, 40), (1, 200)])
def test_solve(inverse, b, d, rank):
    matrix, m = symmetric(b, d, rank), torch.randn(b, d, 3, dtype=torch.float64)
    found = inverse.solve(decomposed(inverse, matrix), m, DAMPING)
    assert close(found, torch.linalg.solve(damped(matrix), m))


@every
def test_multiply(inverse):
    """A Cholesky inverse no longer tells damping from matrix; see its docstring."""
    matrix, m = symmetric(2, 5), torch.randn(2, 5, 3, dtype=torch.float64)
    found = inverse.multiply(decomposed(inverse, matrix), m, DAMPING)
    assert close(found, (matrix if inverse.joint else damped(matrix)) @ m)


@every
def test_diagonal_factors(inverse):
    values, m = torch.rand(2, 5, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    values[0, 0] = 0.0
    matrix = torch.diag_embed(values)
    parts = inverse.decompose_diagonal(values, dampings(2))
    assert close(inverse.solve(parts, m, DAMPING), torch.linalg.solve(damped(matrix), m))
    assert close(
        inverse.multiply(parts, m, DAMPING), (matrix if inverse.joint else damped(matrix)) @ m
    )
    assert inverse.error(parts, matrix, dampings(2)) < 1e-12
    assert inverse.error(parts, matrix * 1.5, dampings(2)) > 0.01


@every
@pytest.mark.parametrize("d", [1, 5, 40])
def test_only_one_triangle_is_read_or_both_are_the_same(inverse, d):
    """Parts of a symmetric matrix; rows of the parts keep the leading batch."""
    matrix = symmetric(3, d)
    for part in decomposed(inverse, matrix):
        assert len(part) == 3
    alone = [decomposed(inverse, one[None]) for one in matrix]
    together = decomposed(inverse, matrix)
    m = torch.randn(3, d, 2, dtype=torch.float64)
    apart = torch.cat([inverse.solve(p, m[i : i + 1], DAMPING) for i, p in enumerate(alone)])
    assert close(inverse.solve(together, m, DAMPING), apart)


def test_damping_of_eigen_acts_when_solving():
    matrix, m = symmetric(1, 5), torch.randn(1, 5, 2, dtype=torch.float64)
    parts = decomposed(Eigen(), matrix)
    for damping in (1e-3, 1.0, 50.0):
        expected = torch.linalg.solve(damped(matrix, damping), m)
        assert close(Eigen().solve(parts, m, damping), expected)


# No damping.


@pytest.mark.parametrize("rank", [2, 0])
def test_eigen_without_damping_divides_by_no_zero(rank):
    matrix, m = symmetric(2, 5, rank), torch.randn(2, 5, 3, dtype=torch.float64)
    parts = decomposed(Eigen(), matrix, 0.0)
    found = Eigen().solve(parts, m, 0.0)
    assert torch.isfinite(found).all()
    if rank:  # where the matrix has something to say it is inverted
        inside = matrix @ m
        again = matrix @ Eigen().solve(parts, inside, 0.0)
        assert close(again, inside, 1e-6)


def test_diagonal_without_damping_divides_by_no_zero():
    values = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    m = torch.ones(1, 3, 1, dtype=torch.float64)
    for inverse in INVERSES:
        found = inverse.solve(inverse.decompose_diagonal(values, dampings(1, 0.0)), m, 0.0)
        assert torch.isfinite(found).all()
        assert close(found[0, 1:, 0], torch.tensor([1.0, 0.5], dtype=torch.float64))


def test_no_damping_is_exact_where_it_can_be():
    matrix, m = symmetric(1, 4), torch.randn(1, 4, 2, dtype=torch.float64)
    for inverse in INVERSES:
        found = inverse.solve(decomposed(inverse, matrix, 0.0), m, 0.0)
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


def failing(monkeypatch, inverse, times):
    name = "eigh" if isinstance(inverse, Eigen) else "cholesky"
    fail = Failing(getattr(torch.linalg, name), times)
    monkeypatch.setattr(torch.linalg, name, fail)
    return fail


@every
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
    m = torch.randn(1, 5, 2)
    expected = torch.linalg.solve(matrix + DAMPING * torch.eye(5), m)
    tolerance = {1: 1e-5, 2: 1e-5, 4: 0.1}[times]
    assert close(inverse.solve(parts, m, DAMPING), expected, tolerance)


@every
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


@every
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


@every
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


@every
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
