"""Extreme eigenvalues by LOBPCG against dense eigendecompositions."""

import pytest
import torch

from natgrad.errors import ConvergenceError, SettingError
from natgrad.linalg.lobpcg import eigenpairs
from unit.linalg.spectra import SPECTRA, Known, check_pairs, each_spectrum, repeated, spread


@each_spectrum
@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("k", [1, 4, 10, 100])
def test_pairs_are_those_of_the_dense_matrix(name, smallest, k):
    known = Known(SPECTRA[name])
    found = eigenpairs(
        known, known.n, k, smallest=smallest, tolerance=1e-9, limit=3000, dtype=torch.float64
    )
    check_pairs(found, known, k, smallest, 2e-9)


def laplacian(n):
    """Second differences: the smallest eigenvalues lie densely, next to the largest condition."""
    x = 2 * torch.ones(n, dtype=torch.float64)
    return x.diag() - x[1:].diag(1) / 2 - x[1:].diag(-1) / 2


def test_a_preconditioner_saves_products():
    known = Known(torch.ones(300))
    known.dense = laplacian(300)
    known.eigenvalues = torch.linalg.eigvalsh(known.dense).flip(0)
    known.scale = float(known.eigenvalues[0])
    inverse = torch.linalg.inv(known.dense + 1e-4 * torch.eye(300, dtype=torch.float64))
    counts = []
    for preconditioner in (None, lambda r: inverse @ r):
        known.columns = 0
        found = eigenpairs(
            known,
            300,
            4,
            smallest=True,
            tolerance=1e-8,
            preconditioner=preconditioner,
            dtype=torch.float64,
        )
        assert (found.values - known.eigenvalues[-4:]).abs().max() <= 1e-10
        assert found.products == known.columns
        assert ("with a preconditioner" in found.method) == (preconditioner is not None)
        counts.append(found.products)
    assert counts[1] < counts[0] / 5


def test_residuals_at_the_limit_are_true():
    known = Known(torch.linspace(0, 1, 200))
    found = eigenpairs(known, 200, 3, limit=4, dtype=torch.float64)
    assert not found.converged
    assert "4 iterations" in found.method
    rest = (known.dense @ found.vectors - found.vectors * found.values).norm(dim=0)
    assert (rest / found.values.abs().max() - found.residuals).abs().max() <= 1e-10


def test_columns_that_are_done_are_not_multiplied():
    known = Known(torch.cat([torch.tensor([1e3, 5e2]), torch.linspace(0, 1, 200)]))
    found = eigenpairs(known, known.n, 3, tolerance=1e-6, dtype=torch.float64)
    iterations = int(found.method.split(", ")[1].split()[0])
    assert found.converged
    # Five columns at the start and at the end; the two far ones need few steps of all.
    assert found.products < 10 + 4 * iterations


@pytest.mark.parametrize("seed", range(5))
def test_multiple_eigenvalues(seed):
    known = Known(torch.cat([repeated((4, 1), (3, 5), (2, 3)), 0.5 * spread(200)]), seed)
    found = eigenpairs(known, known.n, 8, seed=seed, tolerance=1e-7, dtype=torch.float64)
    check_pairs(found, known, 8, False, 1e-6)


def test_float32():
    known = Known(SPECTRA["multiple"])
    found = eigenpairs(known, known.n, 6)
    assert found.converged
    assert found.values.dtype == found.vectors.dtype == torch.float32
    assert (found.values - known.eigenvalues[:6]).abs().max() <= 2e-6 * known.scale


def test_messages():
    with pytest.raises(ConvergenceError, match="is not finite"):
        eigenpairs(lambda x: x * torch.nan, 5, 2)
    with pytest.raises(ConvergenceError, match="is not finite"):
        eigenpairs(Known(spread(50)), 50, 2, preconditioner=lambda r: r / 0, dtype=torch.float64)
    for name in ("k", "limit"):
        with pytest.raises(SettingError, match=f"^{name} is 0 but must be a whole number"):
            eigenpairs(lambda x: x, 5, **{"k": 2, name: 0})


def test_a_residual_of_the_tolerance_is_small_enough():
    known = Known(spread(60))
    first = eigenpairs(known, 60, 1, tolerance=1e-12, limit=1, dtype=torch.float64)
    assert not first.converged
    reached = float(first.residuals.max())
    assert eigenpairs(known, 60, 1, tolerance=reached, limit=1, dtype=torch.float64).converged
