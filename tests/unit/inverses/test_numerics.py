"""Rounding: what decompositions do with eigenvalues that are too small, and how far they lag."""

import pytest
import torch

import natgrad
from natgrad.inverses.functions import DampedPower, floored, relative
from natgrad.specs import FactorSpec, Routine


def symmetric(values: list[float], seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ q.mT


def test_eigenvalues_below_zero_are_zero():
    """A mean of squares has none, but rounding makes some; with a damping of their size the inverse
    would be of any size, and of the other sign."""
    matrix = symmetric([2.0, 1.0, -0.01, -0.3])
    rows, values = natgrad.Eigen().decompose(matrix[None].clone(), torch.zeros(1))
    expected = torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(values[0].sort().values, expected)
    function = DampedPower(-1.0, 0.01)
    inverse = (rows[0].mT * function(values)[0]) @ rows[0]
    assert torch.linalg.eigvalsh(inverse).min() > 0
    assert torch.linalg.eigvalsh(inverse).max() == pytest.approx(100.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_floor_is_the_rounding_error_of_the_largest(dtype):
    values = torch.tensor([[4.0, 1.0, 1e-30], [1e-3, 0.0, 1e-4]], dtype=dtype)
    eps = torch.finfo(dtype).eps
    found = floored(values.clone(), values.amax(1))
    torch.testing.assert_close(found[0, 2], torch.tensor(4 * eps, dtype=dtype))
    torch.testing.assert_close(found[1, 1], torch.tensor(1e-3 * eps, dtype=dtype))
    assert torch.equal(found[:, 0], values[:, 0])


def test_a_kronecker_product_without_damping_has_the_floor_of_its_largest_product():
    """By the eigenvalues ``l_G l_A`` of the whole block, of which the largest is 8."""
    g, a = torch.tensor([[4.0, 0.0], [2.0, 1.0]], dtype=torch.float64)
    products = (g[:, None] * a)[None]
    inverse = DampedPower(-1.0, 0.0)(products)
    largest = torch.full((2,), 1 / (8 * torch.finfo(torch.float64).eps), dtype=torch.float64)
    torch.testing.assert_close(inverse[0, 1], largest)
    torch.testing.assert_close(inverse[0, 0], torch.tensor([1 / 8, 1 / 4], dtype=torch.float64))


def test_a_relative_damping_is_a_share_of_the_mean():
    """However small the mean is; where it is zero, of 1."""
    means = torch.tensor([4.0, 0.5, 1e-9, 0.0], dtype=torch.float64)
    expected = torch.tensor([0.4, 0.05, 1e-10, 0.1], dtype=torch.float64)
    torch.testing.assert_close(relative(natgrad.Relative(0.1), means), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("exponent", [-1.0, -0.5, 1.0])
def test_a_function_of_some_eigenvalues_is_that_of_all(shape, exponent):
    """A rank that has some rows damps them by the mean of all."""
    values = torch.rand(shape, dtype=torch.float64) * torch.tensor([1.0, 100.0]).view(
        2, *[1] * (len(shape) - 1)
    )
    for damping in (0.3, natgrad.Relative(0.3)):
        function = DampedPower(exponent, damping)
        found = function.of_part(values[:, 1:3], values)
        assert found.shape == values[:, 1:3].shape
        torch.testing.assert_close(found, function(values)[:, 1:3])
    mean = values.flatten(1).mean(1)
    expected = (values[1, 1] + 0.3 * mean[1]) ** exponent
    torch.testing.assert_close(found[1, 0], expected)


@pytest.mark.parametrize("inverse", [natgrad.Cholesky(), natgrad.Eigen()], ids=repr)
def test_the_lag_of_a_stack_is_a_mean_over_its_matrices(inverse):
    """Factors of a grouped layer lag as far as one of them, if all moved alike: a drift that grew
    with their number would refresh them at every step."""
    old, new = symmetric([3.0, 1.0, 0.5]), symmetric([3.0, 2.0, 0.7], seed=1)
    lags = []
    for count in (1, 4):
        damping = torch.full((count,), 0.1, dtype=torch.float64)
        parts = inverse.decompose(old.expand(count, 3, 3).clone(), damping)
        lags.append(float(inverse.error(parts, new.expand(count, 3, 3).clone(), damping)))
    assert lags[0] > 0.1
    assert lags[1] == pytest.approx(lags[0])


def test_the_lag_of_cholesky_by_hand():
    inverse = natgrad.Cholesky()
    old, new = symmetric([3.0, 1.0]), symmetric([2.0, 5.0], seed=1)
    damping = torch.tensor([0.1], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    residual = torch.linalg.inv(old + 0.1 * eye) @ (new + 0.1 * eye) - eye
    found = inverse.error(inverse.decompose(old[None].clone(), damping), new[None], damping)
    assert float(found) == pytest.approx(float(residual.norm() / 2**0.5))
    both = torch.stack([old, new])
    dampings = torch.tensor([0.1, 0.1], dtype=torch.float64)
    found = inverse.error(
        inverse.decompose(both.clone(), dampings), torch.stack([new, new]), dampings
    )
    assert float(found) == pytest.approx(float(residual.norm() / 4**0.5))  # sqrt(b d)


def test_what_the_planner_is_told_of_a_product_with_an_inverse():
    """Two operations for each number of a gradient and row of the inverse; one, of a diagonal."""
    own = natgrad.Cholesky().cost(FactorSpec(6, batch=3, numel=63))
    assert own.apply == 2.0 * 6
    assert own.decompose == 3 * Routine.CHOLESKY.operations(6)
    diagonal = natgrad.Cholesky().cost(FactorSpec(6, batch=3, numel=18, diagonal=True))
    assert (diagonal.decompose, diagonal.apply) == (18.0, 1.0)
