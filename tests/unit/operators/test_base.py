"""What operators say about vectors and numbers that do not fit, and what they estimate."""

import sys

import numpy as np
import pytest
import torch

from natgrad import Diagonal, Kronecker
from natgrad import operators as ops
from natgrad.errors import ConvergenceError, SettingError
from natgrad.operators import base
from natgrad.operators.estimators import LOBPCG, Hutchinson, HutchPP, Lanczos, XTrace
from oracles import close
from unit.operators.small_problems import known, randn, says


def operators():
    problem = known("classes").problem()
    return ops.hessian(problem), ops.ggn(problem), ops.ggn(problem, structure=Kronecker())


class TestVectors:
    @pytest.mark.parametrize("shape", [(58,), (60,), (1, 59), (59, 2, 1), ()])
    def test_shapes(self, shape):
        v = torch.zeros(shape)
        message = (
            f"The operator has 59 parameters but got a tensor of shape {list(shape)}: give [59], "
            "[59, k] or a dict by name."
        )
        for operator in operators():
            says(SettingError, message, lambda o=operator: o @ v)
            says(SettingError, message, operator.solve, v, 0.1)
            says(SettingError, message, operator.power, v, 0.5, 0.1)

    @pytest.mark.parametrize("v", [[0.0] * 59, np.zeros(59), None, 3.0], ids=lambda v: str(type(v)))
    def test_kinds(self, v):
        for operator in operators():
            says(
                SettingError,
                f"The operator got an object of type {type(v).__name__} but takes tensors, or a "
                "dict of them by parameter name: convert it.",
                lambda o=operator: o @ v,
            )

    def test_dicts(self):
        for operator in operators():
            named = operator.space.named(randn(59))
            named.pop("0.bias")
            says(
                SettingError,
                "A vector of 6 parameters was given as a dict that lacks '0.bias': give a tensor "
                "for each of operator.space.names.",
                lambda o=operator, v=named: o @ v,
            )

    def test_no_columns(self):
        for operator in operators():
            assert (operator @ torch.zeros(59, 0)).shape == (59, 0)

    def test_vectors_are_left_as_they_were(self):
        for operator in operators():
            v = randn(59)
            before = v.clone()
            operator @ v
            operator.solve(v, 3.0)
            operator.power(v, 0.5, 3.0)
            assert torch.equal(v, before)


class TestNumbers:
    @pytest.mark.parametrize("k", [0, 60, -1, 2.0, True])
    def test_of_eigenvalues(self, k):
        for operator in operators():
            says(
                SettingError,
                f"k is {k!r} but must be a whole number from 1 to 59, the number of parameters: "
                "give such a number.",
                operator.eigenvalues,
                k,
            )

    def test_a_determinant_that_has_no_logarithm(self):
        own = known("classes")
        h, g, _ = operators()
        lowest = float(torch.linalg.eigvalsh(own.dense.H)[0])
        says(
            SettingError,
            f"Hessian with damping 0.1 has the eigenvalue {lowest + 0.1:.3g}, so its determinant "
            "has no logarithm: give a larger damping.",
            h.logdet,
            0.1,
        )
        says(
            SettingError,
            "GGN with damping 0 has the eigenvalue 0, so its determinant has no logarithm: give a "
            "larger damping.",
            g.logdet,
        )

    def test_a_system_without_a_solution(self):
        own = known("classes")
        h = ops.hessian(own.problem())
        with pytest.raises(ConvergenceError) as caught:
            h.solve(randn(h.size))
        assert str(caught.value).startswith(
            "Solving with Hessian with damping 0 stopped at a relative residual of "
        )
        assert str(caught.value).endswith(
            ": give more damping, or a preconditioner to solve(), or take what cg() finds."
        )
        found = h.cg(randn(h.size))
        assert not found.converged
        assert "not positive definite" in found.method

    def test_a_preconditioner_that_iterates_itself(self):
        h, g, _ = operators()
        says(
            SettingError,
            "The preconditioner is <Hessian of 59 parameters>, which is solved with by iterating "
            "itself: give an operator with a structure, such as Kronecker().",
            lambda: g.solve(randn(59), 0.1, preconditioner=h),
        )

    def test_a_power_of_a_negative_number(self):
        own = known("classes")
        h = ops.hessian(own.problem())
        lowest = float(torch.linalg.eigvalsh(own.dense.H)[0])
        says(
            SettingError,
            f"Hessian with damping 0.1 has the eigenvalue {lowest + 0.1:.3g}, of which there is no "
            "power 0.5: give a larger damping.",
            h.power,
            randn(59),
            0.5,
            0.1,
        )


