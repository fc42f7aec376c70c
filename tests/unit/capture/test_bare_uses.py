"""Bare parameters: blocks of whole gradients, by stand-ins in the module's own forward."""

import copy
import gc
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bare_modules as bare
from natgrad import (
    EKFAC,
    KFAC,
    Cholesky,
    Diagonal,
    Eigen,
    ExactFisher,
    Full,
    Kronecker,
    MeanLoss,
    NaturalMuon,
    UnitWise,
)
from natgrad.capture.bare_uses import BareCall, PullBack
from natgrad.capture.points import Point
from natgrad.capture.stand_ins import StandIn
from natgrad.errors import CoverageError

DAMPING = 0.1
N = 8


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def batch(n: int = N, seed: int = 4):
    torch.manual_seed(seed)
    return torch.randn(n, bare.TOKENS, bare.WIDTH, dtype=torch.float64), torch.randint(3, (n,))


def gradients_of_samples(model: nn.Module, name: str, x, y) -> torch.Tensor:
    """``[n, numel]``, sample by sample, on a copy that nobody watches."""
    twin = made(type(model))
    twin.load_state_dict(model.state_dict())
    p = twin.eval().get_parameter(name)
    losses = [F.cross_entropy(twin(one[None]), t[None]) for one, t in zip(x, y, strict=True)]
    return torch.stack([torch.autograd.grad(loss, p)[0].flatten() for loss in losses])


def expected(model: nn.Module, name: str, x, y) -> torch.Tensor:
    """``(F + damping)^-1`` times the gradient, with ``F`` the diagonal of a dense Fisher matrix."""
    rows = gradients_of_samples(model, name, x, y)
    dense = rows.mT @ rows / len(rows)
    step = rows.mean(0) / (dense.diagonal() + DAMPING)
    return step.view(model.get_parameter(name).shape)


def kfac_of(model: nn.Module, **settings) -> KFAC:
    settings = {"damping": DAMPING, "kl_clip": None, **settings}
    return KFAC(model, update_every=1, refresh_every=1, **settings)


def bare_names(model: nn.Module) -> list[str]:
    return [n for n, _ in model.named_parameters() if n.rpartition(".")[2] in "pq"]


def step(kfac: KFAC, model: nn.Module, x, y) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    kfac.step()


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", bare.UNDERSTOOD, ids=lambda kind: kind.__name__)
def test_a_step_is_that_of_the_dense_fisher_matrix(kind):
    model, (x, y) = made(kind), batch()
    kfac = kfac_of(model)
    assert kfac.coverage().uncovered.keys() <= {"before.weight", "before.bias"}
    step(kfac, model, x, y)
    found = kfac.coverage().covered
    for name in bare_names(model):
        assert found[name] == "Diagonal()", kfac.coverage()
        close(model.get_parameter(name).grad, expected(model, name, x, y))


@pytest.mark.parametrize("kind", bare.UNDERSTOOD, ids=lambda kind: kind.__name__)
def test_as_many_samples_as_something_else_has_entries(kind):
    """Tokens, heads, windows or features; and a batch of one, where all gradients are one."""
    for n in (1, bare.TOKENS):
        model, (x, y) = made(kind), batch(n)
        step(kfac_of(model), model, x, y)
        for name in bare_names(model):
            close(model.get_parameter(name).grad, expected(model, name, x, y))


