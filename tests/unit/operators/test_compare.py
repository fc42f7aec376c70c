"""How far one matrix is from another."""

import pytest
import torch

from natgrad import Diagonal, Full, Kronecker
from natgrad import operators as ops
from natgrad.operators import base, compare, cosine
from oracles import close
from unit.operators.small_problems import known, randn


@pytest.mark.parametrize("structure", [None, Full(), Kronecker(), Diagonal()], ids=repr)
def test_relative_error(structure):
    own = known("classes")
    g, h = ops.ggn(own.problem(), structure=structure), ops.hessian(own.problem())
    found = compare(g, h)
    expected = float((g.dense() - own.dense.H).norm() / own.dense.H.norm())
    assert float(found) == pytest.approx(expected, rel=1e-9)
    assert found.standard_error == 0.0
    assert found.method.startswith("exact")
    assert float(compare(g, g)) == 0.0


def test_estimated_error(monkeypatch):
    """Of larger matrices, with its own standard error."""
    own = known("classes")
    g, h = ops.ggn(own.problem(), structure=Diagonal()), ops.hessian(own.problem())
    exact = float(compare(g, h))
    monkeypatch.setattr(base, "SMALL", 1)
    monkeypatch.setattr(
        base.traces,
        "squared_norm",
        lambda *args, f=base.traces.squared_norm, **kw: f(*args, 40, **kw),
    )
    found = compare(g, h)
    assert 0 < found.standard_error < exact
    assert abs(float(found) - exact) < 4 * found.standard_error
    assert found.products == 80


def test_a_matrix_of_zeros():
    """From which nothing but zeros is at a finite distance."""
    own = known("classes")
    g = ops.ggn(own.problem())
    zero = 0.0 * g
    assert float(compare(zero, zero)) == 0.0
    assert float(compare(g, zero)) == float("inf")
    assert float(compare(zero, g)) == pytest.approx(1.0)


@pytest.mark.parametrize("structure", [None, Full(), Kronecker()], ids=repr)
def test_angle_of_solved_vectors(structure):
    own = known("classes")
    g, c = ops.ggn(own.problem()), ops.ggn(own.problem(), structure=structure)
    v, damping = own.problem().gradient(), 0.1
    eye = damping * torch.eye(g.size, dtype=torch.float64)
    a = torch.linalg.solve(own.dense.G + eye, v)
    b = torch.linalg.solve(c.dense() + eye, v)
    expected = float(a @ b / (a.norm() * b.norm()))
    assert cosine(g, c, v, damping) == pytest.approx(expected, abs=1e-8)
    assert cosine(g, g, randn(g.size), damping) == pytest.approx(1.0)
    assert cosine(g, c, torch.zeros_like(v), damping) == 1.0
    assert close(g.solve(v, damping), a, 1e-8)
