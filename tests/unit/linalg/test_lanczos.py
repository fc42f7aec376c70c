"""Extreme eigenvalues by Lanczos against dense eigendecompositions."""

import copy
import pickle

import pytest
import torch

from natgrad.errors import ConvergenceError, NatgradError, SettingError
from natgrad.linalg.lanczos import eigenpairs
from natgrad.linalg.results import Eigenpairs, Estimate, Number, Solution
from unit.linalg.spectra import SPECTRA, Known, check_pairs, each_spectrum, repeated, spread


@each_spectrum
@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("k", [1, 3, 10, 100])
def test_pairs_are_those_of_the_dense_matrix(name, smallest, k):
    known = Known(SPECTRA[name])
    found = eigenpairs(known, known.n, k, smallest=smallest, tolerance=1e-10, dtype=torch.float64)
    check_pairs(found, known, k, smallest, 1e-9)
    assert found.products <= 2 * known.n


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("block", [1, 2, 5])
def test_no_copy_of_a_multiple_eigenvalue_is_missed(seed, block):
    values = torch.cat([repeated((4, 1), (3, 5), (2.9, 2), (2, 3)), 0.5 * spread(200)])
    known = Known(values, seed)
    found = eigenpairs(known, known.n, 10, seed=seed, block=block, dtype=torch.float64)
    check_pairs(found, known, 10, False, 1e-5)


@pytest.mark.parametrize("basis", [1, 20, 30])
@pytest.mark.parametrize("smallest", [False, True])
def test_a_small_basis_restarts(basis, smallest):
    known = Known(spread(300) ** 3)
    found = eigenpairs(
        known, known.n, 6, smallest=smallest, basis=basis, tolerance=1e-8, dtype=torch.float64
    )
    check_pairs(found, known, 6, smallest, 1e-7)
    assert "thick restart" in found.method


def test_a_small_basis_says_that_copies_were_not_excluded():
    known = Known(torch.linspace(0, 1, 400))
    found = eigenpairs(known, known.n, 4, basis=12, tolerance=1e-3, dtype=torch.float64)
    assert found.converged
    assert "further copies were not excluded" in found.method


def test_eigenvalues_are_better_than_the_residuals():
    known = Known(spread(200) ** 3)
    found = eigenpairs(known, known.n, 5, tolerance=1e-4, dtype=torch.float64)
    error = (found.values - known.eigenvalues[:5]).abs() / known.scale
    assert error.max() <= 1e-6
    assert found.residuals.max() > 1e-7


def test_one_pair_needs_no_search_for_copies():
    values = torch.cat([repeated((10, 1)), 0.1 * spread(500)])
    one = eigenpairs(Known(values), 501, 1, dtype=torch.float64)
    assert one.products <= 6
    assert abs(float(one.values) - 10) < 1e-8


def outliers(n=600):
    """As in a network: a few large eigenvalues over a bulk near zero."""
    bulk = 0.02 * spread(n).abs() ** 3
    bulk[:12] = torch.linspace(1, 20, 12)
    return bulk


@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, 1e-8])
def test_needs_fewer_products_than_scipy(tolerance):
    linalg = pytest.importorskip("scipy.sparse.linalg")
    ours = theirs = 0
    for values in (outliers(), spread(600) ** 5, spread(600, 5) ** 7):
        known, peer = Known(values), Known(values)
        found = eigenpairs(known, known.n, 10, tolerance=tolerance, dtype=torch.float64)
        operator = linalg.LinearOperator(
            (known.n, known.n),
            matvec=lambda x, peer=peer: peer(torch.from_numpy(x.reshape(-1, 1))).numpy(),
            dtype=float,
        )
        start = torch.randn(known.n, dtype=torch.float64).numpy()
        linalg.eigsh(operator, 10, which="LA", tol=tolerance, v0=start)
        check_pairs(found, known, 10, False, tolerance)
        ours, theirs = ours + found.products, theirs + peer.columns
    assert ours < theirs


def test_a_few_dozen_products_for_ten_outliers():
    known = Known(outliers())
    found = eigenpairs(known, known.n, 10, tolerance=1e-6, dtype=torch.float64)
    check_pairs(found, known, 10, False, 1e-6)
    assert found.products <= 36


def test_stops_at_the_limit_and_says_so():
    known = Known(torch.linspace(0, 1, 500))
    found = eigenpairs(known, known.n, 5, limit=12, dtype=torch.float64)
    assert not found.converged
    assert found.products == known.columns == 12
    assert "stopped at the limit of 12 products" in found.method
    rest = known.dense @ found.vectors - found.vectors * found.values
    assert (rest.norm(dim=0) / found.values.abs().max() - found.residuals).abs().max() < 1e-10


def test_a_limit_below_k_gives_what_there_is():
    known = Known(spread(80))
    found = eigenpairs(known, known.n, 4, limit=3, dtype=torch.float64)
    assert found.values.shape == (3,)
    assert not found.converged


def test_copies_that_were_not_excluded_within_the_limit():
    known = Known(outliers(400))
    full = eigenpairs(known, known.n, 10, tolerance=1e-6, dtype=torch.float64)
    found = eigenpairs(
        known, known.n, 10, tolerance=1e-6, dtype=torch.float64, limit=full.products - 1
    )
    assert found.converged
    assert "further copies were not excluded" in found.method


