"""Conjugate gradients against dense solutions."""

import pytest
import torch

from natgrad.errors import ConvergenceError, SettingError
from natgrad.linalg.conjugate_gradients import solve
from unit.linalg.spectra import Known, decaying, spread


def positive(n=80):
    return Known(spread(n).abs() + 0.1)


def sides(n, k):
    return torch.randn(n, k, dtype=torch.float64)


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("k", [1, 7])
def test_solves(k, damping):
    known, b = positive(), sides(80, k)
    found = solve(known, b, damping=damping, tolerance=1e-10)
    damped = known.dense + damping * torch.eye(80, dtype=torch.float64)
    assert (found.x - torch.linalg.solve(damped, b)).norm() <= 1e-8 * b.norm()
    true = (b - damped @ found.x).norm(dim=0) / b.norm(dim=0)
    assert (true - found.residuals).abs().max() <= 1e-13
    assert found.residuals.shape == (k,)
    assert found.converged
    assert found.residuals.max() <= 1e-10
    assert found.products == known.columns


def test_one_vector():
    known, b = positive(), sides(80, 1)[:, 0]
    found = solve(known, b, tolerance=1e-9)
    assert found.x.shape == (80,)
    assert (known.dense @ found.x - b).norm() <= 1e-9 * b.norm()


def test_columns_that_are_done_are_not_multiplied():
    known = Known(torch.cat([torch.ones(40), torch.linspace(1, 100, 40)]))
    vectors = torch.linalg.eigh(known.dense).eigenvectors
    easy, hard = vectors[:, -1], sides(80, 1)[:, 0]
    alone = solve(known, hard, tolerance=1e-9).products
    known.columns = 0
    both = solve(known, torch.stack([easy, hard], 1), tolerance=1e-9)
    assert both.converged
    # An eigenvector is solved in one step, and multiplied once more to be sure.
    assert both.products == known.columns == alone + 2


def test_zero_columns_cost_nothing():
    known, b = positive(), torch.zeros(80, 2, dtype=torch.float64)
    found = solve(known, b, start=sides(80, 2))
    assert found.converged
    assert not found.x.any()
    assert known.columns == 0


def test_a_good_start_saves_products():
    known, b = positive(), sides(80, 2)
    exact = torch.linalg.solve(known.dense, b)
    found = solve(known, b, start=exact, tolerance=1e-9)
    assert found.converged
    assert known.columns == 2
    assert torch.equal(found.x, exact)
    near = solve(known, b, start=exact + 1e-4 * sides(80, 2), tolerance=1e-9)
    assert (near.x - exact).norm() <= 1e-8 * exact.norm()


def test_a_preconditioner_saves_products():
    known, b = Known(decaying(80, 0.85)), sides(80, 3)
    inverse = torch.linalg.inv(known.dense + 1e-6 * torch.eye(80, dtype=torch.float64))
    plain = solve(known, b, damping=1e-5, tolerance=1e-8)
    helped = solve(known, b, damping=1e-5, tolerance=1e-8, preconditioner=lambda r: inverse @ r)
    assert plain.converged
    assert helped.converged
    assert helped.products < plain.products / 4
    assert (helped.x - plain.x).norm() <= 1e-3 * plain.x.norm()
    assert "with a preconditioner" in helped.method


@pytest.mark.parametrize("values", [spread(60), torch.zeros(60), -torch.ones(60)])
def test_an_indefinite_matrix_is_noticed(values):
    known, b = Known(values), sides(60, 3)
    found = solve(known, b)
    assert not found.converged
    assert "the matrix is not positive definite: pᵀAp/pᵀp = " in found.method
    assert found.method.endswith("use more damping")
    true = (b - known.dense @ found.x).norm(dim=0) / b.norm(dim=0)
    assert (true - found.residuals).abs().max() <= 1e-12
    enough = solve(known, b, damping=float(values.abs().max()) + 0.1)
    assert enough.converged