@pytest.mark.parametrize("kind", bare.UNDERSTOOD, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_the_model_alone(kind):
    """On steps that take statistics as on all others."""
    model, (x, y) = made(kind), batch()
    F.cross_entropy(model(x), y).backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    kfac = kfac_of(model)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for name, value in plain.items():
        close(model.get_parameter(name).grad, value)
    kfac.detach()
    assert not any(p._backward_hooks for p in model.parameters())
    assert not {"p", "q"} & {key for m in model.modules() for key in vars(m)}


@pytest.mark.parametrize(
    ("kind", "why"), bare.REFUSED.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_what_is_not_understood_keeps_its_plain_gradient_and_says_why(kind, why):
    model, (x, y) = made(kind), batch()
    F.cross_entropy(model(x), y).backward()
    (name,) = bare_names(model)
    plain = model.get_parameter(name).grad.clone()
    kfac = kfac_of(model)
    for _ in range(2):
        step(kfac, model, x, y)
        close(model.get_parameter(name).grad, plain)
    assert why in kfac.coverage().uncovered[name]
    assert "before.weight" in " ".join(kfac.coverage().covered)


def averaged_gradient(model, name, x, y, squares):
    mean = gradients_of_samples(model, name, x, y).mean(0)
    return (mean / (squares + DAMPING)).view(model.get_parameter(name).shape)


def test_accumulated_batches_of_different_sizes_count_every_sample_once():
    model, (x, y) = made(bare.ClassToken), batch()
    kfac = kfac_of(model)
    for some in (slice(0, 2), slice(2, 8)):
        (F.cross_entropy(model(x[some]), y[some], reduction="sum") / N).backward()
    kfac.step()
    for name in "pq":
        close(model.get_parameter(name).grad, expected(model, name, x, y))


def test_two_losses_of_one_pass_are_one():
    model, (x, y) = made(bare.Twice), batch()
    kfac = kfac_of(model)
    loss = F.cross_entropy(model(x), y)
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()
    kfac.step()
    close(model.p.grad, expected(model, "p", x, y))


@pytest.mark.parametrize("reentrant", [False, True], ids=["no reentry", "reentrant"])
@pytest.mark.parametrize("kind", [bare.Scaled, bare.Twice, bare.Decay, bare.ClassToken])
def test_checkpointed(kind, reentrant):
    class Checkpointed(kind):
        def inside(self, x):
            inside = super().inside
            return checkpoint(inside, x, use_reentrant=reentrant) if self.training else inside(x)

    class Around(nn.Module):  # the module that has the parameter is called in the checkpoint
        def __init__(self):
            super().__init__()
            self.first, self.own = nn.Linear(bare.WIDTH, bare.WIDTH), kind()

        def forward(self, x):
            x = self.first(x)
            return (
                checkpoint(self.own, x, use_reentrant=reentrant) if self.training else self.own(x)
            )

    for outside in (Checkpointed, Around):
        model, (x, y) = made(outside), batch()
        kfac = kfac_of(model)
        step(kfac, model, x, y)
        for name in bare_names(model):
            if outside is Checkpointed:  # it is computed anew without the module's hooks
                assert name in kfac.coverage().uncovered
            else:
                close(model.get_parameter(name).grad, expected(model, name, x, y))


def test_uses_in_several_reentrant_checkpoints_are_refused():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.own = nn.Linear(bare.WIDTH, bare.WIDTH), Norm()

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.own, self.first(x), use_reentrant=True)
            return x[:, 0, :3]

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.rand(bare.WIDTH) + 0.5)

        def forward(self, x):
            return (x * self.p).sin() + 0

    model, (x, y) = made(Parts), batch()
    kfac = kfac_of(model)
    step(kfac, model, x, y)
    assert "several checkpoints" in kfac.coverage().uncovered["own.p"]


