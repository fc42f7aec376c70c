"""Operators made of others; their values are in the contract."""

import numpy as np
import pytest
import torch

from natgrad import Kronecker
from natgrad import operators as ops
from natgrad.errors import SettingError
from oracles import close
from unit.operators.small_problems import known, randn, says


def test_scalars_of_all_kinds():
    own = known("classes")
    g = ops.ggn(own.problem())
    v = randn(g.size)
    for two in (2, 2.0, np.float64(2), torch.tensor(2.0), g.trace() * 0 + 2):
        assert close((two * g) @ v, 2 * (own.dense.G @ v))
        assert close((g * two) @ v, 2 * (own.dense.G @ v))


def test_kinds_and_signs():
    own = known("classes")
    h, g = ops.hessian(own.problem()), ops.ggn(own.problem())
    assert repr(h - 0.5 * g) == "<Hessian + -0.5 GGN of 59 parameters>"
    assert (g + g).definite
    assert (2 * g).definite
    assert not (g - g).definite
    assert not (-1 * g).definite
    assert not (g + h).definite


def test_parts_of_a_sum():
    """Are sums of parts, also of a structure and a whole matrix."""
    own = known("classes")
    g, k = ops.ggn(own.problem()), ops.ggn(own.problem(), structure=Kronecker())
    truth = own.dense.blocks(own.dense.G - own.dense.kronecker("G", "expand"))
    found = (g - k).layers()
    assert all(close(found[name].dense(), block) for name, block in truth.items())
    pieces = {name: g.layers()[name] - k.layers()[name] for name in truth}
    assert all(close(pieces[name].dense(), block) for name, block in truth.items())


@pytest.mark.parametrize("operation", ["__add__", "__sub__"])
def test_of_different_parameters(operation):
    own = known("classes")
    one, two = ops.ggn(own.problem()), ops.hessian(own.problem(parameters="0.*"))
    says(
        SettingError,
        "GGN has 59 parameters and Hessian 24, so they cannot be added: take matrices of the same "
        "ones.",
        getattr(one, operation),
        two,
    )


def test_different_parameters_of_equal_number():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double()
    data = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    one, other = (
        ops.ggn(model, torch.nn.functional.cross_entropy, data, parameters=name)
        for name in ("0.*", "1.*")
    )
    says(
        SettingError,
        "GGN and GGN are over different parameters, so they cannot be added: take matrices of the "
        "same ones.",
        lambda: one + other,
    )
