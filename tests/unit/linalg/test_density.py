"""Stochastic Lanczos quadrature against dense eigenvalues."""

from functools import cache

import pytest
import torch

from natgrad.errors import ConvergenceError, SettingError
from natgrad.linalg.density import logdet, logdet_of, quadrature
from unit.linalg.spectra import SPECTRA, Known, decaying, each_spectrum, spread

DOUBLE = {"dtype": torch.float64}


def test_nodes_and_weights():
    known = Known(spread(300))
    rule = quadrature(known, 300, probes=6, steps=20, **DOUBLE)
    assert rule.nodes.shape == rule.weights.shape == (6, 20)
    assert rule.products == known.columns == 120
    assert not rule.exact
    torch.testing.assert_close(rule.weights.sum(1), torch.ones(6).double())
    assert rule.weights.min() >= 0
    assert rule.nodes.max() <= known.eigenvalues[0] + 1e-12
    assert rule.nodes.min() >= known.eigenvalues[-1] - 1e-12
    assert "6 probes of 20 steps" in repr(rule)


@pytest.mark.parametrize("power", [0, 1, 2, 5])
def test_moments_are_those_of_the_probes(power):
    """A quadrature of m nodes is exact for polynomials of degree 2 m - 1."""
    known = Known(spread(100))
    rule = quadrature(known, 100, probes=4, steps=3, **DOUBLE)
    z = torch.randint(2, (4, 100), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    z = 2.0 * z.double() - 1
    image = z.T
    for _ in range(power):
        image = known.dense @ image
    expected = (z.T * image).sum(0)
    found = 100 * (rule.weights * rule.nodes**power).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


FUNCTIONS = {
    "trace": lambda x: x,
    "exp": lambda x: x.exp(),
    "log": lambda x: (x.abs() + 0.1).log(),
    "inverse": lambda x: 1 / (x + 4.0),
}


@cache
def many_rules():
    """Two hundred for one matrix: a rule knows of no function, so that it serves all of them."""
    known = Known(spread(120).clamp(-3, 3))
    rules = [quadrature(known, 120, probes=8, steps=12, seed=seed, **DOUBLE) for seed in range(200)]
    return known, rules


@pytest.mark.parametrize("name", FUNCTIONS)
def test_stated_errors_are_honest(name):
    known, rules = many_rules()
    truth = float(FUNCTIONS[name](known.eigenvalues).sum())
    found = [rule.trace(FUNCTIONS[name]) for rule in rules]
    stated = torch.tensor([number.standard_error for number in found])
    errors = torch.tensor([float(number) for number in found]) - truth
    assert (errors.abs() <= 4 * stated).float().mean() >= 0.97
    assert (errors.abs() <= 1.96 * stated).float().mean() >= 0.87
    # The logarithm has a corner at 0 that twelve steps do not follow: a bias, which is overstated.
    assert errors.square().mean() >= (0.1 if name == "log" else 0.5) * stated.square().mean()
    assert found[0].products == 96


@pytest.mark.parametrize("steps", [8, 16, 32])
def test_too_few_steps_show_in_the_error(steps):
    """They cannot follow a logarithm over four orders: the bias is a part of the error."""
    known = Known(torch.logspace(-4, 0, 900))
    truth = float((known.eigenvalues + 1e-4).log().sum())
    found = logdet(known, 900, damping=1e-4, probes=20, steps=steps, **DOUBLE)
    assert abs(float(found) - truth) <= 4 * found.standard_error
    if steps == 8:
        assert abs(float(found) - truth) > 100


@each_spectrum
def test_exact_where_that_costs_no_more(name):
    known = Known(SPECTRA[name])
    rule = quadrature(known, known.n, **DOUBLE)
    assert rule.exact
    assert rule.products == known.columns == known.n
    torch.testing.assert_close(
        rule.nodes[0].flip(0), known.eigenvalues, rtol=1e-9, atol=1e-13 * known.scale
    )
    found = rule.trace(lambda x: x**2)
    assert float(found) == pytest.approx(float(known.dense.square().sum()), rel=1e-10)
    assert found.standard_error == 0


def test_as_many_products_as_columns_are_exact_and_fewer_are_not():
    matrix = torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64))
    for steps, exact in ((4, True), (3, False)):  # of three probes, for twelve columns
        rule = quadrature(lambda m: matrix @ m, 12, probes=3, steps=steps, **DOUBLE)
        assert rule.exact == exact
        assert rule.products == (12 if exact else 9)


@pytest.mark.parametrize("steps", [1, 5, 40])
@pytest.mark.parametrize(
    "values", [torch.zeros(200), 3 * torch.ones(200), torch.ones(200).cumsum(0) % 2]
)
def test_chains_end_where_their_space_is_invariant(values, steps):
    known = Known(values)
    rule = quadrature(known, 200, probes=3, steps=steps, **DOUBLE)
    # What comes after the end of a chain is rounding: no weight lies elsewhere.
    apart = (rule.nodes[:, :, None] - values.unique()).abs().amin(2)
    assert apart[rule.weights > 1e-20].max() <= (1e-10 if steps > 1 else 1)
    if len(values.unique()) == 1:
        assert float(rule.trace(lambda x: x + 1)) == pytest.approx(200 * (float(values[0]) + 1))


