"""Modules that are watched at the call on their weight: activations, paddings, computed weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import own_modules as own
from natgrad import KFAC, Diagonal, Kronecker, NaturalMuon
from natgrad.errors import CoverageError
from natgrad.layers import layers_of
from natgrad.layers.called import _is_that_of
from natgrad.operators import fisher


class Pad(nn.Module):
    """What `own.SamePadding` does before its convolution, for 5 x 5 pixels and stride 2."""

    def forward(self, x):
        return F.pad(x, [0, 0, 0, 0])


def filled(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.5 + 0.1)
    return model.double()


def stepped(model: nn.Module, x: torch.Tensor, **settings) -> KFAC:
    kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, damping=0.1, **settings)
    F.softplus(model(x)).flatten(1).sum(1).mean().backward()
    kfac.step()
    return kfac


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (own.NormAndActivation(3), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())),
        (own.SamePadding(3, 3, 1, stride=2), nn.Sequential(Pad(), nn.Conv2d(3, 3, 1, stride=2))),
        (own.InplaceActivation(2, 3), nn.Sequential(nn.Conv2d(3, 2, 2), nn.ReLU(inplace=True))),
    ],
    ids=["norm, activation", "padding", "in place"],
)
@pytest.mark.parametrize("structure", [None, Diagonal()], ids=["default", "diagonal"])
def test_gradients_are_those_of_its_parts(module, known, structure):
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    found = []
    for inner in (module, known):
        model = filled(nn.Sequential(nn.Conv2d(3, 3, 1), inner))
        model.zero_grad()
        kfac = stepped(model, x, structure=structure)
        assert not kfac.uncovered
        found.append([p.grad for p in model.parameters()])
        kfac.detach()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Times3(nn.Module):
    def forward(self, x):
        return 3.0 * x


def test_a_scaled_embedding_that_is_tied_to_a_head():
    x = torch.randint(5, (6, 4))
    found = []
    for embedding in (own.ScaledEmbedding(5, 3), nn.Embedding(5, 3)):
        plain = type(embedding) is nn.Embedding
        middle = Times3() if plain else nn.Identity()
        model = nn.Sequential(embedding, middle, nn.Linear(3, 5, bias=False))
        model[2].weight = embedding.weight
        kfac = stepped(filled(model), x)
        assert [block.name for block in kfac.blocks] == ["0"]
        found.append(embedding.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


SCALED = {
    "standardised": lambda: own.ScaledStandardizedConv(3, 4, 3),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
    "linear": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "old weight_norm": lambda: torch.nn.utils.weight_norm(nn.Conv2d(3, 4, 3)),
    "old spectral_norm": lambda: torch.nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)),
}


def used_weight(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The weight in the call of the last forward: what the output is linear in."""
    zero = torch.zeros_like(x)
    size = x.shape[-1]
    columns = []
    with torch.no_grad():
        bias = module(zero)
        if isinstance(module, nn.Linear):
            return (module(torch.eye(size).to(x)) - module(torch.zeros(size, size).to(x))).mT
        for i in range(3):
            for a in range(3):
                for b in range(3):
                    one = zero[:1].clone()
                    one[0, i, a, b] = 1.0
                    columns.append((module(one) - bias[:1])[0, :, 0, 0])
    return torch.stack(columns, 1).view(4, 3, 3, 3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", SCALED)
def test_a_computed_weight_against_its_own_gradients(kind):
    """Beside a plain module with that weight: A is the same, G is that of scaled rows, and without
    the part that the loss is blind to, ``s Σ g aᵀ`` is autograd's gradient of every sample."""
    torch.manual_seed(1)
    module = SCALED[kind]().double().eval()  # no power iterations between the two passes
    x = torch.randn(5, 3, *(() if kind == "linear" else (5, 5)), dtype=torch.float64)
    plain = (nn.Linear(3, 4) if kind == "linear" else nn.Conv2d(3, 4, 3)).double()
    weight = used_weight(module, x)
    with torch.no_grad():
        plain.weight.copy_(weight)
        plain.bias.copy_(module.bias)
    kfacs = [stepped(m, x, structure=Kronecker()) for m in (module, plain)]
    blocks = {block.name: block for block in kfacs[0].blocks}
    assert set(blocks) == {"", "bias"}
    (theirs,) = kfacs[1].blocks
    block = blocks[""]
    (source,) = (p for p in block.parameters)
    assert source.shape == weight.shape
    p = source.detach().flatten(1)
    centred = kind == "standardised"
    direction = p - p.mean(1, keepdim=True) if centred else p
    s = (weight.flatten(1) * direction).sum(1) / direction.square().sum(1)
    dense = {name: block.forms[name].dense(kept)[0] for name, kept in block.kept().items()}
    others = {name: theirs.forms[name].dense(kept)[0] for name, kept in theirs.kept().items()}
    torch.testing.assert_close(dense["A"], others["A"][:-1, :-1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dense["G"], s[:, None] * others["G"] * s, rtol=1e-8, atol=1e-12)
    for i in range(len(x)):
        module.zero_grad(), plain.zero_grad()
        for m in (module, plain):
            F.softplus(m(x[i : i + 1])).sum().backward()
        ours = s[:, None] * plain.weight.grad.flatten(1)
        truth = source.grad.flatten(1)
        gap = ours - truth  # along the mean, the row, or the pair of singular vectors
        if centred:
            gap = gap - gap.mean(1, keepdim=True)
        if "spectral" in kind:
            u, v = (b for k, b in module.named_buffers() if k.endswith(("_u", "_v")))
            blind = torch.outer(u, v) / (u.norm() * v.norm())
            gap = gap - (gap * blind).sum() * blind
        else:
            unit = direction / direction.norm(dim=1, keepdim=True)
            gap = gap - (gap * unit).sum(1, keepdim=True) * unit
        assert gap.norm() < 1e-8 * truth.norm()


@pytest.mark.parametrize("bias", [True, False])
def test_the_magnitude_is_left_to_the_optimizer(bias):
    """Without a bias the module has no parameter of its own any more."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4, bias=bias)))
    kfac = KFAC(model, kl_clip=None)
    assert [block.name for block in kfac.blocks] == ["0", "0.bias"][: 1 + bias]
    assert set(kfac.uncovered) == {"0.parametrizations.weight.original0"}


@pytest.mark.filterwarnings("ignore:.*original0' keeps its plain gradient")
def test_a_computed_weight_that_is_unfrozen_is_no_norm_layer():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = NaturalMuon(model, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        model[0].requires_grad_(True)
    assert [block.name for block in optimizer.kfac.blocks] == ["0", "0.bias", "1"]


class Tangled(nn.Conv2d):
    """Its weight does something beside the convolution."""

    def forward(self, x):
        return super().forward(x) * self.weight.sum()


class Squashed(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.tanh(), self.bias)


class Repeated(nn.Linear):
    def forward(self, x):
        return super().forward(super().forward(x))


class OtherBias(nn.Linear):
    """Nearly the product of its base class."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias * 1.02).relu()


class Gained(nn.Linear):
    """With a learned number, which has no axes."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.gain * super().forward(x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Gained(3, 4), "something else than that of Linear"),
        (lambda: Tangled(3, 4, 3), "something else than that of Conv2d"),
        (lambda: Squashed(3, 4), "something else than that of Linear"),
        (lambda: Repeated(3, 3), "something else than that of Linear"),
        (lambda: OtherBias(3, 4), "something else than that of Linear"),
    ],
    ids=["gained", "tangled", "squashed", "repeated", "bias"],
)
def test_anything_else_has_a_reason(make, reason):
    assert reason in layers_of("it", make())


@pytest.mark.parametrize("other", [lambda y: 1.01 * y, lambda y: y + 0.01, lambda y: y[:, :3]])
def test_nearly_the_result_of_the_base_class_is_another_one(other):
    module, x = nn.Linear(3, 4).double(), torch.randn(5, 3, dtype=torch.float64)
    out = module(x).detach()
    assert _is_that_of(nn.Linear, module, x, module.weight, out)
    assert _is_that_of(nn.Linear, module, x, module.weight, out.float())  # but for rounding
    assert not _is_that_of(nn.Linear, module, x, module.weight, other(out))


def test_curvature_matrices_refuse_a_computed_weight_by_name():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4))).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(4, (6,))
    names = ["0.parametrizations.weight.original1"]
    with pytest.raises(CoverageError, match="has more to do with the output"):
        fisher(
            model, nn.CrossEntropyLoss(), (x, y), structure=Kronecker(), parameters=names
        ).dense()


class Activated(nn.Linear):
    def forward(self, x):
        return F.softplus(super().forward(x))


def test_a_model_that_is_such_a_module_itself_may_change():
    """It is watched anew in the middle of its own call."""
    model, x = Activated(3, 4), torch.randn(6, 3)
    kfac = stepped(model, x)
    for trained in (False, True):
        model.bias.requires_grad_(trained)
        model(x).sum(1).mean().backward()
        assert not torch.overrides._get_current_function_mode_stack()
        kfac.step()
        (block,) = kfac.blocks
        assert block.ready
        assert block.shape == (1, 4, 3 + trained)


class WithNorm(nn.Conv2d):
    def __init__(self, *args):
        super().__init__(*args)
        self.norm = nn.BatchNorm2d(self.out_channels)

    def forward(self, x):
        return self.norm(super().forward(x))


def test_trials_leave_the_running_statistics_of_children_alone():
    module = WithNorm(3, 4, 3).double()
    before = copy.deepcopy(module.state_dict())
    layers_of("it", module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_step_without_an_update_watches_nothing():
    model = filled(nn.Sequential(own.NormAndActivation(3)))
    kfac = KFAC(model, kl_clip=None, update_every=10)
    module = model[0]
    assert module._forward_pre_hooks
    model(torch.randn(4, 3, 2, 2).double()).sum().backward()
    kfac.step()
    for _ in range(4):  # intervals do not double: 1, then every tenth
        model(torch.randn(4, 3, 2, 2).double()).sum().backward()
        kfac.step()
    assert not module._forward_pre_hooks


def test_a_copy_watches_its_own_modules():
    model = filled(nn.Sequential(own.NormAndActivation(3), own.ScaledStandardizedConv(3, 4, 3)))
    kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, damping=0.1)
    twin, its = copy.deepcopy((model, kfac))
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    for net, preconditioner in ((model, kfac), (twin, its)):
        F.softplus(net(x)).flatten(1).sum(1).mean().backward()
        preconditioner.step()
        assert all(block.ready for block in preconditioner.blocks)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_recomputed_segments_are_counted_once():
    found = []
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    for recomputes in (False, True):
        model = filled(nn.Sequential(nn.Conv2d(3, 3, 1), own.ScaledStandardizedConv(3, 4, 3)))
        kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, damping=0.1)
        out = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
        F.softplus(out).flatten(1).sum(1).mean().backward()
        kfac.step(samples=6)
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_a_router_is_the_linear_layer_in_it(bias):
    """It returns logits and what it makes of them; loss and statistics are those of its parts."""

    class Mixture(nn.Module):
        def __init__(self, known):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.router = nn.Linear(4, 3, bias=bias) if known else own.Router(4, 3, bias)
            self.experts = nn.Linear(4, 3)

        def forward(self, x):
            x = self.first(x).reshape(-1, 4)
            if isinstance(self.router, nn.Linear):
                scores, taken = torch.topk(self.router(x).softmax(-1), 2, dim=-1)
                scores = scores / scores.sum(-1, keepdim=True)
            else:
                _, scores, taken = self.router(x)
            return (self.experts(x).gather(1, taken) * scores).view(6, -1)

    x, found = torch.randn(6, 5, 4, dtype=torch.float64), []
    for known in (True, False):
        model = filled(Mixture(known))
        kfac = stepped(model, x)
        assert not kfac.uncovered
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_router_whose_weight_enters_twice_is_none():
    assert isinstance(layers_of("router", own.RouterWithScale(4, 3, bias=False)), str)
