"""Blocks of a matrix by layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dense_matrices import Dense, network, ready
from natgrad import Kronecker
from natgrad import operators as ops
from natgrad.curvature.losses import CrossEntropy
from natgrad.errors import SettingError
from natgrad.operators import block_norms, cross_block, requirements
from natgrad.operators.layer_blocks import indices
from oracles import close
from unit.operators.small_problems import known, randn, says
from unit.operators.test_outer import Bare, plain

NETWORKS = ("mlp", "cnn", "transformer")


def hessian(name):
    dense = network(name)
    loss = CrossEntropy(class_axis=-1) if name == "transformer" else F.cross_entropy
    return dense, ops.hessian(dense.model, loss, (*dense.inputs, dense.targets))


@pytest.mark.parametrize("name", NETWORKS)
def test_where_layers_lie(name):
    dense, h = hessian(name)
    found = indices(h)
    assert list(found) == list(dense.layers)
    assert all(torch.equal(found[k], dense.layers[k].flatten()) for k in found)


def test_parameters_that_belong_to_no_layer():
    x, y = plain()
    model = ready(Bare())
    dense = Dense(model, F.cross_entropy, (x,), y)
    g = ops.ggn(model, F.cross_entropy, (x, y))
    layers = g.layers()
    assert list(layers) == ["layer", "scale", "spare"]
    for name in ("scale", "spare"):
        part = dense.slices[name]
        assert close(layers[name].dense(), dense.G[part, part])


def test_a_model_without_layers():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            return x @ self.w.T

    x, y = plain()
    model = ready(Alone())
    g = ops.ggn(model, F.cross_entropy, (x, y))
    assert close(g.layers()["w"].dense(), Dense(model, F.cross_entropy, (x,), y).G)


@pytest.mark.parametrize("name", NETWORKS)
def test_cross_blocks(name):
    dense, h = hessian(name)
    names = list(dense.layers)
    for rows, columns in ((names[0], names[-1]), (names[-1], names[1]), (names[1], names[1])):
        i, j = dense.layers[rows].flatten(), dense.layers[columns].flatten()
        assert close(cross_block(h, rows, columns), dense.H[i][:, j])


@pytest.mark.parametrize("name", NETWORKS)
def test_norms_of_blocks(name):
    dense, h = hessian(name)
    names, norms = block_norms(h)
    assert names == list(dense.layers)
    expected = torch.stack(
        [
            torch.stack(
                [dense.H[i.flatten()][:, j.flatten()].norm() for j in dense.layers.values()]
            )
            for i in dense.layers.values()
        ]
    )
    assert close(norms, expected)
    assert float(norms.norm()) == pytest.approx(float(dense.H.norm()), rel=1e-9)


def test_estimated_norms_of_blocks():
    """Unbiased in the square: the mean over seeds is right within its error."""
    _, h = hessian("mlp")
    _, exact = block_norms(h)
    each = torch.stack([block_norms(h, samples=16, seed=seed)[1].square() for seed in range(40)])
    assert torch.equal(each[0], each[0].T)
    error = each.std(0) / len(each) ** 0.5
    assert ((each.mean(0) - exact.square()).abs() <= 4 * error + 1e-12).all()
    assert not torch.equal(each[0], each[1])


def test_layers_of_a_structure():
    """In closed form as well."""
    own = known("classes")
    g = ops.ggn(own.problem(), structure=Kronecker())
    for name, block in g.layers().items():
        assert block.closed
        where = own.dense.layers[name].flatten()
        truth = g.dense()[where][:, where]
        v, damping = randn(len(truth)), 0.3
        damped = truth + damping * torch.eye(len(truth), dtype=truth.dtype)
        assert close(damped @ block.solve(v, damping), v)
        assert float(block.logdet(damping)) == pytest.approx(float(damped.logdet()), rel=1e-9)


class TestMessages:
    def test_a_layer_of_a_layer(self):
        own = known("classes")
        layer = ops.hessian(own.problem()).layers()["0"]
        message = "Hessian, 0 is not made of layers: take those of the whole matrix."
        says(SettingError, message, layer.layers)
        says(SettingError, message, block_norms, layer)

    def test_a_dict_for_a_layer(self):
        own = known("classes")
        layer = ops.hessian(own.problem()).layers()["0"]
        says(
            SettingError,
            "Hessian, 0 is over one matrix, not over named parameters: give a tensor [24] or "
            "[24, k].",
            lambda: layer @ {"weight": torch.zeros(4, 5), "bias": torch.zeros(4)},
        )

    def test_no_such_layer(self):
        own = known("classes")
        says(
            SettingError,
            "There is no layer '1' in Hessian: give one of ['0', '2', '4'].",
            cross_block,
            ops.hessian(own.problem()),
            "0",
            "1",
        )

    def test_too_many_columns(self, monkeypatch):
        own = known("classes")
        h = ops.hessian(own.problem())
        monkeypatch.setattr(requirements, "LARGEST", 2**10)
        says(
            SettingError,
            "What the block needs has 59 x 24 entries, 0.0 GiB, above the limit of 0 GiB: take "
            "smaller layers.",
            cross_block,
            h,
            "2",
            "0",
        )
        says(
            SettingError,
            "The columns of '0' has 59 x 24 entries, 0.0 GiB, above the limit of 0 GiB: give "
            "samples=64.",
            block_norms,
            h,
        )
