"""Estimators of traces, diagonals and norms: right within the errors they state, which are honest.

Statistics are taken over repetitions with different seeds, of which the numbers are fixed.
"""

import pytest
import torch

from natgrad.errors import ConvergenceError, SettingError
from natgrad.linalg import traces
from natgrad.linalg.matrix_free import MatrixFree, generator_of
from unit.linalg.spectra import SPECTRA, Known, decaying, each_spectrum, spread

REPETITIONS = 200
DOUBLE = {"dtype": torch.float64}

# Each with its truth and what it costs.
ESTIMATORS = {
    "hutchinson": (traces.hutchinson, lambda a: float(a.trace()), 30),
    "hutchpp": (traces.hutchpp, lambda a: float(a.trace()), 60),
    "xtrace": (traces.xtrace, lambda a: float(a.trace()), 40),
    "squared_norm": (traces.squared_norm, lambda a: float(a.square().sum()), 30),
}
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
MATRICES = {"indefinite": spread(120), "decaying": decaying(120), "positive": spread(120).abs()}


def repeated(function, known, budget, count=REPETITIONS):
    return [function(known, known.n, budget, seed=seed, **DOUBLE) for seed in range(count)]


@each_estimator
@pytest.mark.parametrize("name", MATRICES)
def test_stated_errors_are_honest(estimator, name):
    function, truth, budget = ESTIMATORS[estimator]
    known = Known(MATRICES[name])
    found = repeated(function, known, budget)
    stated = torch.tensor([number.standard_error for number in found])
    errors = torch.tensor([float(number) for number in found]) - truth(known.dense)
    assert (errors.abs() / stated).max() <= 6
    assert ((errors.abs() <= 4 * stated).float().mean()) >= 0.985
    covered = (errors.abs() <= 1.96 * stated).float().mean()
    assert 0.88 <= covered <= 1
    # The spread that is seen, against the one that is stated; and no bias.
    assert 0.7 <= errors.std() / stated.square().mean().sqrt() <= 1.3
    assert errors.mean().abs() <= 4 * errors.std() / REPETITIONS**0.5


@each_estimator
def test_products_are_counted(estimator):
    function, _, budget = ESTIMATORS[estimator]
    known = Known(MATRICES["decaying"])
    found = function(known, known.n, budget, **DOUBLE)
    assert found.products == known.columns == budget
    assert found.method


@each_estimator
@each_spectrum
def test_exact_where_that_costs_no_more(estimator, name):
    function, truth, _ = ESTIMATORS[estimator]
    known = Known(SPECTRA[name])
    found = function(known, known.n, max(6, known.n), **DOUBLE)
    expected = truth(known.dense)
    assert float(found) == pytest.approx(expected, rel=1e-10, abs=1e-13 * known.scale * known.n)
    assert found.standard_error == 0
    assert found.products == known.columns == known.n
    assert "exact" in found.method


def slope(function, known, budgets, count):
    """Of the logarithm of the root mean square error over that of the budget."""
    truth = float(known.dense.trace())
    errors = [
        torch.tensor([float(x) for x in repeated(function, known, budget, count)]) - truth
        for budget in budgets
    ]
    logs = torch.stack([e.square().mean().sqrt().log() for e in errors])
    x = torch.tensor(budgets).float().log()
    x, logs = x - x.mean(), logs - logs.mean()
    return float((x * logs).sum() / x.square().sum())


def test_hutchinson_converges_with_the_square_root():
    known = Known(spread(300).abs())
    assert slope(traces.hutchinson, known, [8, 32, 128], 150) == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize("function", [traces.hutchpp, traces.xtrace])
def test_sketches_converge_faster_on_decaying_spectra(function):
    known = Known(1 / torch.arange(1, 301, dtype=torch.float64) ** 2)
    assert slope(function, known, [12, 36, 108], 80) <= -1.2


def test_sketches_are_exact_on_low_ranks():
    known = Known(torch.cat([decaying(5), torch.zeros(195).double()]))
    for function in (traces.hutchpp, traces.xtrace):
        found = function(known, 200, 30, **DOUBLE)
        assert float(found) == pytest.approx(float(known.dense.trace()), rel=1e-12)
        assert found.standard_error <= 1e-12