def test_more_steps_than_columns():
    known = Known(spread(5000 // 100))
    rule = quadrature(known, 50, probes=2, steps=24, **DOUBLE)
    assert not rule.exact
    assert quadrature(known, 50, probes=2, steps=100, **DOUBLE).exact


def test_density_integrates_to_one_and_to_the_histogram():
    known = Known(torch.cat([spread(250) - 3, spread(150) + 3]))
    density = quadrature(known, 400, probes=12, steps=30, **DOUBLE).density(width=0.2)
    area = torch.trapezoid(density.values, density.grid)
    assert float(area) == pytest.approx(1, abs=1e-3)
    left = density.grid < 0
    part = torch.trapezoid(density.values[left], density.grid[left])
    assert float(part) == pytest.approx(250 / 400, abs=0.05)
    kernel = torch.exp(-((density.grid[:, None] - known.eigenvalues) / 0.2).square() / 2).mean(1)
    expected = kernel / (0.2 * (2 * torch.pi) ** 0.5)
    assert (density.values - expected).abs().max() <= 0.05
    within = (density.values - expected).abs() <= 4 * density.standard_error + 0.01
    assert within.float().mean() >= 0.9


def test_density_of_the_exact_spectrum():
    known = Known(spread(30))
    density = quadrature(known, 30, **DOUBLE).density(points=50)
    assert density.grid.shape == density.values.shape == (50,)
    assert not density.standard_error.any()
    assert density.width == pytest.approx(
        0.01 * float(known.eigenvalues[0] - known.eigenvalues[-1]), rel=1e-6
    )
    ends = quadrature(known, 30, **DOUBLE).density(points=2, width=0.5).grid
    torch.testing.assert_close(ends, known.eigenvalues[[-1, 0]].double() + torch.tensor([-2, 2]))
    point = quadrature(lambda x: 0 * x, 10).density()
    assert float(torch.trapezoid(point.values, point.grid)) == pytest.approx(1, abs=1e-3)


def test_bases_in_pieces_make_no_difference(monkeypatch):
    known = Known(spread(200))
    whole = quadrature(known, 200, probes=5, steps=10, **DOUBLE)
    monkeypatch.setattr("natgrad.linalg.density._TOGETHER", 2 * 10 * 200)
    parts = quadrature(known, 200, probes=5, steps=10, **DOUBLE)
    torch.testing.assert_close(parts.nodes, whole.nodes)
    torch.testing.assert_close(parts.weights, whole.weights)


class TestLogdet:
    def test_within_its_error(self):
        known = Known(decaying(200))
        truth = float((known.eigenvalues + 1e-3).log().sum())
        for seed in range(10):
            found = logdet(known, 200, damping=1e-3, probes=10, steps=15, seed=seed, **DOUBLE)
            assert abs(float(found) - truth) <= 4 * found.standard_error
            assert found.standard_error < 0.1 * abs(truth)

    def test_exact(self):
        known = Known(spread(30).abs() + 0.1)
        found = logdet(known, 30, damping=0.5, **DOUBLE)
        expected = torch.logdet(known.dense + 0.5 * torch.eye(30, dtype=torch.float64))
        assert float(found) == pytest.approx(float(expected), rel=1e-12)

    def test_not_positive_definite(self):
        rule = quadrature(lambda x: -0.25 * x, 10, **DOUBLE)
        with pytest.raises(SettingError) as caught:
            logdet_of(rule, 0.1)
        assert str(caught.value) == (
            "log det needs a positive definite matrix, but -0.25 is among the eigenvalues and "
            "damping is 0.1: give a damping above 0.25."
        )


def test_float32():
    known = Known(spread(200))
    single = quadrature(known, 200, probes=4, steps=20)
    double = quadrature(known, 200, probes=4, steps=20, **DOUBLE)
    assert single.nodes.dtype == torch.float64
    assert float(single.trace(torch.exp)) == pytest.approx(float(double.trace(torch.exp)), rel=1e-4)


def test_messages():
    rule = quadrature(lambda x: 2 * x, 10)
    with pytest.raises(SettingError) as caught:
        rule.trace(lambda x: x / 0)
    assert str(caught.value) == (
        "The function is inf at the eigenvalue 2 but must be finite there: add damping to it."
    )
    with pytest.raises(SettingError) as caught:
        rule.density(width=0.0)
    assert str(caught.value) == "width is 0.0 but must be positive: give one or None."
    for name, value in [("probes", 1), ("steps", 0)]:
        with pytest.raises(SettingError, match=f"{name} is {value} but must be a whole number"):
            quadrature(lambda x: x, 10, **{name: value})
    with pytest.raises(SettingError, match="points is 1 but must be a whole number of at least 2"):
        rule.density(points=1)
    for n in (10, 1000):
        with pytest.raises(ConvergenceError, match="is not finite"):
            quadrature(lambda x: x * torch.nan, n)