@pytest.mark.parametrize("kind", [bare.ClassToken, bare.FusedAttention, bare.Decay])
def test_under_autocast_it_is_that_of_float32_but_for_rounding(kind):
    found = []
    for enabled in (False, True):
        model, (x, y) = made(kind).float(), batch()
        kfac = kfac_of(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            F.cross_entropy(model(x.float()), y).backward()
        kfac.step()
        names = bare_names(model)
        assert set(names) <= set(kfac.coverage().covered)
        assert all(block.ready for block in kfac.blocks)
        found.append(torch.cat([model.get_parameter(name).grad.flatten() for name in names]))
    assert (found[1] - found[0]).norm() < 0.1 * found[0].norm()


STRUCTURES = {
    "expand": Kronecker(),
    "reduce": Kronecker(sharing="reduce"),
    "traces": Kronecker(sharing="traces"),
    "ekfac": EKFAC(),
    "unitwise": UnitWise(),
    "diagonal": Diagonal(),
    "full": Full(),
}
INVERSES = [Eigen(), Cholesky()]


@pytest.mark.parametrize("each", [False, True], ids=["all", "each"])
@pytest.mark.parametrize(("name", "inverse"), [*product(STRUCTURES, INVERSES)], ids=str)
def test_structures_hold_for_it_or_are_the_diagonal(name, inverse, each):
    structure = STRUCTURES[name]
    if name == "ekfac" and isinstance(inverse, Cholesky):
        pytest.skip("EKFAC needs an eigenbasis")
    model, (x, y) = made(bare.Scaled), batch()
    given = (lambda layer: structure) if each else structure
    kfac = kfac_of(model, structure=given, inverse=inverse)
    step(kfac, model, x, y)
    rows = gradients_of_samples(model, "p", x, y)
    dense = rows.mT @ rows / N
    dense = dense if name == "full" else dense.diagonal().diag()
    damped = dense + DAMPING * torch.eye(bare.WIDTH, dtype=rows.dtype)
    close(model.p.grad, torch.linalg.solve(damped, rows.mean(0)))


def test_an_empty_batch_adds_nothing():
    found = []
    for parts in (slice(0, 8),), (slice(0, 0), slice(0, 8)):
        model, (x, y) = made(bare.Decay), batch()
        kfac = kfac_of(model)
        for some in parts if isinstance(parts, tuple) else (parts,):
            (F.cross_entropy(model(x[some]), y[some], reduction="sum") / N).backward()
        kfac.step()
        found.append(model.p.grad)
    close(*found)


def test_nothing_is_left_of_a_graph():
    model, (x, y) = made(bare.Decay), batch()
    kfac = kfac_of(model)
    step(kfac, model, x, y)
    gc.collect()
    gc.disable()  # references alone
    try:
        for _ in range(2):
            step(kfac, model, x, y)
        kinds = (StandIn, PullBack, Point, BareCall)
        assert not [o for o in gc.get_objects() if type(o) in kinds]
    finally:
        gc.enable()


def test_drawn_targets():
    """Of a Monte-Carlo Fisher: vectors are sent back from the output, and meet the samples."""
    model, (x, y) = made(bare.ClassToken), batch()
    kfac = kfac_of(model, curvature=ExactFisher())
    out = model(x)
    kfac.observe(out)
    F.cross_entropy(out, y).backward()
    kfac.step()
    shares = model(x).softmax(-1).detach()
    for name in "pq":
        each = [gradients_of_samples(model, name, x, torch.full_like(y, c)) for c in range(3)]
        squares = sum(s[:, None] * g.square() for s, g in zip(shares.T, each, strict=True)).mean(0)
        close(model.get_parameter(name).grad, averaged_gradient(model, name, x, y, squares))


def test_a_share_of_the_samples():
    model, (x, y) = made(bare.Shifted), batch()
    kfac = kfac_of(model, statistics=4)
    step(kfac, model, x, y)
    (block,) = [block for block in kfac.blocks if block.name == "p"]
    rows = gradients_of_samples(model, "p", x, y).square()
    found = block.running["F"].mean
    some = [rows[list(which)].mean(0) for which in combinations(range(N), 4)]
    assert min(float((one - found).abs().max()) for one in some) < 1e-14


def test_a_part_of_the_loss_that_is_not_watched():
    model, (x, y) = made(bare.Scaled), batch()
    kfac = kfac_of(model)
    loss = F.cross_entropy(model(x), y)
    with kfac.unwatched():
        other = model(x[:2]).square().mean()
    (loss + other).backward()
    total = model.p.grad.clone()
    kfac.step()
    squares = gradients_of_samples(model, "p", x, y).square().mean(0)
    close(model.p.grad, total / (squares + DAMPING))


def test_a_gradient_penalty_uses_it_once_more():
    """Where it multiplies, it is in the gradient of what it multiplies."""
    model, (x, _) = made(bare.OfInput), batch()

    def losses(net, x):
        x = x.clone().requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.logsumexp(-1) + slope.square().sum((1, 2))

    kfac = kfac_of(model, structure=Diagonal())
    losses(model, x).mean().backward()
    kfac.step()
    twin = made(bare.OfInput)
    rows = [torch.autograd.grad(losses(twin, one[None]).sum(), twin.p)[0] for one in x]
    rows = torch.stack(rows)
    close(model.p.grad, rows.mean(0) / (rows.square().mean(0) + DAMPING))


def test_other_steps_do_nothing():
    model, (x, y) = made(bare.ClassToken), batch()
    kfac = KFAC(model, kl_clip=None, update_every=2, refresh_every=2)
    step(kfac, model, x, y)
    assert not model.p._backward_hooks
    assert not any(m._forward_pre_hooks for m in model.modules() if m is not model)
    step(kfac, model, x, y)
    assert not any(m._forward_pre_hooks for m in model.modules() if m is not model)


def test_a_replaced_parameter_gets_a_block_of_its_own():
    model, (x, y) = made(bare.Shifted), batch()
    kfac = kfac_of(model)
    step(kfac, model, x, y)
    model.p = nn.Parameter(model.p.detach()[:, :5] * 2)
    step(kfac, model, x, y)
    assert model.p.grad.shape[1] == 5
    rows = gradients_in_place(model, "p", x, y)
    close(model.p.grad.flatten(), rows.mean(0) / (rows.square().mean(0) + DAMPING))
    model.p.requires_grad_(False)
    step(kfac, model, x, y)
    assert kfac.coverage().uncovered["p"] == "frozen"


def gradients_in_place(model, name, x, y):
    twin = copy.deepcopy(model)
    twin.zero_grad()
    losses = [F.cross_entropy(twin(one[None]), t[None]) for one, t in zip(x, y, strict=True)]
    p = twin.get_parameter(name)
    return torch.stack([torch.autograd.grad(loss, p)[0].flatten() for loss in losses])


def test_copies_and_checkpoints_go_on_alike():
    model, (x, y) = made(bare.ClassToken), batch()
    kfac = kfac_of(model)
    step(kfac, model, x, y)
    twin, kfac_of_twin = copy.deepcopy((model, kfac))
    saved = made(bare.ClassToken)
    saved.load_state_dict(model.state_dict())
    resumed = kfac_of(saved)
    resumed.load_state_dict(kfac.state_dict())
    x, y = batch(seed=9)
    for one, its in ((model, kfac), (twin, kfac_of_twin), (saved, resumed)):
        step(its, one, x, y)
        close(one.p.grad, model.p.grad)
        close(one.q.grad, model.q.grad)
    assert kfac.memory().total["factors"] == kfac_of_twin.memory().total["factors"]


def test_a_model_that_is_called_by_functorch_is_left_alone():
    model, (x, y) = made(bare.ClassToken), batch()
    kfac = kfac_of(model)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with kfac.unwatched():
        torch.func.functional_call(model, own, (x,))
    step(kfac, model, x, y)
    close(model.p.grad, expected(model, "p", x, y))


def test_samples_along_another_axis():
    class TokensFirst(bare.Shifted):
        sizes = ((bare.TOKENS + 3, 1, bare.WIDTH),)

        def forward(self, x):
            if x.shape[0] != bare.TOKENS:
                x = x.transpose(0, 1)
            x = self.before(x)
            return self.head((x + self.p[: len(x)]).tanh().mean(0))

    model, (x, y) = made(TokensFirst), batch()
    kfac = kfac_of(model, loss=MeanLoss(batch_axis=1))
    step(kfac, model, x.transpose(0, 1), y)
    close(model.p.grad, expected(model, "p", x, y))


def test_left_to_an_optimizer_whose_steps_are_of_matrices():
    model, (x, y) = made(bare.ClassToken), batch()
    optimizer = NaturalMuon(model, update_every=1, refresh_every=1)
    F.cross_entropy(model(x), y).backward()
    assert "steps of this geometry are of matrices" in optimizer.kfac.coverage().uncovered["p"]
    optimizer.step()
    assert "exp_avg" in optimizer.state[model.p]


def test_the_bias_of_a_tied_head():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 6), nn.Linear(6, 5)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x).tanh())[:, 0]

    model, y = made(Language), torch.arange(8) % 5
    x = torch.arange(16).view(8, 2) % 5
    kfac = kfac_of(model)
    assert not kfac.coverage().uncovered
    assert [block.name for block in kfac.blocks] == ["embedding", "head.bias"]
    step(kfac, model, x, y)
    rows = gradients_of_samples(model, "head.bias", x, y)
    close(model.head.bias.grad, rows.mean(0) / (rows.square().mean(0) + DAMPING))
    assert "head.bias" in NaturalMuon(made(Language)).kfac.coverage().uncovered


def test_a_model_of_nothing_else_has_no_layer():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.rand(3))

        def forward(self, x):
            return x + self.p

    with pytest.raises(CoverageError, match="has no layer that KFAC can precondition"):
        KFAC(Alone(), kl_clip=None)
