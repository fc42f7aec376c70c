"""A parameter with a matrix for each expert: a step for each, as separate weights would have it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from natgrad import KFAC, NaturalMuon, Spectral
from natgrad.errors import CoverageError, SettingError
from natgrad.layers import Experts, Interleaved
from natgrad.linalg.polar import polar

EXPERTS, WIDTH, INNER, TOKENS = 3, 4, 5, 40


class Mixture(nn.Module):
    """Top-1 routing by the first entries of a token, with experts in one parameter."""

    def __init__(self, inputs_first=False, in_turn=False, bias=False):
        super().__init__()
        self.is_transposed, self.is_concatenated = inputs_first, not in_turn
        up, down = (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)
        if inputs_first:
            up, down = ((e, i, o) for e, o, i in (up, down))
        self.gate_up_proj = nn.Parameter(torch.randn(up) / 2)
        self.down_proj = nn.Parameter(torch.randn(down) / 2)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) / 2)

    def of_expert(self, index):
        up, down = self.gate_up_proj[index], self.down_proj[index]
        up, down = (up.mT, down.mT) if self.is_transposed else (up, down)
        bias = self.gate_up_proj_bias[index] if hasattr(self, "gate_up_proj_bias") else None
        return up, bias, down

    def forward(self, x):
        out = torch.zeros_like(x)
        for index in range(EXPERTS):
            mine = x[:, :EXPERTS].argmax(1) == index
            up, bias, down = self.of_expert(index)
            both = F.linear(x[mine], up, bias)
            gate, value = (
                (both[:, ::2], both[:, 1::2]) if not self.is_concatenated else (both.chunk(2, -1))
            )
            out[mine] = F.linear(gate.sigmoid() * value, down)
        return out


class Net(nn.Module):
    def __init__(self, **more):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), Mixture(**more)
        nn.init.eye_(self.first.weight)  # so that all experts have tokens
        nn.init.zeros_(self.first.bias)
        self.double()

    def forward(self, x):
        return self.experts(self.first(x))


def gradients(model, step=0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    model.zero_grad()
    model(x).square().sum(1).mean().backward()


def matrices(model, of):
    """By block: the parts of every expert, with the bias as a last column."""
    found, experts = {}, model.experts
    twin = copy.deepcopy(experts)
    with torch.no_grad():
        for (_, p), (_, q) in zip(twin.named_parameters(), experts.named_parameters(), strict=True):
            p.copy_(of(q))
    for index in range(EXPERTS):
        up, bias, down = twin.of_expert(index)
        up = up if bias is None else torch.cat([up, bias[:, None]], 1)
        parts = up.chunk(2) if experts.is_concatenated else (up[::2], up[1::2])
        for part, own in enumerate(parts):
            found[f"experts.gate_up_proj.{index}.{part}"] = own.detach()
        found[f"experts.down_proj.{index}"] = down.detach()
    return found


LAYOUTS = [
    {},
    {"inputs_first": True},
    {"inputs_first": True, "in_turn": True, "bias": True},
    {"in_turn": True},
    {"bias": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_each_has_its_own_polar_step(layout):
    model = Net(**layout)
    optimizer = NaturalMuon(model, 0.01, momentum=0.0)
    gradients(model)
    raw = matrices(model, lambda p: p.grad)
    before = matrices(model, lambda p: p)
    optimizer.step()
    after = matrices(model, lambda p: p)
    blocks = {block.name: block for block in optimizer.kfac.blocks}
    assert blocks.keys() == {"first", *raw}
    for name, m in raw.items():
        assert blocks[name].shape == (1, *m.shape)
        assert m.any()
        expected = polar(m[None])[0]
        expected *= 0.01 / expected.square().mean().sqrt()
        assert (before[name] - after[name] - expected).abs().max() <= 1e-9


def test_an_expert_without_tokens_stays_and_makes_no_other_longer():
    model = Net()
    optimizer = NaturalMuon(model, 0.01, momentum=0.0)
    before = copy.deepcopy(model.experts)
    x = torch.zeros(6, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.copy_(torch.tensor([0.1, 0.9, 0.2, 0.3]))  # all go to the second
    model(x + 1).square().sum(1).mean().backward()
    optimizer.step()
    moved = (model.experts.down_proj - before.down_proj).detach()
    assert not moved[0].any()
    assert not moved[2].any()
    assert abs(moved[1].square().mean().sqrt().item() - 0.01) < 1e-5


def test_a_state_goes_on():
    def run(model, optimizer, steps):
        for step in steps:
            gradients(model, step)
            optimizer.step()

    model = Net()
    optimizer = NaturalMuon(model, update_every=2, refresh_every=2)
    run(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, range(3, 6))
    other = Net()
    second = NaturalMuon(other, update_every=2, refresh_every=2)
    other.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    run(other, second, range(3, 6))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    optimizer.kfac.memory()
    optimizer.kfac.drift()


def test_coverage_says_what_is_done():
    model = Net()
    gradients(model)
    table = NaturalMuon(model).kfac.coverage()
    assert table.covered["experts.down_proj"] == "Identity()"
    assert any("steps without curvature" in cell for row in table.rows for cell in row)
    left = KFAC(Net(), kl_clip=None).coverage().uncovered
    assert left["experts.down_proj"].startswith("inputs of single experts are not seen")
    by_output = NaturalMuon(Net(), length=natgrad.OutputChange()).kfac
    assert "experts.down_proj" in by_output.coverage().uncovered
    assert "experts.down_proj" in NaturalMuon(Net(), exclude="experts").kfac.uncovered


def test_plain_muon_has_them_too():
    assert len(NaturalMuon(Net(), geometry=Spectral(power=0)).kfac.blocks) == 1 + 3 * EXPERTS


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.w1 = nn.Parameter(torch.randn(3, 4, 6))

    def forward(self, x):
        return torch.einsum("ni,eio->no", self.head(x), self.w1)


def test_others_by_pattern():
    model = nn.ModuleDict({"mix": Own()})
    found = NaturalMuon(model, split={"*.w1": Experts((4, 2), inputs_first=True)}).kfac.blocks
    assert [b.shape for b in found if "w1" in b.name] == [(1, 4, 4), (1, 2, 4)] * 3
    assert not [b for b in NaturalMuon(model).kfac.blocks if "w1" in b.name]
    unsplit = NaturalMuon(Net(), split={}).kfac.blocks
    assert [b.shape for b in unsplit[1:3]] == [(1, 10, 4)] * 2


def test_what_does_not_fit_is_a_sentence():
    model = nn.ModuleDict({"mix": Own()})
    said = r"split cuts the 4 rows of 'mix\.w1' by Experts\(parts=\(4, 2\), inputs_first=False\)"
    with pytest.raises(CoverageError, match=said):
        NaturalMuon(model, split={"*.w1": Experts((4, 2))})
    with pytest.raises(CoverageError, match=r"only Experts\(\) of three axes"):
        NaturalMuon(model, split={"*.w1": (2, 2)})
    with pytest.raises(CoverageError, match="does not make up so many"):
        NaturalMuon(model, split={"*.w1": Experts(Interleaved(3))})
    with pytest.raises(SettingError, match=r"Experts\.parts is 2 but must be rows of each"):
        Experts(2)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    common = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 13,
        "num_local_experts": 3,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{kind}Config")(**common)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    optimizer = NaturalMuon(model, 0.01)
    found = [b for b in optimizer.kfac.blocks if ".experts." in b.name]
    assert len(found) == 9
    assert {b.shape[1:] for b in found} == (
        {(12, 9), (8, 13)} if kind == "GptOss" else {(12, 8), (8, 12)}
    )
    tokens = torch.randint(13, (4, 6))
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