def test_the_zero_matrix():
    for function, _, budget in ESTIMATORS.values():
        found = function(lambda x: 0 * x, 100, budget)
        assert float(found) == 0
        assert found.standard_error == 0


class TestDiagonal:
    def test_stated_errors_are_honest(self):
        known = Known(MATRICES["indefinite"])
        found = repeated(traces.diagonal, known, 40, 60)
        errors = torch.stack([x.value for x in found]) - known.dense.diagonal()
        stated = torch.stack([x.standard_error for x in found])
        assert (errors.abs() <= 4 * stated).float().mean() >= 0.998
        assert 0.92 <= (errors.abs() <= 1.96 * stated).float().mean() <= 0.97
        assert (errors.mean(0) / (stated.mean(0) / 60**0.5)).abs().max() <= 4.5
        assert found[0].products == 40

    def test_the_error_is_the_rest_of_the_row(self):
        known = Known(MATRICES["decaying"])
        found = traces.diagonal(known, 120, 100, **DOUBLE)
        rest = (known.dense.square().sum(1) - known.dense.diagonal().square()) / 100
        torch.testing.assert_close(found.standard_error, rest.sqrt(), rtol=0.35, atol=0)

    @each_spectrum
    def test_exact_where_that_costs_no_more(self, name):
        known = Known(SPECTRA[name])
        found = traces.diagonal(known, known.n, max(2, known.n), **DOUBLE)
        torch.testing.assert_close(found.value, known.dense.diagonal())
        assert not found.standard_error.any()
        assert found.products == known.n

    def test_pieces_make_no_difference(self, monkeypatch):
        known = Known(MATRICES["indefinite"])
        whole = traces.diagonal(known, 120, 50, **DOUBLE), traces.hutchinson(known, 120, 50)
        monkeypatch.setattr("natgrad.linalg.matrix_free._AT_ONCE", 7 * 120)
        parts = traces.diagonal(known, 120, 50, **DOUBLE), traces.hutchinson(known, 120, 50)
        torch.testing.assert_close(parts[0].value, whole[0].value)
        torch.testing.assert_close(parts[0].standard_error, whole[0].standard_error)
        assert float(parts[1]) == pytest.approx(float(whole[1]), rel=1e-6)
        assert parts[1].standard_error == pytest.approx(whole[1].standard_error, rel=1e-5)
        exact = traces.hutchinson(known, 120, 120, **DOUBLE)
        assert float(exact) == pytest.approx(float(known.dense.trace()), abs=1e-12)


def test_vectors_are_the_same_in_every_dtype():
    single = MatrixFree(lambda x: x, 30, torch.float32)
    double = MatrixFree(lambda x: x, 30, torch.float64)
    for draw in ("signs", "gaussians"):
        a = getattr(single, draw)(5, generator_of(3))
        b = getattr(double, draw)(5, generator_of(3))
        assert a.shape == (30, 5)
        assert torch.equal(a, b.float())
    signs = double.signs(1000, generator_of(0))
    assert signs.unique().tolist() == [-1, 1]
    assert abs(float(signs.mean())) < 0.02


def test_drawing_leaves_torchs_own_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    traces.hutchinson(Known(spread(20)), 20, 5, **DOUBLE)
    assert torch.equal(torch.rand(3), expected)


def test_float32_and_bfloat16():
    known = Known(MATRICES["positive"])
    truth = float(known.dense.trace())
    for dtype in (torch.float32, torch.bfloat16):
        for function in (traces.hutchinson, traces.hutchpp, traces.xtrace):
            found = function(known, 120, 60, dtype=dtype)
            assert abs(float(found) - truth) <= 4 * found.standard_error + 0.05 * truth


def test_messages():
    for name, function in [
        ("samples", traces.hutchinson),
        ("samples", traces.squared_norm),
        ("samples", traces.diagonal),
        ("products", traces.hutchpp),
        ("products", traces.xtrace),
    ]:
        lowest = 2 if name == "samples" else 6
        with pytest.raises(SettingError) as caught:
            function(lambda x: x, 100, 1)
        assert str(caught.value) == (
            f"{name} is 1 but must be a whole number of at least {lowest}: give one."
        )
        with pytest.raises(ConvergenceError, match="is not finite"):
            function(lambda x: x / 0, 100, 10)