@pytest.mark.parametrize("name", ["indefinite", "multiple", "clustered", "zero"])
def test_lower_precision(name):
    known = Known(SPECTRA[name])
    found = eigenpairs(known, known.n, 6)
    assert found.values.dtype == found.vectors.dtype == torch.float32
    assert (found.values - known.eigenvalues[:6]).abs().max() <= 4e-6 * known.scale
    coarse = eigenpairs(known, known.n, 1, dtype=torch.bfloat16)
    assert coarse.values.dtype == torch.float32
    assert (coarse.values - known.eigenvalues[:1]).abs().max() <= 0.02 * known.scale


def test_products_that_are_not_quite_symmetric_do_not_keep_it_busy():
    known = Known(spread(300))
    noise = 1e-5 * torch.randn(300, 300, dtype=torch.float64) / 300**0.5
    found = eigenpairs(lambda x: known(x) + noise @ x, 300, 4, tolerance=1e-9, dtype=torch.float64)
    assert not found.converged
    assert found.products < 200
    assert "products are symmetric only to" in found.method
    assert (found.values - known.eigenvalues[:4]).abs().max() <= 1e-4


def test_same_seed_same_result():
    known = Known(spread(100))
    first, second, other = (
        eigenpairs(known, 100, 3, seed=seed, dtype=torch.float64) for seed in (1, 1, 2)
    )
    assert torch.equal(first.vectors, second.vectors)
    assert not torch.equal(first.vectors, other.vectors)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_product_that_is_not_finite(value):
    with pytest.raises(ConvergenceError) as caught:
        eigenpairs(lambda x: x * value, 99, 2)
    assert isinstance(caught.value, NatgradError)
    assert str(caught.value) == (
        "A product of the matrix with finite vectors is not finite (after 1 products): look for "
        "overflow or NaN in the model, the loss or the data."
    )


def test_a_product_of_another_shape():
    with pytest.raises(SettingError) as caught:
        eigenpairs(lambda x: x[:3], 99, 2)
    assert str(caught.value) == (
        "The product of the matrix with a tensor of shape [99, 1] has shape [3, 1] but must keep "
        "it: let it take and give [n, k]."
    )


@pytest.mark.parametrize("name", ["n", "k", "limit", "basis", "block"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_whole_numbers(name, value):
    settings = {"n": 5, "k": 2, name: value}
    with pytest.raises(SettingError) as caught:
        eigenpairs(lambda x: x, **settings)
    assert str(caught.value) == (
        f"{name} is {value!r} but must be a whole number of at least 1: give one."
    )


@pytest.mark.parametrize("tolerance", [0.0, -1e-3, 1.0, torch.nan])
def test_tolerance(tolerance):
    with pytest.raises(SettingError) as caught:
        eigenpairs(lambda x: x, 5, 2, tolerance=tolerance)
    assert str(caught.value) == (
        f"tolerance is {tolerance!r} but must lie between 0 and 1: it is a relative residual, 1e-5 "
        "for instance."
    )


def test_dtype():
    with pytest.raises(SettingError) as caught:
        eigenpairs(lambda x: x, 5, 2, dtype=torch.int64)
    assert str(caught.value) == (
        "dtype is torch.int64 but must be a floating-point one: give that of the matrix."
    )


def test_gradients_are_neither_needed_nor_kept():
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    found = eigenpairs(lambda x: weight @ (weight.T @ x), 6, 2, dtype=torch.float64)
    assert not found.vectors.requires_grad


class TestResults:
    def test_number_is_a_float(self):
        number = Number(2.5, "a method", 0.25, 7)
        assert number == 2.5
        assert number + 1 == 3.5
        assert f"{number:.2f}" == "2.50"
        assert str(number) == "2.5 ± 0.25"
        assert repr(number) == "2.5 ± 0.25 (a method, 7 products)"
        assert repr(Number(1.0, "exact", products=1)) == "1 (exact, 1 product)"
        assert repr(Number(1.0)) == "1"

    @pytest.mark.parametrize(
        "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
    )
    def test_number_is_copied_whole(self, copied):
        number = copied(Number(2.5, "a method", 0.25, 7))
        assert (number, number.method, number.standard_error, number.products) == (
            2.5,
            "a method",
            0.25,
            7,
        )

    def test_short_descriptions(self):
        x = torch.arange(7.0).flip(0)
        pairs = Eigenpairs(x, torch.eye(7), x / 1e6, True, 30, "Lanczos")
        assert repr(pairs) == (
            "Eigenpairs(6, 5, 4, 3, 2, …; converged, residuals up to 6.0e-06, Lanczos, 30 products)"
        )
        solution = Solution(torch.ones(7, 2), x[:2], False, 1, "CG")
        assert repr(solution) == (
            "Solution(7×2 numbers; NOT converged, residuals up to 6.0e+00, CG, 1 product)"
        )
        estimate = Estimate(x, x / 10, 5, "signs")
        assert repr(estimate) == "Estimate(7 numbers, ± 0.6 at most, signs, 5 products)"
