"""TIC of regressions, against formulas in closed form and against the loss on other data."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.measures import Signs, Subset, tic
from natgrad.operators import Problem, fisher, ggn, hessian
from natgrad.structures import Diagonal, Full, Kronecker
from unit.measures.brute_force import DTYPE, Brute, batches, classified, minimised, network, refuses


def logistic(n=40, inputs=3):
    x = torch.randn(n, inputs, dtype=DTYPE)
    y = (x[:, :1] + torch.randn(n, 1, dtype=DTYPE) > 0).to(DTYPE)
    loss = F.binary_cross_entropy_with_logits
    return minimised(nn.Linear(inputs, 1, bias=False, dtype=DTYPE), loss, x, y), x, y


class TestLogisticRegression:
    @pytest.mark.parametrize("matrix", [hessian, ggn, fisher])
    @pytest.mark.parametrize("damping", [0.0, 0.3])
    def test_is_the_formula(self, matrix, damping):
        model, x, y = logistic()
        p = model(x).sigmoid().detach()
        H = (x * p * (1 - p)).T @ x / 40 + damping * torch.eye(3, dtype=DTYPE)
        C = (x * (p - y).square()).T @ x / 40
        trace = float(torch.linalg.solve(H, C).trace())
        loss = float(F.binary_cross_entropy_with_logits(model(x).detach(), y))
        data = batches(x, y, 7, 23, 10)
        found = tic(model, F.binary_cross_entropy_with_logits, data, matrix=matrix, damping=damping)
        assert float(found.trace) == pytest.approx(trace, rel=1e-9)
        assert found.loss == pytest.approx(loss, rel=1e-12)
        assert float(found.penalty) == pytest.approx(trace / 40, rel=1e-9)
        assert float(found) == float(found.value) == pytest.approx(loss + trace / 40, rel=1e-9)

    def test_by_conjugate_gradients(self, monkeypatch):
        model, x, y = logistic()
        problem = Problem(model, F.binary_cross_entropy_with_logits, (x, y))
        dense = tic(problem)
        monkeypatch.setattr(sys.modules[tic.__module__], "SMALL", 0)
        assert float(tic(problem).trace) == pytest.approx(float(dense.trace), rel=1e-8)


class TestLinearRegression:
    def test_of_a_true_model_is_akaikes_criterion(self):
        """Of variance 1/2, for which the square loss is a likelihood."""
        n, size = 40_000, 6
        x = torch.randn(n, size, dtype=DTYPE)
        w = torch.randn(1, size, dtype=DTYPE)
        y = x @ w.T + 0.5**0.5 * torch.randn(n, 1, dtype=DTYPE)
        model = nn.Linear(size, 1, bias=False, dtype=DTYPE)
        with torch.no_grad():
            model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
        found = tic(model, F.mse_loss, (x, y))
        assert float(found.trace) == pytest.approx(size, rel=0.03)
        # In units of the loss: noise of three times the variance is three times the penalty.
        scaled = nn.Linear(size, 1, bias=False, dtype=DTYPE)
        with torch.no_grad():
            scaled.weight.copy_(model.weight * 3**0.5)
        larger = tic(scaled, F.mse_loss, (x, y * 3**0.5))
        assert float(larger.trace) == pytest.approx(3 * float(found.trace), rel=1e-9)

    def test_is_the_loss_on_other_data_where_the_model_is_wrong(self):
        """Noise that grows with the input, of which Akaike's criterion knows nothing.

        For normal inputs the risk of weights ``w`` exceeds that of the true ones by ``|w - w*|²``.
        """
        n, size, draws = 200, 4, 300
        true = torch.ones(1, size, dtype=DTYPE)
        gaps, penalties, naive = [], [], []
        for _ in range(draws):
            x = torch.randn(n, size, dtype=DTYPE)
            y = x @ true.T + x[:, :1] * torch.randn(n, 1, dtype=DTYPE)
            model = nn.Linear(size, 1, bias=False, dtype=DTYPE)
            with torch.no_grad():
                model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
            found = tic(model, F.mse_loss, (x, y))
            # Less what the losses of the true weights differ by, which is none on average.
            excess = float((model.weight.detach() - true).square().sum())
            gaps.append(excess + float(F.mse_loss(x @ true.T, y)) - found.loss)
            penalties.append(float(found.penalty))
            naive.append(2 * found.loss * size / n)
        gap, penalty, aic = (torch.tensor(each) for each in (gaps, penalties, naive))
        error = float((gap - penalty).std()) / draws**0.5
        bias = 0.07 * float(gap.mean())  # of order 1/n
        assert abs(float((gap - penalty).mean())) < 3 * error + bias
        assert float((gap - aic).mean()) > 3 * error + bias


def trained(n=30):
    x, y = classified(n, 4, 3)
    return network(4, 5, 3), x, y


class TestMatrices:
    def test_structures_are_solved_in_closed_form(self):
        model, x, y = trained()
        problem = Problem(model, F.cross_entropy, (x, y))
        C = Brute(model, F.cross_entropy, x, y).second_moment()
        for structure in (Kronecker(), Diagonal(), Full()):
            operator = ggn(problem, structure=structure)
            dense = operator.dense() + 0.1 * torch.eye(len(C), dtype=DTYPE)
            found = tic(problem, matrix=operator, damping=0.1)
            assert float(found.trace) == pytest.approx(
                float(torch.linalg.solve(dense, C).trace()), rel=1e-9
            )

    @pytest.mark.parametrize("by", [Signs(300), Subset(20)])
    def test_estimates(self, by):
        model, x, y = trained()
        problem = Problem(model, F.cross_entropy, (x, y))
        exact = tic(problem, matrix=ggn, damping=0.1)
        found = tic(problem, matrix=ggn, damping=0.1, by=by)
        error = found.trace.standard_error
        assert 0 < error < 0.2 * float(exact.trace)
        assert abs(float(found.trace) - float(exact.trace)) < 4 * error
        assert found.value.standard_error == pytest.approx(error / 30)

    def test_some_parameters(self):
        model, x, y = trained()
        brute = Brute(model, F.cross_entropy, x, y)
        part = slice(len(brute.theta) - 3, None)
        H = brute.ggn()[part, part] + 0.1 * torch.eye(3, dtype=DTYPE)
        C = brute.second_moment()[part, part]
        found = tic(model, F.cross_entropy, (x, y), parameters="2.bias", matrix=ggn, damping=0.1)
        assert float(found.trace) == pytest.approx(
            float(torch.linalg.solve(H, C).trace()), rel=1e-9
        )


def test_prints_a_line():
    model, x, y = logistic()
    found = tic(model, F.binary_cross_entropy_with_logits, (x, y), damping=0.1)
    assert str(found) == (
        f"TIC {found.value} = loss {found.loss:.6g} + {found.penalty}: {found.trace} parameters "
        "count (Hessian with damping 0.1), 40 samples"
    )


def test_refusals():
    model, x, y = trained()
    lowest = float(torch.linalg.eigvalsh(Brute(model, F.cross_entropy, x, y).hessian())[0])
    assert lowest < -1e-3
    with refuses(
        f"Hessian with damping 0 has the eigenvalue {lowest:.3g} and so no minimum that TIC could "
        "be of: give more damping, or matrix=natgrad.ggn."
    ):
        tic(model, F.cross_entropy, (x, y))
    with refuses("damping is -1 but must be finite and at least 0: pass such a number."):
        tic(model, F.cross_entropy, (x, y), damping=-1)
