"""Several matrices in one weight: each as a layer of its own would be."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad import EKFAC, KFAC, Cholesky, Full, Kronecker, NaturalMuon, UnitWise
from natgrad.errors import CoverageError
from natgrad.layers import Interleaved, register
from natgrad.layers.linear import Linear, TransposedLinear
from natgrad.layers.row_parts import parts_of

SIZES = (4, 3, 5)  # unequal ones, as with fewer keys than queries


@register("test_row_parts.Stored")
class StoredLayer(TransposedLinear):
    """A weight that is stored as inputs by outputs."""


class Stored(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.nx, self.nf = inputs, outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


Stored.__module__, Stored.__qualname__ = "test_row_parts", "Stored"


class Fused(nn.Module):
    """Query, key and value in one, or three layers that do the same."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(6, sum(SIZES))
        self.parts, self.c_attn = None, None
        if kind == "apart":
            self.parts = nn.ModuleList(nn.Linear(6, size) for size in SIZES)
            for part, w, b in zip(
                self.parts, whole.weight.split(SIZES), whole.bias.split(SIZES), strict=True
            ):
                part.load_state_dict({"weight": w, "bias": b})
        else:
            self.c_attn = whole if kind == "linear" else Stored(6, sum(SIZES))
            if kind == "stored":
                state = {"weight": whole.weight.mT.contiguous(), "bias": whole.bias}
                self.c_attn.load_state_dict(state)
        self.double()

    def forward(self, x):
        if self.parts is None:
            q, k, v = self.c_attn(x).split(SIZES, -1)
        else:
            q, k, v = (part(x) for part in self.parts)
        return torch.cat([q.tanh(), k.sin(), v.square()], -1).mean(1)

    def flat(self, kind):
        if self.parts is not None:
            weight = torch.cat([part.weight for part in self.parts])
            return torch.cat([weight, torch.cat([p.bias for p in self.parts])[:, None]], 1)
        weight = self.c_attn.weight.mT if kind == "stored" else self.c_attn.weight
        return torch.cat([weight, self.c_attn.bias[:, None]], 1)


def trained(kind, make, **more):
    model = Fused(kind)
    split = {} if kind == "apart" else {"split": {"*c_attn": SIZES}}
    stepping = make(model, **split, **more)
    for step in range(4):
        x = torch.randn(5, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).square().sum(1).mean().backward()
        for one in stepping:
            one.step()
    return model.flat(kind), stepping[0]


def with_sgd(model, **settings):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    return KFAC(model, sgd, update_every=2, refresh_every=2, **settings), sgd


@pytest.mark.parametrize("kind", ["linear", "stored"])
@pytest.mark.parametrize("structure", [Kronecker(), EKFAC(), UnitWise(), Full()], ids=repr)
def test_is_what_separate_layers_are(kind, structure):
    expected, _ = trained("apart", with_sgd, structure=structure, factor_decay=0.5)
    found, kfac = trained(kind, with_sgd, structure=structure, factor_decay=0.5)
    assert (found - expected).abs().max() <= 1e-10
    assert [b.name for b in kfac.blocks] == ["c_attn.0", "c_attn.1", "c_attn.2"]
    assert not kfac.uncovered


@pytest.mark.parametrize("kind", ["linear", "stored"])
def test_so_are_spectral_steps(kind):
    def made(model, **more):
        return (NaturalMuon(model, inverse=Cholesky(), **more),)

    expected, _ = trained("apart", made)
    found, optimizer = trained(kind, made)
    assert (found - expected).abs().max() <= 1e-10
    # The backward pass comes to the last one first.
    assert optimizer.kfac.blocks[1].shares_input_with is optimizer.kfac.blocks[2]


def named(name, inputs, outputs):
    return nn.ModuleDict({"block": nn.ModuleDict({name: nn.Linear(inputs, outputs)})})


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (named("c_attn", 4, 12), [4, 4, 4]),
        (named("qkv", 4, 12), [4, 4, 4]),
        (named("gate_up_proj", 4, 10), [5, 5]),
        (named("c_attn", 4, 16), [16]),  # no three squares: fewer keys than queries
        (named("inner", 4, 12), [12]),
    ],
)
def test_fused_projections_are_known_by_their_names(model, rows):
    assert [b.shape[1] for b in KFAC(model, kl_clip=None).blocks] == rows
    assert [b.shape[1] for b in KFAC(model, kl_clip=None, split={}).blocks] == [sum(rows)]


def test_who_splits_one_layer_leaves_the_names_of_others_alone():
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12), "other": nn.Linear(4, 6)})
    kfac = KFAC(model, kl_clip=None, split={"other": (2, 4)})
    assert [b.shape[1] for b in kfac.blocks] == [12, 2, 4]


@pytest.mark.parametrize("how", [SIZES, Interleaved((1, 2, 1), 3)], ids=repr)
@pytest.mark.parametrize("kind", ["linear", "stored"])
def test_parts_say_where_they_are_in_each_parameter(kind, how):
    """Each number of a parameter is in the box of one part, which holds what the part takes."""
    module = Fused(kind).c_attn
    layer = (Linear if kind == "linear" else StoredLayer)("c_attn", module)
    parts = parts_of(layer, {"c_attn": how})
    assert len(parts) == 3
    for parameter in (module.weight, module.bias):
        found = torch.zeros_like(parameter)
        for part in parts:
            axis, unit = part.unfolding(parameter) or (0, len(parameter))
            box = tuple(slice(*ends) for ends in part.region(parameter))
            if part.turns == 1:
                seen, own = found, parameter
            else:
                seen, own = (t.unflatten(axis, (-1, unit)) for t in (found, parameter))
            seen[box] += 1
            of_weight = parameter is module.weight
            taken = part.split(parameter) if of_weight else part.as_bias(parameter)
            inside = own[box]
            if of_weight and kind == "stored":
                inside = inside.movedim(0, -1)
            assert torch.equal(taken.reshape(-1), inside.reshape(-1))
        assert bool((found == 1).all())


def test_what_does_not_fit_is_a_sentence():
    model = nn.Sequential(nn.Linear(4, 12), nn.Conv2d(1, 2, 3))
    with pytest.raises(CoverageError, match=r"split cuts Linear '0' into \(4, 4\) rows, 8 in all"):
        KFAC(model, kl_clip=None, split={"0": (4, 4)})
    with pytest.raises(CoverageError, match="only linear layers have rows that can be split"):
        KFAC(model, kl_clip=None, split={"1": (1, 1)})
    with pytest.raises(CoverageError, match="split has '7', which matches no module"):
        KFAC(model, kl_clip=None, split={"7": (1, 1)})
    tied = nn.Sequential(nn.Linear(4, 12), nn.Linear(4, 12))
    tied[1].weight = tied[0].weight
    with pytest.raises(CoverageError, match="shares its weight with a layer whose rows are split"):
        KFAC(tied, kl_clip=None, split={"0": (4, 4, 4)})
    assert natgrad.NaturalMuon(tied)
