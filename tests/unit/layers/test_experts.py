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
    optimizer = NaturalMuon(model, 0.01, momentum=0.0, geometry=Spectral(power=0))
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


class Apart(nn.Module):
    """The same network with a module for each matrix."""

    def __init__(self, net):
        super().__init__()
        self.first, experts = copy.deepcopy(net.first), net.experts
        self.gates, self.ups, self.downs = (nn.ModuleList() for _ in range(3))
        for index in range(EXPERTS):
            up, bias, down = (None if t is None else t.detach() for t in experts.of_expert(index))
            rows = (slice(0, INNER), slice(INNER, None))
            if not experts.is_concatenated:
                rows = (slice(0, None, 2), slice(1, None, 2))
            for own, some in zip((self.gates, self.ups), rows, strict=True):
                own.append(linear(up[some], None if bias is None else bias[some]))
            self.downs.append(linear(down, None))

    def forward(self, x):
        x = self.first(x)
        out = torch.zeros_like(x)
        for index in range(EXPERTS):
            mine = x[:, :EXPERTS].argmax(1) == index
            hidden = self.gates[index](x[mine]).sigmoid() * self.ups[index](x[mine])
            out[mine] = self.downs[index](hidden)
        return out

    def matrices(self):
        found = {}
        for index in range(EXPERTS):
            for part, own in enumerate((self.gates, self.ups)):
                found[f"experts.gate_up_proj.{index}.{part}"] = whole(own[index])
            found[f"experts.down_proj.{index}"] = whole(self.downs[index])
        return found


def linear(weight, bias):
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None).double()
    with torch.no_grad():
        made.weight.copy_(weight)
        if bias is not None:
            made.bias.copy_(bias)
    return made


def whole(module):
    weight, bias = module.weight.detach(), module.bias
    return weight if bias is None else torch.cat([weight, bias.detach()[:, None]], 1)


OPTIMIZERS = {
    "muon": lambda model: NaturalMuon(model, 0.02, update_every=2, refresh_every=2),
    "by_output": lambda model: NaturalMuon(model, 0.02, length=natgrad.OutputChange()),
    "cholesky": lambda model: NaturalMuon(model, 0.02, inverse=natgrad.Cholesky()),
    "narrow": lambda model: NaturalMuon(model, 0.02, max_dim=4),
    "kfac": lambda model: natgrad.KFAC(model, kl_clip=None, damping=0.1, update_every=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_steps_are_those_of_separate_modules(layout, name):
    model = Net(**layout)
    other = Apart(model)
    for one in (model, other):
        optimizer = OPTIMIZERS[name](one)
        for step in range(5):
            gradients(one, step)
            optimizer.step()
            if isinstance(optimizer, KFAC):
                with torch.no_grad():
                    for p in one.parameters():
                        p -= 0.05 * p.grad
    own = matrices(model, lambda p: p)
    for key, m in other.matrices().items():
        torch.testing.assert_close(own[key], m, rtol=1e-10, atol=1e-10)
    assert not torch.equal(own["experts.down_proj.0"], matrices(Net(**layout), lambda p: p)[key])


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
    assert table.covered["experts.down_proj"] == "Kronecker(sharing='expand')"
    assert KFAC(Net(), kl_clip=None).coverage().uncovered == {}
    plain = NaturalMuon(Net(), structure=natgrad.EKFAC()).kfac.coverage()
    assert plain.covered["experts.down_proj"] == "Identity()"
    assert any("steps without curvature" in cell for row in plain.rows for cell in row)
    by_output = {"structure": natgrad.EKFAC(), "length": natgrad.OutputChange()}
    left = NaturalMuon(Net(), **by_output).kfac.coverage().uncovered
    assert left["experts.down_proj"].startswith("it is a stack of experts, whose rows are told")
    assert "experts.down_proj" in NaturalMuon(Net(), exclude="experts").kfac.uncovered


def test_matrices_have_no_blocks_of_theirs():
    """Operators see single samples, which the rows of experts do not show."""
    model, x = Net(), torch.randn(6, WIDTH, dtype=torch.float64)
    with pytest.raises(CoverageError, match="has blocks in steps alone, not in matrices"):
        natgrad.fisher(
            model,
            nn.CrossEntropyLoss(),
            [(x, torch.zeros(6, dtype=torch.int64))],
            structure=natgrad.Kronecker(),
        )


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


def hugging_face(kind, implementation="eager"):
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
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    model.config._experts_implementation = implementation
    return model


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_hugging_face(kind):
    model = hugging_face(kind)
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


def one_step(model, tokens):
    kfac = KFAC(model, kl_clip=None, damping=0.1, update_every=1, refresh_every=1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    kfac.step()
    table = kfac.coverage()
    assert table.uncovered == {}
    assert {"Kronecker(sharing='expand')"} == {
        how for name, how in table.covered.items() if ".experts." in name
    }
    return [p.grad for p in model.parameters()], {b.name: b for b in kfac.blocks}


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "GptOss", "Llama4Text"])
def test_hugging_face_has_one_curvature_however_it_multiplies(kind):
    """Also by a kernel for grouped products, which has no float64."""
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(1))
    for dtype, others, close in (
        (torch.float64, ("batched_mm",), {"rtol": 1e-10, "atol": 1e-12}),
        (torch.float32, ("batched_mm", "grouped_mm"), {"rtol": 1e-3, "atol": 1e-6}),
    ):
        expected, blocks = one_step(hugging_face(kind).to(dtype), tokens)
        experts = {name: b for name, b in blocks.items() if ".experts." in name}
        assert len(experts) == 9
        for name in others:
            found, own = one_step(hugging_face(kind, name).to(dtype), tokens)
            for p, q in zip(found, expected, strict=True):
                torch.testing.assert_close(p, q, **close)
            for key, block in experts.items():
                for factor, running in block.running.items():
                    mine = own[key].running[factor].mean
                    assert (mine - running.mean).norm() <= 1e-5 * running.mean.norm()


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_hugging_face_trains_faster_than_by_its_gradient(kind):
    """On the same tokens, each at the best of some learning rates."""
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(1))

    def after(rate, preconditioned):
        model = hugging_face(kind, "batched_mm")
        optimizer = torch.optim.SGD(model.parameters(), rate)
        settings = {"update_every": 1, "refresh_every": 2, "kl_clip": 0.1}
        kfac = KFAC(model, optimizer, **settings) if preconditioned else None
        for _ in range(15):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            if kfac is not None:
                kfac.step()
            optimizer.step()
        return loss.item()

    plain = min(after(rate, False) for rate in (0.1, 0.3, 1.0, 3.0))
    assert min(after(rate, True) for rate in (0.3, 1.0)) < plain - 0.3
