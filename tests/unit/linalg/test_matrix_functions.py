"""Functions of matrices times vectors against dense eigendecompositions."""

import pytest
import torch

from natgrad.errors import ConvergenceError, SettingError
from natgrad.linalg.matrix_functions import apply, power
from unit.linalg.spectra import SPECTRA, Known, decaying, each_spectrum, spread


def exact(known, function, v, damping=0.0):
    values, vectors = torch.linalg.eigh(known.dense)
    return vectors @ (function(values + damping)[:, None] * (vectors.T @ v))


def vectors(n, k=3):
    return torch.randn(n, k, dtype=torch.float64)


@each_spectrum
@pytest.mark.parametrize("function", [torch.exp, torch.sin, lambda x: x**2])
def test_equals_the_dense_function(name, function):
    known = Known(SPECTRA[name] / SPECTRA[name].abs().max().clamp_min(1e-300))
    v = vectors(known.n)
    found = apply(function, known, v, tolerance=1e-10)
    expected = exact(known, function, v)
    assert found.converged
    assert (found.x - expected).norm() <= 1e-9 * max(float(expected.norm()), 1e-3)
    assert found.products == known.columns <= 3 * known.n
    assert found.residuals.shape == (3,)


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.5, -0.25, 1.0, 0.0, 2.0])
def test_powers(exponent):
    known, v = Known(decaying(100)), vectors(100)
    found = power(known, v, exponent, damping=1e-2, tolerance=1e-9)
    expected = exact(known, lambda x: x**exponent, v, 1e-2)
    assert found.converged
    assert (found.x - expected).norm() <= 1e-8 * expected.norm()


def test_two_roots_are_the_matrix():
    known, v = Known(spread(60).abs()), vectors(60)
    root = power(known, v, 0.5, tolerance=1e-12).x
    again = power(known, root, 0.5, tolerance=1e-12).x
    assert (again - known.dense @ v).norm() <= 1e-7 * (known.dense @ v).norm()


@pytest.mark.parametrize(
    "values", [decaying(300, 0.97), torch.linspace(1e-3, 1, 300), spread(300).abs()]
)
@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.5])
@pytest.mark.parametrize("limit", [12, 20, 30, 41, 60])
def test_the_estimated_error_is_honest(values, exponent, limit):
    known, v = Known(values), vectors(300)
    found = power(known, v, exponent, damping=1e-3, limit=limit, tolerance=1e-12)
    expected = exact(known, lambda x: x**exponent, v, 1e-3)
    true = (found.x - expected).norm(dim=0) / expected.norm(dim=0)
    assert (true <= 3 * found.residuals + 1e-12).all()
    if not found.converged:
        assert f"stopped at the limit of {limit} steps" in found.method


def test_the_estimate_is_not_much_too_large():
    known, v = Known(spread(300)), vectors(300)
    found = apply(torch.exp, known, v, limit=16, tolerance=1e-14)
    true = (found.x - exact(known, torch.exp, v)).norm(dim=0) / found.x.norm(dim=0)
    earlier = apply(torch.exp, known, v, limit=11, tolerance=1e-14)
    before = (earlier.x - exact(known, torch.exp, v)).norm(dim=0) / found.x.norm(dim=0)
    assert (true <= found.residuals).all()
    assert (found.residuals <= before).all()


def test_columns_that_are_done_are_not_multiplied():
    known = Known(spread(200))
    _, directions = torch.linalg.eigh(known.dense)
    v = torch.stack([directions[:, 3], vectors(200)[:, 0], torch.zeros(200).double()], 1)
    found = apply(torch.exp, known, v, tolerance=1e-10)
    alone = apply(torch.exp, known, v[:, 1], tolerance=1e-10)
    assert found.products <= alone.products + 8
    assert alone.products <= 40
    assert not found.x[:, 2].any()
    torch.testing.assert_close(found.x[:, 1], alone.x)
    assert alone.x.shape == (200,)


def test_columns_in_pieces_make_no_difference(monkeypatch):
    known, v = Known(spread(50)), vectors(50, 5)
    whole = apply(torch.exp, known, v)
    monkeypatch.setattr("natgrad.linalg.matrix_functions._TOGETHER", 2 * 50 * 50)
    torch.testing.assert_close(apply(torch.exp, known, v).x, whole.x)


def test_rank_deficient_roots():
    known, v = Known(torch.cat([decaying(10), torch.zeros(40).double()])), vectors(50)
    found = power(known, v, 0.5, tolerance=1e-10)
    expected = exact(known, lambda x: x.clamp_min(0).sqrt(), v)
    assert (found.x - expected).norm() <= 1e-6 * expected.norm()


def test_float32():
    known, v = Known(decaying(100)), vectors(100)
    found = power(known, v.float(), -0.5, damping=0.1)
    assert found.x.dtype == torch.float32
    expected = exact(known, lambda x: x**-0.5, v, 0.1)
    assert (found.x - expected).norm() <= 1e-5 * expected.norm()


def test_messages():
    v = torch.ones(5, dtype=torch.float64)
    with pytest.raises(SettingError) as caught:
        power(lambda x: -0.25 * x, v, 0.5, damping=0.125)
    assert str(caught.value) == (
        "The power 0.5 is not defined at -0.125, which is among the eigenvalues plus the damping "
        "0.125: use more damping."
    )
    with pytest.raises(SettingError, match="The power -1 is not defined at 0, which is among"):
        power(lambda x: 0 * x, v, -1)
    assert power(lambda x: -2 * x, v, -1).x.tolist() == [-0.5] * 5
    with pytest.raises(SettingError) as caught:
        apply(torch.log, lambda x: -x, v)
    assert str(caught.value) == (
        "The function is not finite on the eigenvalues from -1 to -1: add damping to it."
    )
    with pytest.raises(SettingError, match="limit is 0 but must be a whole number"):
        apply(torch.exp, lambda x: x, v, limit=0)
    with pytest.raises(SettingError, match=r"v is a torch.int64 tensor of shape \[5\] but must"):
        apply(torch.exp, lambda x: x, v.long())
    with pytest.raises(ConvergenceError, match="is not finite"):
        apply(torch.exp, lambda x: x * torch.inf, v)
