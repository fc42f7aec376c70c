"""Errors of the Monte-Carlo Fisher beside those of dense matrices, and their slope."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.lab.models import mlp
from natgrad.lab.reproduce.monte_carlo import EMPIRICAL, errors, slope
from natgrad.operators import Problem

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(12) % 3


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    return Problem(mlp((3, 4, 3)).double(), F.cross_entropy, (X, Y))


def rows_of(problem, n):
    """Probabilities ``[3]`` and gradients ``[3, P]`` of a sample, by class, through autograd."""
    output = problem.model(X[n : n + 1])
    rows = []
    for c in range(3):
        loss = F.cross_entropy(output, torch.tensor([c]))
        found = torch.autograd.grad(loss, list(problem.model.parameters()), retain_graph=True)
        rows.append(torch.cat([one.flatten() for one in found]))
    return output.softmax(1)[0].detach(), torch.stack(rows)


def by_hand(problem, weights_of):
    """``mean_n Σ_c w_nc s_nc s_ncᵀ``"""
    total = 0
    for n in range(len(X)):
        p, rows = rows_of(problem, n)
        total = total + rows.T @ (weights_of(p, Y[n])[:, None] * rows)
    return total / len(X)


def test_the_empirical_error_is_that_of_matrices_by_hand(problem):
    exact = by_hand(problem, lambda p, label: p)
    at_labels = by_hand(problem, lambda p, label: F.one_hot(label, 3).double())
    found = errors(problem, (1,), 2, 0)[EMPIRICAL]
    assert found == pytest.approx(float((at_labels - exact).norm() / exact.norm()), rel=1e-9)


def test_the_mean_square_is_the_variance_of_one_draw_over_their_number(problem):
    """``E |F_mc - F|²``: of a sample ``Σ_c p_c |s_c s_cᵀ - F_n|²``, samples being independent."""
    exact = by_hand(problem, lambda p, label: p)
    variance = 0.0
    for n in range(len(X)):
        p, rows = rows_of(problem, n)
        products = rows[:, :, None] * rows[:, None]
        mean = (p[:, None, None] * products).sum(0)
        variance += float((p * (products - mean).square().sum((1, 2))).sum())
    expected = (variance / len(X) ** 2) ** 0.5 / float(exact.norm())
    found = errors(problem, (1, 16), 30, 0)
    assert found["1"] == pytest.approx(expected, rel=0.2)
    assert found["16"] == pytest.approx(expected / 4, rel=0.2)


def test_slope_is_that_of_a_power():
    powers = {str(n): 3.0 * n**-0.5 for n in (1, 4, 16)}
    assert slope({**powers, EMPIRICAL: 9.0}) == pytest.approx(-0.5)
    assert slope({str(n): 2.0 for n in (1, 4, 16)}) == pytest.approx(0)
