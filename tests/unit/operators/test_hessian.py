"""The Hessian by differentiating twice, for every loss and kind of model."""

from importlib import import_module  # as the function has the name of its module

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dense_matrices import Dense, network, ready, uneven
from natgrad import operators as ops
from natgrad.curvature.losses import CrossEntropy
from oracles import close
from unit.operators.small_problems import CASES, case, known, log_cosh, randn
from unit.operators.test_outer import MODELS


@pytest.fixture(params=["at once", "one by one"])
def _width(request, monkeypatch):
    if request.param == "one by one":
        monkeypatch.setattr(import_module("natgrad.operators.hessian"), "_MADE", 1)


def check(operator, truth):
    v, m = randn(len(truth)), randn(len(truth), 3)
    for _ in range(2):  # what is kept is right as well
        assert close(operator @ v, truth @ v, 1e-12)
        assert close(operator @ m, truth @ m, 1e-12)
    assert close(operator.dense(), truth, 1e-12)
    assert close(operator.diagonal(), truth.diagonal(), 1e-12)


@pytest.mark.usefixtures("_width")
@pytest.mark.parametrize("name", CASES)
def test_losses(name):
    own = known(name)
    for data in ((own.x, own.y), own.cut):
        check(ops.hessian(own.model, own.loss, data), own.dense.H)


def test_a_loss_of_ones_own():
    own = known("own")
    check(ops.hessian(own.model, log_cosh, own.cut), own.dense.H)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    build, data, _ = MODELS[name]
    x, y = data()
    dense = Dense(ready(build()), F.cross_entropy, (x,), y)
    for given in ((x, y), uneven(x, y, (1, len(x) - 1))):
        check(ops.hessian(dense.model, F.cross_entropy, given), dense.H)


def test_fused_attention():
    """The default kernels know no second derivatives, so they are left for the maths."""
    dense = network("transformer")
    data = uneven(*dense.inputs, dense.targets)
    v = randn(dense.size, 2)
    assert close(ops.hessian(dense.model, CrossEntropy(class_axis=-1), data) @ v, dense.H @ v)


def test_frozen_and_chosen_parameters():
    own = case("classes")
    own.model[2].weight.requires_grad_(False)
    whole = Dense(own.model, own.mean, (own.x,), own.y)
    check(ops.hessian(own.model, own.loss, own.cut), whole.H)
    some = Dense(own.model, own.mean, (own.x,), own.y, lambda name: name.endswith("bias"))
    chosen = ops.hessian(own.model, own.loss, own.cut, parameters="*.bias")
    assert chosen.space.names == ("0.bias", "2.bias", "4.bias")
    check(chosen, some.H)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_changed_parameters_are_seen(cut, hidden):
    own = case("classes")
    h = ops.hessian(own.model, own.loss, own.cut if cut else (own.x, own.y))
    v = randn(h.size)
    before = h @ v
    with torch.no_grad():
        weight = own.model[0].weight
        (weight.data if hidden else weight).mul_(2)
    assert close(h @ v, own.dense.H @ v)
    assert not close(h @ v, before, 1e-3)


def test_parameters_of_which_the_loss_is_linear():
    """They have no second derivatives of their own, and there need not be any at all."""
    model = ready(nn.Linear(3, 1))
    x, y = randn(4, 3), torch.zeros(4, 1, dtype=torch.float64)

    def mean(f, y):
        return (f - y).mean()

    operator = ops.hessian(model, mean, (x, y))
    assert (operator.dense() == 0).all()
    assert float(operator.trace()) == 0.0
