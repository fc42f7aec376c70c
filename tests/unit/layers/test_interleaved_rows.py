"""Matrices whose rows follow each other in turn: each as a layer of its own would be."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from natgrad import EKFAC, KFAC, Cholesky, Full, Kronecker, NaturalMuon, UnitWise
from natgrad.errors import CoverageError, SettingError
from natgrad.kfac.ranks.block_specs import unfolded, view_of
from natgrad.layers import Interleaved
from unit.layers.test_row_parts import Stored

# How rows lie: rows of each part in a turn, and how many turns there are.
LAYOUTS = {
    "heads": (Interleaved(3, heads=2), (2, 2, 2), 2),
    "grouped": (Interleaved((4, 2, 2), heads=2), (4, 2, 2), 2),
    "rows": (Interleaved(2), (1, 1), 6),
}


def rows_of(layout):
    """Of each part the numbers of its rows."""
    _, sizes, turns = LAYOUTS[layout]
    numbers = torch.arange(turns * sum(sizes)).view(turns, -1)
    return [part.flatten() for part in numbers.split(sizes, 1)]


class Fused(nn.Module):
    """Parts in turn in one weight, or as layers of their own."""

    def __init__(self, layout, kind):
        super().__init__()
        torch.manual_seed(0)
        self.rows, count = rows_of(layout), sum(map(len, rows_of(layout)))
        whole = nn.Linear(5, count)
        self.parts, self.fused = None, None
        if kind == "apart":
            self.parts = nn.ModuleList(nn.Linear(5, len(rows)) for rows in self.rows)
            for part, rows in zip(self.parts, self.rows, strict=True):
                part.load_state_dict({"weight": whole.weight[rows], "bias": whole.bias[rows]})
        elif kind == "linear":
            self.fused = whole
        else:
            self.fused = Stored(5, count)
            self.fused.load_state_dict({"weight": whole.weight.mT.contiguous(), "bias": whole.bias})
        self.double()

    def forward(self, x):
        if self.parts is None:
            out = self.fused(x)
            each = [out[..., rows] for rows in self.rows]
        else:
            each = [part(x) for part in self.parts]
        act = (torch.tanh, torch.sin, torch.square)
        return torch.cat([f(o) for f, o in zip(act, each, strict=False)], -1).mean(1)

    def flat(self, kind):
        if self.parts is None:
            weight = self.fused.weight.mT if kind == "stored" else self.fused.weight
            whole = torch.cat([weight, self.fused.bias[:, None]], 1)
            return torch.cat([whole[rows] for rows in self.rows])
        return torch.cat([torch.cat([p.weight, p.bias[:, None]], 1) for p in self.parts])


def trained(layout, kind, make, **more):
    model = Fused(layout, kind)
    split = {} if kind == "apart" else {"split": {"fused": LAYOUTS[layout][0]}}
    stepping = make(model, **split, **more)
    for step in range(4):
        x = torch.randn(7, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).square().sum(1).mean().backward()
        for one in stepping:
            one.step()
    return model.flat(kind), stepping[0]


def with_sgd(model, **settings):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    return KFAC(model, sgd, update_every=2, refresh_every=2, **settings), sgd


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["linear", "stored"])
@pytest.mark.parametrize("structure", [Kronecker(), EKFAC(), UnitWise(), Full()], ids=repr)
def test_is_what_separate_layers_are(layout, kind, structure):
    expected, _ = trained(layout, "apart", with_sgd, structure=structure, factor_decay=0.5)
    found, kfac = trained(layout, kind, with_sgd, structure=structure, factor_decay=0.5)
    assert (found - expected).abs().max() <= 1e-10
    assert [b.name for b in kfac.blocks] == [f"fused.{i}" for i in range(len(kfac.blocks))]
    assert not kfac.uncovered


@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_are_spectral_steps(layout):
    def made(model, **more):
        return (NaturalMuon(model, inverse=Cholesky(), **more),)

    expected, _ = trained(layout, "apart", made)
    found, optimizer = trained(layout, "linear", made)
    assert (found - expected).abs().max() <= 1e-10
    assert optimizer.kfac.blocks[0].shares_input_with is not None


class NeoX(nn.Module):
    """As GPT-NeoX has it: the heads stand in the module, or in its config."""

    def __init__(self, heads, width=8):
        super().__init__()
        if heads:
            self.num_heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)


def test_heads_are_known_from_the_attention():
    def rows(heads):
        found = KFAC(nn.ModuleDict({"attention": NeoX(heads)}), kl_clip=None).blocks
        return [block.layers[0].split(torch.arange(24)[:, None]).flatten() for block in found]

    for part, own in enumerate(rows(2)):
        assert own.tolist() == [h * 12 + part * 4 + i for h in range(2) for i in range(4)]
    assert [len(own) for own in rows(0)] == [24]  # thirds would be of mixed heads
    assert [len(own) for own in rows(3)] == [24]


def test_hugging_face_gpt_neox():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        hidden_size=16,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=11,
    )
    model = transformers.GPTNeoXForCausalLM(config)
    blocks = [b for b in NaturalMuon(model).kfac.blocks if "query_key_value" in b.name]
    assert [b.shape for b in blocks] == [(1, 16, 17)] * 3
    assert blocks[0].layers[0].turns == 4


def test_what_does_not_fit_is_a_sentence():
    model = nn.Sequential(nn.Linear(4, 12))
    said = r"split cuts Linear '0' by Interleaved\(parts=5, heads=2\), which its 12 rows are no"
    with pytest.raises(CoverageError, match=said):
        KFAC(model, kl_clip=None, split={"0": Interleaved(5, heads=2)})
    with pytest.raises(CoverageError, match="no multiple of"):
        KFAC(model, kl_clip=None, split={"0": Interleaved((2, 3))})
    with pytest.raises(SettingError, match=r"split\['0'\] is 3 but must say which rows"):
        KFAC(model, kl_clip=None, split={"0": 3})
    with pytest.raises(SettingError, match=r"Interleaved\.parts is 1 but must be a whole number"):
        Interleaved(1)
    with pytest.raises(SettingError, match=r"Interleaved\.heads is 0"):
        Interleaved(2, heads=0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 12), (0, 1, 2, 7, 8, 12), (0, 4, 8, 12)])
def test_shards_in_boxes(axis, cuts):
    """Wherever a tensor is cut, its boxes are views of all its numbers, each once."""
    whole = torch.arange(36).view(12, 3)
    whole = whole.mT.contiguous() if axis else whole
    unit, seen = 4, []
    for start, stop in pairwise(cuts):
        box = ((0, 3), (start, stop)) if axis else ((start, stop), (0, 3))
        part = whole[tuple(slice(*ends) for ends in box)].clone()
        offsets = [first for first, _ in box]
        for one in unfolded(box, (axis, unit)):
            own = view_of(part, one, offsets, (axis, unit))
            full = view_of(whole, one, (), (axis, unit))
            assert torch.equal(own, full)
            seen += own.flatten().tolist()
    assert sorted(seen) == list(range(36))
