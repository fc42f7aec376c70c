"""Gradient-norm regularisation: a quadratic in closed form, and networks by finite differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.schemes import GradientNorm, penalized
from training_loops import MLP

H = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
B = torch.tensor([1.0, -1.0], dtype=torch.float64)


def quadratic(w):
    return 0.5 * w @ H @ w - B @ w


def parameter(*values):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_a_quadratic_by_a_double_backward_pass():
    w = parameter(3.0, 1.0)
    loss = penalized(quadratic(w), [w], tau=0.8)
    g = H @ w.detach() - B
    # 7.5 and the gradient [5.5, 3.5]: 7.5 + 0.2 · 42.5.
    assert float(loss.detach()) == pytest.approx(9 + 1.5 + 0.5 - 2 + 0.2 * 42.5)
    assert g.tolist() == [5.5, 3.5]
    loss.backward()
    torch.testing.assert_close(w.grad, g + 0.4 * H @ g, rtol=1e-14, atol=0)


@pytest.mark.parametrize("h", [1e-3, 0.01, 1.0])
def test_a_quadratic_by_two_passes(h):
    """Whose differences are exact."""
    w = parameter(3.0, 1.0)
    scheme = GradientNorm([w], tau=0.8, h=h)
    quadratic(w).backward()
    with scheme.perturbed():
        quadratic(w).backward()
    g = H @ w.detach() - B
    torch.testing.assert_close(w.grad, g + 0.4 * H @ g, rtol=1e-12, atol=0)
    assert w.tolist() == [3.0, 1.0]


def test_both_on_a_network():
    """The second is off by what is of order h."""
    x, y = MLP.batch()
    model = MLP.model().double()
    penalized(F.cross_entropy(model(x.double()), y), model.parameters(), tau=2.0).backward()
    exact = [p.grad.clone() for p in model.parameters()]
    errors = []
    for h in (1e-2, 1e-3, 1e-4):
        model.zero_grad()
        scheme = GradientNorm(model.parameters(), tau=2.0, h=h)
        F.cross_entropy(model(x.double()), y).backward()
        plain = [p.grad.clone() for p in model.parameters()]
        with scheme.perturbed():
            F.cross_entropy(model(x.double()), y).backward()
        pairs = list(zip(model.parameters(), exact, strict=True))
        errors.append(float(torch.stack([(p.grad - g).norm() for p, g in pairs]).norm()))
    change = float(torch.stack([(g - p).norm() for g, p in zip(exact, plain, strict=True)]).norm())
    assert errors[0] < 0.05 * change
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.1)
    assert errors[2] == pytest.approx(errors[0] / 100, rel=0.1)


def test_the_double_backward_pass_by_differences_of_the_loss():
    x, y = MLP.batch()
    model = MLP.model().double()
    (weight, *_) = parameters = list(model.parameters())

    def loss():
        return penalized(F.cross_entropy(model(x.double()), y), parameters, tau=2.0)

    loss().backward()
    found = float(weight.grad[0, 0])
    values = []
    for shift in (1e-5, -1e-5):
        with torch.no_grad():
            weight[0, 0] += shift
        values.append(float(loss().detach()))
        with torch.no_grad():
            weight[0, 0] -= shift
    assert found == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_nothing_to_regularise():
    w = parameter(3.0, 1.0)
    scheme = GradientNorm([w], tau=0.0)
    quadratic(w).backward()
    g = w.grad.clone()
    with scheme.perturbed():
        quadratic(w).backward()
    assert torch.equal(w.grad, g)


def test_parameters_that_take_no_part():
    w, unused, frozen = parameter(3.0, 1.0), parameter(1.0), parameter(1.0).requires_grad_(False)
    loss = penalized(quadratic(w), [w, unused, frozen], tau=0.8)
    assert float(loss.detach()) == pytest.approx(9 + 0.2 * 42.5)


def test_errors():
    w = parameter(3.0, 1.0)
    with pytest.raises(SettingError, match="tau is -1 but must be finite and at least 0: pass su"):
        penalized(quadratic(w), [w], -1)
    with pytest.raises(SettingError) as error:
        penalized(quadratic(w).detach(), [w], 1)
    assert str(error.value) == (
        "penalized() was given 1 parameters with requires_grad and a loss that has not a graph, "
        "but needs both: pass model.parameters() and the loss before its backward()."
    )
    with pytest.raises(SettingError, match=r"was given 0 parameters with requires_grad and a loss"):
        penalized(quadratic(w), [], 1)
    with pytest.raises(SettingError) as error:
        penalized(quadratic(w), [parameter(1.0)], 1)
    assert str(error.value) == (
        "penalized() was given a loss that depends on none of the parameters: pass those of the "
        "model it was computed with."
    )
    with pytest.raises(
        SettingError, match=r"GradientNorm.tau is -1 but must be finite and at leas"
    ):
        GradientNorm([w], tau=-1)
    with pytest.raises(
        SettingError, match=r"GradientNorm.h is 0 but must be finite and above 0: p"
    ):
        GradientNorm([w], tau=1, h=0)