class TestScipy:
    def test_arrays_that_torch_does_not_take(self):
        own = known("classes")
        found = ops.ggn(own.problem()).to_scipy()
        v = randn(59).numpy()
        expected = own.dense.G.numpy() @ v
        fixed = v.copy()
        fixed.setflags(write=False)
        turned = v[::-1].copy()[::-1]
        strided = np.repeat(v, 2)[::2]
        for given in (fixed, turned, strided, v.astype(np.float32).astype(np.float64)):
            np.testing.assert_allclose(found @ given, expected, rtol=1e-5)
        np.testing.assert_allclose(found @ fixed, expected, rtol=1e-12)
        assert (found @ np.asfortranarray(np.ones((59, 3)))).shape == (59, 3)

    def test_without_scipy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
        g = ops.ggn(known("classes").problem())
        says(SettingError, "to_scipy() needs scipy: pip install scipy.", g.to_scipy)


class TestEstimates:
    """Within four of their own standard errors."""

    @pytest.mark.parametrize(
        "by", [Hutchinson(30, seed=2), HutchPP(30, seed=2), XTrace(30, seed=2)], ids=repr
    )
    def test_traces(self, by):
        own = known("classes")
        for operator, truth in (
            (ops.hessian(own.problem()), own.dense.H),
            (ops.ggn(own.problem()), own.dense.G),
        ):
            found = operator.trace(by=by)
            exact = float(truth.trace())
            assert abs(float(found) - exact) <= 4 * found.standard_error + 1e-9 * abs(exact)
            assert found.products == 30
            assert found.method

    def test_diagonals(self):
        own = known("classes")
        h = ops.hessian(own.problem())
        found = [h.estimated_diagonal(samples=40, seed=seed) for seed in range(50)]
        assert all(one.products == 40 for one in found)
        values = torch.stack([one.value for one in found])
        apart = values - own.dense.H.diagonal()
        errors = torch.stack([one.standard_error for one in found])
        assert (apart.mean(0).abs() <= 5 * errors.mean(0) / len(found) ** 0.5).all()
        ratio = apart.square().mean() / errors.square().mean()
        assert float(ratio) == pytest.approx(1.0, abs=0.1)  # as large as they say

    def test_norms(self, monkeypatch):
        own = known("classes")
        h = ops.hessian(own.problem())
        monkeypatch.setattr(base, "SMALL", 1)
        found = h.norm()
        assert float(found) == pytest.approx(float(own.dense.H.norm()), rel=1e-9)  # n products

    def test_determinants_and_powers_of_larger_matrices(self, monkeypatch):
        """By Lanczos, as for those that cannot be written down."""
        own = known("classes")
        g = ops.ggn(own.problem())
        v, damping = randn(g.size), 0.2
        exact, half = g.logdet(damping), g.power(v, 0.5, damping)
        monkeypatch.setattr(base, "SMALL", 1)
        found = g.logdet(damping, probes=2, steps=20)
        assert abs(float(found) - float(exact)) <= 5 * found.standard_error + 1e-9
        assert found.standard_error > 0
        assert close(g.power(v, 0.5, damping), half, 1e-6)

    def test_spectra(self):
        own = known("classes")
        h = ops.hessian(own.problem())
        found = h.spectrum()
        values = torch.linalg.eigvalsh(own.dense.H)
        assert float(found.trace(lambda x: x)) == pytest.approx(float(values.sum()), rel=1e-9)
        density = found.density()
        area = torch.trapezoid(density.values, density.grid)
        assert float(area) == pytest.approx(1.0, abs=1e-3)

    @pytest.mark.parametrize("smallest", [False, True])
    @pytest.mark.parametrize("by", [Lanczos(1e-9), LOBPCG(1e-9)], ids=repr)
    def test_eigenvalues(self, by, smallest):
        own = known("classes")
        h = ops.hessian(own.problem())
        values = torch.linalg.eigvalsh(own.dense.H).flip(0)
        found = h.eigenvalues(3, smallest=smallest, by=by)
        assert found.converged
        assert close(found.values, values[-3:] if smallest else values[:3], 1e-9)

    def test_a_preconditioned_eigensolver(self):
        own = known("classes")
        c = ops.ggn(own.problem(), structure=Kronecker())
        by = LOBPCG(1e-9, preconditioner=c, damping=1.0)
        found = ops.hessian(own.problem()).eigenvalues(2, smallest=True, by=by)
        assert close(found.values, torch.linalg.eigvalsh(own.dense.H).flip(0)[-2:], 1e-9)


def test_diagonals_some_at_a_time(monkeypatch):
    own = known("classes")
    h = ops.hessian(own.problem())
    monkeypatch.setattr(base, "_NUMBERS", 59 * 10)
    assert close(h.diagonal(), own.dense.H.diagonal())


def test_how_they_are_shown():
    h, g, k = operators()
    assert repr(h) == "<Hessian of 59 parameters>"
    assert repr(g) == "<GGN of 59 parameters>"
    assert repr(k) == "<GGN of 59 parameters as Kronecker(sharing='expand')>"
    assert repr(ops.fisher(h.problem)) == "<Fisher of 59 parameters>"
    assert repr(h.layers()["0"]) == "<Hessian, 0 of 24 parameters>"
    assert h.shape == (59, 59)
    assert h.definite is False
    assert g.definite is True
    assert ops.hessian(h.problem, structure=Diagonal()).definite is False
