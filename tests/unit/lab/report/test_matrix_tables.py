"""What is read from a matrix, against its dense eigenvalues."""

from dataclasses import replace
from math import inf

import pytest
import torch

from natgrad.curvature.fisher import EmpiricalFisher
from natgrad.lab.report import dense_cache, matrix_tables
from natgrad.lab.report.dense_cache import Written
from natgrad.lab.report.matrix_tables import measure, table, text, traces
from natgrad.linalg.results import Number
from natgrad.operators import fisher, ggn, hessian
from natgrad.structures import Kronecker
from unit.lab.report.small_network import blocks, dense, problem


@pytest.fixture(scope="module")
def given():
    return problem()


@pytest.fixture(scope="module")
def truth(given):
    hessian_, fisher_, empirical, _, _ = dense(given)
    return {"H": hessian_, "G": fisher_, "C": empirical}


def operator(name, given):
    if name == "H":
        return hessian(given)
    return ggn(given) if name == "G" else fisher(given, curvature=EmpiricalFisher())


@pytest.mark.parametrize(
    "wrap", [dense_cache.written, lambda one: one], ids=["written", "products"]
)
@pytest.mark.parametrize("name", ["H", "G", "C"])
def test_everything_is_that_of_the_dense_matrix(given, truth, name, wrap):
    full = truth[name]
    values = torch.linalg.eigvalsh(full).flip(0)
    found = measure(wrap(operator(name, given)), name, "full", k=4, damping=2.0)
    assert float(found.trace) == pytest.approx(float(full.trace()), rel=1e-9)
    assert float(found.norm) == pytest.approx(float(full.norm()), rel=1e-9)
    assert torch.allclose(found.largest.values, values[:4], atol=1e-4)
    assert torch.allclose(found.smallest.values, values[-1:], atol=1e-4)
    condition = (values[0] + 2) / (values[-1] + 2)
    assert found.condition == pytest.approx(float(condition), rel=1e-4)
    assert found.converged
    assert found.residual < 1e-4
    for trace, index in zip(found.layers.values(), blocks(), strict=True):
        assert float(trace) == pytest.approx(float(full.diagonal()[index].sum()), rel=1e-9)


def test_in_closed_form(given):
    kept = ggn(given, structure=Kronecker())
    values = torch.linalg.eigvalsh(kept.dense()).flip(0)
    found = measure(kept, "G", "kronecker", k=3)
    assert torch.allclose(found.largest.values, values[:3], rtol=1e-9)
    assert float(found.norm) == pytest.approx(float(values.norm()), rel=1e-9)


def test_an_indefinite_matrix_has_no_condition(given):
    found = measure(hessian(given), "H", "full", damping=1e-6)
    assert found.condition == inf
    assert table([found]).column("condition") == ("indefinite",)


def test_large_hessians_are_estimated_within_their_error(given, truth, monkeypatch):
    monkeypatch.setattr(matrix_tables, "SMALL", 10)
    trace, layers = traces(hessian(given), seed=1)
    full = truth["H"].diagonal()
    assert trace.standard_error > 0
    assert abs(float(trace) - float(full.sum())) < 4 * trace.standard_error
    for one, index in zip(layers.values(), blocks(), strict=True):
        assert abs(float(one) - float(full[index].sum())) < 4 * one.standard_error
    assert float(trace) == pytest.approx(sum(map(float, layers.values())))
    exact, _ = traces(ggn(given))  # whose diagonal is cheap at any size
    assert exact.standard_error == 0


def test_a_row_shows_errors_and_leaves_rounding_out(given):
    rows = table([measure(dense_cache.written(ggn(given)), "G", "full")])
    assert rows.column("λ min") == ("0",)
    indefinite = table([measure(hessian(given), "H", "full")])
    assert float(indefinite.column("λ min")[0]) < 0


def test_numbers_as_text():
    assert text(Number(1.23456789)) == "1.23457"
    assert text(Number(1.23456789, "", 0.0512)) == "1.235 ± 0.051"


def test_iterations_that_did_not_converge_are_marked(given):
    found = measure(dense_cache.written(hessian(given)), "H", "full")
    stopped = replace(found, largest=replace(found.largest, converged=False))
    assert table([stopped]).column("residual")[0].endswith(", not converged")


# Written out.


def test_written_is_the_same_matrix(given, truth):
    found = Written(hessian(given))
    v = torch.randn(39, 3, dtype=torch.float64)
    assert torch.allclose(found @ v, truth["H"] @ v)
    assert torch.allclose(found.dense(), truth["H"])
    assert torch.allclose(found.diagonal(), truth["H"].diagonal())
    values = torch.linalg.eigvalsh(truth["H"]).flip(0)
    assert torch.allclose(found.exact_eigenvalues(), values)
    for smallest, expected in ((False, values[:5]), (True, values[-5:])):
        pairs = found.eigenvalues(5, smallest=smallest)
        assert torch.allclose(pairs.values, expected)
        assert torch.allclose(truth["H"] @ pairs.vectors, pairs.vectors * pairs.values)
        assert pairs.converged
        assert float(pairs.residuals.max()) < 1e-12
    spectrum = found.spectrum()
    assert float(spectrum.trace(lambda x: x.square())) == pytest.approx(float(values.norm() ** 2))
    assert spectrum.quadrature.exact


def test_written_knows_its_layers(given, truth):
    layers = Written(hessian(given)).layers()
    for one, index in zip(layers.values(), blocks(), strict=True):
        part = index.flatten()
        assert torch.allclose(one.dense(), truth["H"][part[:, None], part])


def test_what_is_large_or_closed_stays_as_it_is(given, monkeypatch):
    closed = ggn(given, structure=Kronecker())
    assert dense_cache.written(closed) is closed
    monkeypatch.setattr(dense_cache, "SMALL", 10)
    free = ggn(given)
    assert dense_cache.written(free) is free
