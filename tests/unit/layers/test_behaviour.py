"""Modules of other libraries get the layers of what they compute, or a reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import own_modules as own
from natgrad import KFAC
from natgrad.layers import layers_of
from natgrad.layers.behaviour import MatrixProduct
from natgrad.layers.conv import Conv
from natgrad.layers.linear import Linear
from natgrad.layers.norm import ChannelNorm, LayerNorm, RMSNorm


def only(module):
    found = layers_of("it", module)
    assert isinstance(found, list), found
    (layer,) = found
    return layer


@pytest.mark.parametrize(
    ("module", "kind", "shape", "eps"),
    [
        (own.RootMeanSquare(4), RMSNorm, (1, 4, 1), 1e-6),
        (own.RootMeanSquare(4, 1e-12), RMSNorm, (1, 4, 1), 1e-12),
        (own.OnePlusWeight(5), RMSNorm, (1, 5, 1), 0.01),
        (own.FunctionalNorm(4, bias=True), LayerNorm, (1, 4, 2), 1e-5),
        (own.FunctionalNorm(4, bias=False), LayerNorm, (1, 4, 1), 1e-5),
        (own.ChannelsNorm(4, eps=1e-6), ChannelNorm, (1, 4, 2), 1e-6),
        (own.Product(3, 4), MatrixProduct, (1, 4, 3), None),
        (own.Product(4, 4), MatrixProduct, (1, 4, 4), None),
        (own.RightProduct(3, 4), MatrixProduct, (1, 4, 4), None),
        (own.CastingLinear(3, 4), Linear, (1, 4, 4), None),
        (own.SamePadding(3, 4, 1, stride=1), Conv, (1, 4, 4), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_it_computes_decides(module, kind, shape, eps):
    layer = only(module)
    assert type(layer) is kind
    assert layer.shape == shape
    assert layer.module is module
    if eps is not None:
        assert layer.eps == pytest.approx(eps, rel=2e-3, abs=2e-16)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (own.SquaredLinear(3, 4), "something else than that of Linear"),
        (nn.PReLU(4), "no layer is registered for PReLU"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_anything_else_has_a_reason(module, reason):
    assert reason in layers_of("it", module)


def test_a_class_with_a_name_of_torchs_is_told_apart():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            return (x @ self.weight).relu()

    reason = layers_of("it", Linear())
    assert reason.startswith("no layer is registered for ")
    assert reason.endswith("test_a_class_with_a_name_of_torchs_is_told_apart.<locals>.Linear")


def test_trying_changes_nothing():
    """Neither running statistics, nor random numbers, nor hooks see it."""

    class Counting(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) + 0 * torch.rand(())

    module = Counting(4)
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    before = {name: t.clone() for name, t in module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert isinstance(layers_of("it", module), list)
    assert torch.equal(torch.rand(3), expected)
    assert not seen
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


KNOWN = [
    (own.RootMeanSquare(4), nn.RMSNorm(4, eps=1e-6), (4,)),
    (own.FunctionalNorm(4, bias=True), nn.LayerNorm(4), (4,)),
    (own.FunctionalNorm(4, bias=False), nn.LayerNorm(4, bias=False), (3, 4)),
    (own.Product(4, 4), nn.Linear(4, 4, bias=False), (3, 4)),
    (own.CastingLinear(4, 4), nn.Linear(4, 4), (4,)),
]


@pytest.mark.parametrize(
    ("module", "known", "shape"), KNOWN, ids=[type(m).__name__ for m, _, _ in KNOWN]
)
def test_gradients_are_those_of_the_known_module(module, known, shape):
    x = torch.randn(6, *shape, dtype=torch.float64)
    found = []
    for inner in (module, known):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), inner).double()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p))
        kfac = KFAC(model, kl_clip=None, damping=0.1)
        assert not kfac.uncovered
        F.softplus(model(x)).flatten(1).sum(1).mean().backward()
        kfac.step()
        found.append([p.grad.flatten() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_norms_of_hugging_face():
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    for module, eps in [
        (gemma.GemmaRMSNorm(4, eps=1e-5), 1e-5),
        (llama.LlamaRMSNorm(4), 1e-6),
        (t5.T5LayerNorm(4), 1e-6),
    ]:
        layer = only(module)
        assert isinstance(layer, RMSNorm)
        assert layer.eps == eps


def test_parametrizations_are_named():
    columns = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4), dim=1)
    turned = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    uncovered = KFAC(nn.Sequential(columns, turned), kl_clip=None).uncovered
    assert set(uncovered) == {
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
        "1.parametrizations.weight.original",
    }
    for each in uncovered.values():
        assert each.reason == "a weight is computed from it, and KFAC steps weights themselves"