def test_one_bad_column_does_not_stop_the_others():
    known = Known(torch.cat([torch.linspace(1, 2, 39), torch.tensor([-1.0])]))
    values, vectors = torch.linalg.eigh(known.dense)
    b = torch.stack([vectors[:, 1:].sum(1), vectors[:, 0]], 1)
    found = solve(known, b, tolerance=1e-8)
    assert values[0] < 0
    assert found.residuals[0] <= 1e-8
    assert found.residuals[1] > 0.5
    assert "pᵀAp/pᵀp = -1 in column 1, 1 stopped so" in found.method


def test_rank_deficient_but_solvable():
    known = Known(torch.cat([torch.linspace(1, 2, 20), torch.zeros(30)]))
    b = known.dense @ sides(50, 2)
    found = solve(known, b, tolerance=1e-9)
    assert found.converged
    assert (known.dense @ found.x - b).norm() <= 1e-8 * b.norm()


def test_a_preconditioner_that_is_not_positive_is_noticed():
    found = solve(positive(), sides(80, 2), preconditioner=lambda r: -r)
    assert not found.converged
    assert "the preconditioner is not positive definite in column 0" in found.method


def test_stops_at_the_limit():
    known, b = Known(torch.linspace(1e-4, 1, 100)), sides(100, 2)
    found = solve(known, b, limit=5, tolerance=1e-8)
    assert not found.converged
    assert "5 iterations; stopped at the limit of 5" in found.method
    true = (b - known.dense @ found.x).norm(dim=0) / b.norm(dim=0)
    assert (true - found.residuals).abs().max() <= 1e-12


def test_float32_residuals_are_true():
    known, b = Known(torch.logspace(-6, 0, 60)), sides(60, 2).float()
    found = solve(known, b, tolerance=1e-6)
    assert found.x.dtype == torch.float32
    true = (b - known.dense @ found.x.double()).norm(dim=0) / b.norm(dim=0)
    assert (true <= 1.5 * found.residuals + 1e-6).all()
    assert found.converged == bool((found.residuals <= 2e-6).all())


def test_a_residual_that_rounding_keeps_up():
    """The recursion of the residual goes on falling where the true one cannot."""
    known, b = positive(), sides(80, 2).float()
    found = solve(lambda x: known(x).bfloat16().float(), b, tolerance=1e-5)
    assert not found.converged
    assert found.residuals.max() < 0.1
    assert "rounding keeps the residual above the tolerance" in found.method


def test_one_number():
    found = solve(lambda x: 4 * x, torch.tensor([8.0]), damping=1.0)
    assert found.converged
    assert found.x.item() == pytest.approx(1.6)


def test_messages():
    b = torch.ones(5)
    with pytest.raises(ConvergenceError, match="is not finite"):
        solve(lambda x: x * torch.nan, b)
    with pytest.raises(SettingError, match="limit is 0 but must be a whole number of at least 1"):
        solve(lambda x: x, b, limit=0)
    with pytest.raises(SettingError) as caught:
        solve(lambda x: x, b, damping=-0.1)
    assert str(caught.value) == "damping is -0.1 but must not be negative: give 0 or more."
    with pytest.raises(SettingError) as caught:
        solve(lambda x: x, b, start=torch.ones(5, 1))
    assert str(caught.value) == "start has shape [5, 1] but b has [5]: give them the same."
    with pytest.raises(SettingError) as caught:
        solve(lambda x: x, b * torch.inf)
    assert str(caught.value) == (
        "b has entries that are not finite: look for overflow or NaN in them."
    )
    with pytest.raises(SettingError) as caught:
        solve(lambda x: x, torch.ones(2, 3, 4))
    assert str(caught.value) == (
        "b is a torch.float32 tensor of shape [2, 3, 4] but must hold floating-point numbers, "
        "shaped [n] or [n, k]: flatten it."
    )
