"""Experts in one parameter: blocks of Kronecker factors, whatever function multiplies by them."""

import copy
import gc
import re
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import expert_modules as em
import natgrad
from natgrad import EKFAC, KFAC, Cholesky, Eigen, ExactFisher, Kronecker, MeanLoss, NaturalMuon
from natgrad.errors import CaptureError, CoverageError
from natgrad.layers import Expert, Experts, Interleaved
from natgrad.structures import Identity

DAMPING = 0.1
IDLE = f"experts.w.{em.IDLE}"


@pytest.fixture(autouse=True)
def _grouped_mm(request):
    if "grouped" in request.node.name:
        pytest.importorskip("transformers.integrations.moe")  # which registers its operator


def kfac_of(net, **settings):
    split = {"experts.w": Experts(inputs_first=net.experts.inputs_first)}
    settings = {"damping": DAMPING, "kl_clip": None, "loss": MeanLoss(), "split": split, **settings}
    return KFAC(net, **{"update_every": 1, "refresh_every": 1, **settings})


def blocks_of(kfac):
    return {b.layers[0].index: b for b in kfac.blocks if isinstance(b.layers[0], Expert)}


def backward(net, *batches, call=None):
    net.zero_grad()
    samples = sum(len(x) for x, _ in batches)
    for x, t in batches:
        model = net if call is None else call
        (F.cross_entropy(model(x), t, reduction="sum") / samples).backward()


def factor(block, name):
    running = block.running[name]
    return block.forms[name].dense(running.mean)[0]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def check(net, kfac, expected, *, decompose=True):
    """Factors and steps are those of the reference, expert by expert."""
    for e, (rows, a, g, gradient) in expected.items():
        block = blocks_of(kfac)[e]
        close(factor(block, "G"), g)
        if not rows:
            assert "A" not in block.running
            assert not block.ready
        else:
            close(factor(block, "A"), a)
            assert block.ready
        if decompose:
            step = em.solved(a, g, gradient, DAMPING) if rows else gradient
            close(em.matrix_of(net.experts, e, lambda p: p.grad), step)


@pytest.mark.parametrize("name", em.WAYS)
def test_every_way_has_the_factors_of_the_rows(name):
    net = em.Net(name)
    expected = em.reference(net, em.batch())
    kfac = kfac_of(net)
    backward(net, em.batch())
    for e, (*_, gradient) in expected.items():  # the reference computes the same function
        close(em.matrix_of(net.experts, e, lambda p: p.grad), gradient)
    kfac.step()
    check(net, kfac, expected)
    counts = [rows for rows, *_ in expected.values()]
    assert (0 in counts) is (net.experts.sees == "routed")
    assert kfac.coverage().covered["experts.w"] == "Kronecker(sharing='expand')"


@pytest.mark.parametrize("name", ["linear", "gathered_bmm", "grouped", "bmm"])
def test_averages_count_what_each_expert_saw(name):
    """G has every update, A those with rows."""
    net, kfac = em.Net(name), None
    kfac = kfac_of(net, factor_decay=0.5, refresh_every=1000)
    sums = {e: [0.0, 0.0, 0.0, 0.0] for e in range(em.EXPERTS)}
    for seed in range(3):
        x, t = em.batch(seed=seed)
        if seed == 1:
            x[..., 0] = -50.0  # nothing for the first expert
        backward(net, (x, t))
        for e, (rows, a, g, _) in em.reference(net, (x, t)).items():
            own = sums[e]
            own[2], own[3] = own[2] / 2 + g / 2, own[3] / 2 + 1 / 2
            if rows:
                own[0], own[1] = own[0] / 2 + a / 2, own[1] / 2 + 1 / 2
        kfac.step()
    assert sums[0][1] < sums[0][3] or name == "bmm"
    for e, (a, of_a, g, of_g) in sums.items():
        block = blocks_of(kfac)[e]
        close(factor(block, "G"), g / of_g)
        if of_a:
            close(factor(block, "A"), a / of_a)


def test_an_expert_that_sees_all_rows_is_a_linear_layer():
    net = em.Net("linear")
    x, t = em.batch()
    x[..., 0], x[..., 1] = 50.0, 40.0  # both always chosen
    twin = nn.Linear(em.WIDTH, em.OUT).double()

    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.twin = copy.deepcopy(net), twin
            with torch.no_grad():
                twin.weight.copy_(net.experts.w[0])
                twin.bias.copy_(net.experts.w_bias[0])

        def forward(self, x):
            own, c = self.net, em.routing(x)
            h = own.first(x).tanh().flatten(0, 1)
            second = F.linear(h, own.experts.w[1], own.experts.w_bias[1])
            y = self.twin(h) * c[:, :1] + second * c[:, 1:2]
            return own.head(y.tanh()).unflatten(0, (len(x), -1)).mean(1)

    other = Twin()
    kfacs = kfac_of(net), KFAC(other, damping=DAMPING, kl_clip=None, loss=MeanLoss(), exclude="net")
    for model, kfac in zip((net, other), kfacs, strict=True):
        backward(model, (x, t))
        kfac.step()
    (alike,) = kfacs[1].blocks
    for name in ("A", "G"):
        close(factor(blocks_of(kfacs[0])[0], name), factor(alike, name))
    close(net.experts.w.grad[0], twin.weight.grad)
    close(net.experts.w_bias.grad[0], twin.bias.grad)


@pytest.mark.parametrize("name", ["linear", "gathered_bmm", "grouped", "einsum"])
def test_micro_batches_are_one_batch(name):
    net = em.Net(name)
    batches = em.batch(6, 1), em.batch(4, 2)
    expected = em.reference(net, *batches)
    kfac = kfac_of(net)
    backward(net, *batches)
    kfac.step()
    check(net, kfac, expected)


@pytest.mark.parametrize("name", ["transposed", "index_select", "grouped"])
def test_gradients_of_two_backward_passes_are_added_before_they_are_squared(name):
    net, (x, t) = em.Net(name), em.batch()
    expected = em.reference(net, (x, t))
    kfac = kfac_of(net)
    net.zero_grad()
    losses = F.cross_entropy(net(x), t, reduction="none") / len(x)
    losses[:3].sum().backward(retain_graph=True)
    losses[3:].sum().backward()
    kfac.step()
    check(net, kfac, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["linear", "gathered_bmm", "grouped"])
def test_checkpointed(name, reentrant):
    net, (x, t) = em.Net(name), em.batch()
    expected = em.reference(net, (x, t))

    def call(x):
        h = net.first(x).tanh().flatten(0, 1)
        y = checkpoint(net.experts, h, em.routing(x), use_reentrant=reentrant).tanh()
        return net.head(y).unflatten(0, (len(x), -1)).mean(1)

    kfac = kfac_of(net)
    net.forward = call
    backward(net, (x, t))
    kfac.step()
    check(net, kfac, expected)


@pytest.mark.parametrize("frozen", ["w", "w_bias", "first"])
@pytest.mark.parametrize("name", ["linear", "gathered_bmm", "grouped"])
def test_frozen_parts(name, frozen):
    net = em.Net(name)
    if frozen == "first":
        net.first.requires_grad_(False)
    else:
        getattr(net.experts, frozen).requires_grad_(False)
    expected = em.reference(net, em.batch())
    kfac = kfac_of(net)
    backward(net, em.batch())
    kfac.step()
    part = {"w": slice(em.WIDTH, None), "w_bias": slice(0, em.WIDTH)}.get(frozen, slice(None))
    for e, (rows, a, g, gradient) in expected.items():
        if rows:
            a, gradient = a[part, part], gradient[:, part]
            close(factor(blocks_of(kfac)[e], "A"), a)
            step = em.solved(a, g, gradient, DAMPING)
            mix = net.experts
            of = [] if frozen == "w" else [mix.w.grad[e]]
            if frozen != "w_bias":
                of.append(mix.w_bias.grad[e, :, None])
            close(torch.cat([one.mT if one.shape[0] != em.OUT else one for one in of], 1), step)


def test_frozen_experts_have_no_block():
    net = em.Net()
    net.experts.requires_grad_(False)
    kfac = kfac_of(net)
    assert not blocks_of(kfac)
    backward(net, em.batch())
    kfac.step()
    assert kfac.coverage().uncovered["experts.w"] == "frozen"


def test_all_gradients_of_a_model_are_seen():
    """Fisher from draws, and a share of the samples: the tape, and rows of unknown samples."""
    net = em.Net("gathered_bmm")
    likelihood = natgrad.curvature.Categorical()
    kfac = kfac_of(net, curvature=ExactFisher(likelihood=likelihood))
    backward(net, em.batch())
    kfac.step()
    rows, a, _, _ = em.reference(net, em.batch())[0]
    assert rows
    close(factor(blocks_of(kfac)[0], "A"), a)
    twin = em.Net("linear")
    other = kfac_of(twin, curvature=ExactFisher(likelihood=likelihood))
    backward(twin, em.batch())
    other.step()
    for e, block in blocks_of(kfac).items():
        close(factor(block, "G"), factor(blocks_of(other)[e], "G"))
    assert factor(blocks_of(kfac)[0], "G").trace() > 0


@pytest.mark.parametrize("name", ["linear", "bmm"])
def test_a_share_of_the_samples_takes_all_rows_for_its_share(name):
    """Also where there are as many rows as if they were in the order of samples."""
    net, other = em.Net(name), em.Net(name)
    kfac, whole = kfac_of(net, statistics=0.5), kfac_of(other)
    for model, one in ((net, kfac), (other, whole)):
        backward(model, em.batch())
        one.step()
    for e, block in blocks_of(kfac).items():
        close(factor(block, "G"), factor(blocks_of(whole)[e], "G"))


@pytest.mark.parametrize("inverse", [None, Cholesky()], ids=repr)
def test_an_idle_expert_begins_with_its_first_rows(inverse):
    net = em.Net()
    kfac = kfac_of(net, inverse=inverse, refresh_every=1000)
    for seed in range(3):
        backward(net, em.batch(seed=seed))
        kfac.step()
        assert not net.experts.w.grad[em.IDLE].any()
    assert not blocks_of(kfac)[em.IDLE].ready
    table = kfac.coverage()
    assert any("1 of 4 experts wait for rows" in row[-1] for row in table.rows)
    (row,) = [row for row in kfac.health().rows if row[0] == "statistics"]
    assert row[2] == "ok"
    run = net.experts.run
    net.experts.run = lambda h, w, b, c: run(h, w, b, c.roll(1, 1))
    backward(net, em.batch(seed=3))
    raw = net.experts.w.grad[em.IDLE].clone()
    kfac.step()
    assert blocks_of(kfac)[em.IDLE].ready
    assert (net.experts.w.grad[em.IDLE] - raw).norm() > 0.01 * raw.norm() > 0


def test_their_rows_say_nothing_of_the_number_of_samples():
    """A part of the model is called, and not the model itself: layers show how many there are."""
    net, (x, t) = em.Net("bmm"), em.batch()
    kfac = kfac_of(net)
    net.zero_grad()
    h, c = torch.randn(2, em.WIDTH, dtype=torch.float64), torch.rand(2, em.EXPERTS).double()
    net.head(net.experts(h, c)).square().sum(1).mean().backward()
    assert kfac.capture.samples() == 2
    assert set(kfac.capture.passes[0].seen) == {2}
    kfac.capture.forget()
    backward(net, (x, t))
    kfac.step()
    assert kfac.steps == 1


# Uses that are not understood.


class Odd(nn.Module):
    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3)
        self.mix = nn.Module()
        self.w, self.w_bias = nn.Parameter(torch.randn(2, 3, 3)), nn.Parameter(torch.randn(2, 3))
        self.run = run
        self.double()

    def forward(self, x):
        return self.run(self, self.first(x))


ODD = {
    "elementwise": (lambda m, h: F.linear(h, (m.w * 2)[0]), r"enters (__mul__|mul)\(\)"),
    "einsum_from_behind": (
        lambda m, h: torch.einsum("no,eoi->ni", h, m.w),
        r"enters einsum\('no,eoi->ni'\)",
    ),
    "from_behind": (lambda m, h: h @ m.w[0], "other axes than its inputs"),
    "of_experts": (lambda m, h: m.w[:, 0].sum(0) + h, r"enters sum\(\)"),
    "three": (
        lambda m, h: torch.einsum("ni,ne,eoi->no", h, h[:, :2], m.w),
        r"enters einsum\(\) with 3 tensors",
    ),
    "rows": (lambda m, h: F.linear(h, m.w[0, :2]).sum(1, True) + h, "in parts of its rows"),
    "columns": (lambda m, h: F.linear(h[:, :2], m.w[0, :, :2]), "in parts of its columns"),
    "twice": (lambda m, h: h @ (m.w[0] @ m.w[1]), "is multiplied by experts' matrices"),
    "alpha": (
        lambda m, h: torch.addmm(m.w_bias[0], h, m.w[0].T, alpha=2.0),
        "with beta and alpha",
    ),
    "stacked": (lambda m, h: h @ torch.stack([m.w[0], m.w[1]]).sum(0).mT, r"enters stack\(\)"),
    "bias_times_two": (lambda m, h: F.linear(h, m.w[0], 2 * m.w_bias[0]), "not all of its uses"),
    "bias_by_itself": (lambda m, h: F.linear(h, m.w[0]) + m.w_bias.sum(), "not all of its uses"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_understood_is_refused_by_name(name):
    run, why = ODD[name]
    model = Odd(run)
    kfac = KFAC(model, kl_clip=None, damping=DAMPING, loss=MeanLoss(), split={"w": Experts()})
    x = torch.randn(6, 4, dtype=torch.float64)
    model(x).tanh().square().sum(1).mean().backward()
    raw = model.w.grad.clone()
    kfac.step()
    found = kfac.coverage().uncovered
    assert re.search(why, found["w"])
    assert torch.equal(model.w.grad, raw)
    for block in blocks_of(kfac).values():
        assert not block.ready
        assert not any(running.weight for running in block.running.values())
    (row,) = [row for row in kfac.health().rows if row[0] == "coverage"]
    assert row[2] == "low"


def test_a_use_that_is_not_seen_is_missed_in_the_sum():
    model = Odd(lambda m, h: F.linear(h, m.w[1], m.w_bias[1]))
    kfac = KFAC(model, kl_clip=None, damping=DAMPING, loss=MeanLoss(), split={"w": Experts()})
    penalty = 0.1 * model.w[0].square().sum()  # outside of the forward
    x = torch.randn(6, 4, dtype=torch.float64)
    (model(x).square().sum(1).mean() + penalty).backward()
    kfac.step()
    assert kfac.coverage().uncovered["w"].startswith("not all of its uses are seen where the exp")


@pytest.mark.parametrize(
    ("structure", "said"),
    [(EKFAC(), "EKFAC()"), (Kronecker("reduce"), "Kronecker(sharing='reduce')")],
)
def test_other_structures_are_refused_by_a_sentence(structure, said):
    kfac = kfac_of(em.Net(), structure=structure)
    assert not blocks_of(kfac)
    why = kfac.coverage().uncovered["experts.w"]
    assert why.startswith("it is a stack of experts, whose rows are told apart but not the")
    assert said in why

    def chosen(layer):
        return Kronecker() if isinstance(layer, Expert) else structure

    assert len(blocks_of(kfac_of(em.Net(), structure=chosen))) == em.EXPERTS


# What goes on around it.


def test_parts_share_their_inputs_and_may_be_multiplied_apart():
    class Gated(nn.Module):
        def __init__(self, apart):
            super().__init__()
            torch.manual_seed(1)
            self.first, self.apart = nn.Linear(4, 3), apart
            self.w = nn.Parameter(torch.randn(2, 6, 3))
            self.double()

        def forward(self, x):
            h, out = self.first(x), 0.0
            for e in range(2):
                if self.apart:
                    gate, up = F.linear(h, self.w[e, :3]), F.linear(h, self.w[e, 3:])
                else:
                    gate, up = F.linear(h, self.w[e]).chunk(2, -1)
                out = out + gate.sigmoid() * up
            return out

    kfacs = []
    for apart in (False, True):
        model = Gated(apart)
        split = {"w": Experts((3, 3))}
        kfac = KFAC(model, kl_clip=None, damping=DAMPING, loss=MeanLoss(), split=split)
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        model(x).square().sum(1).mean().backward()
        kfac.step()
        kfacs.append(kfac)
    whole, apart = ({b.name: b for b in kfac.blocks} for kfac in kfacs)
    for name in ("w.0.0", "w.0.1", "w.1.0", "w.1.1"):
        assert whole[name].shape == (1, 3, 3)
        for one in ("A", "G"):
            close(factor(whole[name], one), factor(apart[name], one))
        assert torch.equal(factor(whole[name], "A"), factor(whole["w.0.0"], "A"))
    sharing = [block for name, block in whole.items() if "w" in name and block.shares_input_with]
    assert len(sharing) >= 2


def test_rows_in_turn():
    """Gate and up row by row, of which a model multiplies by every second row."""

    def run(m, h):
        return F.linear(h, m.w[0, ::2]).sum(1, True) + F.linear(h, m.w[1])

    model = Odd(run)
    model.w = nn.Parameter(torch.randn(2, 4, 3, dtype=torch.float64))
    del model.w_bias
    split = {"w": Experts(Interleaved(2))}
    kfac = KFAC(model, kl_clip=None, damping=DAMPING, loss=MeanLoss(), split=split)
    x = torch.randn(6, 4, dtype=torch.float64)
    model(x).square().sum(1).mean().backward()
    kfac.step()
    ready = {b.name for b in kfac.blocks if b.ready}
    assert ready >= {"w.0.0", "w.1.0", "w.1.1"}
    assert "w.0.1" not in ready


def test_stays_when_it_is_copied_and_saved():
    net = em.Net("gathered_bmm")
    kfac = kfac_of(net, update_every=2, refresh_every=2)
    steps = partial(_train, range(3))
    steps(net, kfac)
    other, second = copy.deepcopy((net, kfac))
    third = em.Net("gathered_bmm")
    fresh = kfac_of(third, update_every=2, refresh_every=2)
    third.load_state_dict(net.state_dict())
    fresh.load_state_dict(copy.deepcopy(kfac.state_dict()))
    for model, one in ((net, kfac), (other, second), (third, fresh)):
        _train(range(3, 6), model, one)
        assert not blocks_of(one)[em.IDLE].ready
    for p, q, r in zip(net.parameters(), other.parameters(), third.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


def _train(seeds, net, kfac):
    for seed in seeds:
        backward(net, em.batch(seed=seed))
        kfac.step()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad


def test_two_modules_may_share_their_experts():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = em.Net()
            self.again = em.Mixture("gathered_bmm").double()
            self.again.w, self.again.w_bias = self.net.experts.w, self.net.experts.w_bias

        def forward(self, x):
            h, c = self.net.first(x).tanh().flatten(0, 1), em.routing(x)
            y = self.net.experts(h, c) + self.again(h, c)
            return self.net.head(y.tanh()).unflatten(0, (len(x), -1)).mean(1)

    model, split = Twice(), {"*.w": Experts()}
    kfac = KFAC(model, kl_clip=None, damping=DAMPING, loss=MeanLoss(), split=split)
    backward(model, em.batch())
    kfac.step()
    own = blocks_of(kfac)
    assert len(own) == em.EXPERTS
    assert [len(block.layers) for block in own.values()] == [2] * em.EXPERTS
    _, a, *_ = em.reference(model.net, em.batch())[0]
    close(factor(own[0], "A"), a)  # each row twice
    assert own[0].ready


def test_nothing_is_kept_of_a_forward_pass():
    net = em.Net("gathered_bmm")
    kfac = kfac_of(net)
    backward(net, em.batch())
    kfac.step()
    seen = []
    run = net.experts.run

    def watched(h, w, b, c):
        seen.append(weakref.ref(h.untyped_storage()))
        return run(h, w, b, c)

    net.experts.run = watched
    backward(net, em.batch())
    kfac.step()
    gc.collect()
    net.experts.run = run
    backward(net, em.batch())
    kfac.step()
    gc.collect()
    assert seen[0]() is None


def test_another_place_in_a_step_without_statistics():
    """Nothing is watched on steps that do not update, nor in evaluation."""
    net = em.Net()
    kfac = kfac_of(net, update_every=3)
    for seed in range(4):
        backward(net, em.batch(seed=seed))
        kfac.step()
        with torch.no_grad():
            net(em.batch()[0])
    assert int(blocks_of(kfac)[0].dropped) == 0
    assert kfac.capture.armed is False


def test_a_pass_that_is_unwatched_is_left_out():
    net = em.Net()
    expected = em.reference(net, em.batch())
    kfac = kfac_of(net)
    net.zero_grad()
    x, t = em.batch()
    F.cross_entropy(net(x), t).backward()
    with kfac.unwatched():
        net(em.batch(seed=7)[0]).square().sum().backward()
    kfac.step()
    check(net, kfac, expected, decompose=False)


def test_muon_has_their_curvature_or_none():
    split = {"experts.w": Experts()}
    found = {
        name: {type(b.structure) for b in blocks_of(optimizer.kfac).values()}
        for name, optimizer in {
            "default": NaturalMuon(em.Net(), split=split),
            "plain": NaturalMuon(em.Net(), split=split, geometry=natgrad.Spectral(power=0)),
            "other": NaturalMuon(em.Net(), split=split, structure=EKFAC()),
        }.items()
    }
    assert found == {"default": {Kronecker}, "plain": {Identity}, "other": {Identity}}


def test_regions_of_experts_are_refused():
    with pytest.raises(
        CoverageError, match=r"regions has 'exp\*', which matches the experts 'exper"
    ):
        kfac_of(em.Net(), loss=MeanLoss(regions={"exp*": 3.0}))


def test_a_loss_with_gradients_through_experts_is_refused():
    net, (x, t) = em.Net("gathered_bmm"), em.batch()
    net.first.requires_grad_(False)
    net.head.requires_grad_(False)
    kfac = kfac_of(net)
    x.requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(net(x), t), x, create_graph=True)
    (F.cross_entropy(net(x), t) + g.square().sum()).backward()
    with pytest.raises(
        CaptureError, match=r"depends on gradients that go through Mixture 'experts"
    ):
        kfac.step()


@pytest.mark.parametrize("name", ["einsum", "bmm", "broadcast"])
@pytest.mark.parametrize("half", [False, True])
def test_in_sixteen_bits(name, half):
    """Under autocast, and with parameters of that kind."""
    net, (x, t) = em.Net(name), em.batch()
    expected = em.reference(net, (x, t))
    dtype = torch.bfloat16 if half else torch.float32
    net.to(dtype)
    kfac = kfac_of(net)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not half):
        loss = F.cross_entropy(net(x.to(dtype)).float(), t)
    loss.backward()
    kfac.step()
    for e, (_, a, g, _) in expected.items():
        block = blocks_of(kfac)[e]
        assert block.ready
        for one, other in ((factor(block, "A"), a), (factor(block, "G"), g)):
            assert (one.double() - other).norm() <= 0.03 * other.norm()


def test_other_parameters_of_the_module_have_their_own_blocks():
    class Shifted(em.Mixture):
        def __init__(self):
            super().__init__("gathered_bmm")
            self.shift = nn.Parameter(torch.randn(em.OUT, dtype=torch.float64))

        def forward(self, h, c):
            return super().forward(h, c) + self.shift

    net = em.Net("gathered_bmm")
    net.experts = Shifted().double()
    kfac = kfac_of(net)
    for seed in range(2):
        backward(net, em.batch(seed=seed))
        kfac.step()
    assert kfac.coverage().covered["experts.shift"] == "Diagonal()"
    ready = {block.name for block in kfac.blocks if block.ready}
    assert ready == {b.name for b in kfac.blocks} - {IDLE}
    assert isinstance(net.experts.shift, nn.Parameter)


def test_after_an_error_in_the_forward_nothing_is_watched():
    net = em.Net()
    kfac = kfac_of(net)
    run = net.experts.run

    def fails(h, w, b, c):
        run(h, w, b, c)
        raise RuntimeError("no")

    net.experts.run = fails
    with pytest.raises(RuntimeError, match="no"):
        net(em.batch()[0])
    assert torch.overrides._get_current_function_mode() is None
    net.experts.run = run
    expected = em.reference(net, em.batch())
    backward(net, em.batch())
    kfac.step()
    check(net, kfac, expected)


def test_a_stack_of_one_expert():
    class One(nn.Module):
        def __init__(self, run):
            super().__init__()
            torch.manual_seed(2)
            self.first, self.run = nn.Linear(4, 3), run
            self.w = nn.Parameter(torch.randn(1, 5, 3))
            self.double()

        def forward(self, x):
            return self.run(self.first(x), self.w)

    found = []
    for run in (
        lambda h, w: F.linear(h, w[0]),
        lambda h, w: torch.bmm(h[None], w.mT)[0],
        lambda h, w: torch.einsum("ni,eoi->no", h, w),
        lambda h, w: torch.bmm(w[torch.zeros(len(h), dtype=torch.int64)], h[..., None])[..., 0],
    ):
        model = One(run)
        split = {"w": Experts()}
        kfac = KFAC(model, kl_clip=None, damping=DAMPING, loss=MeanLoss(), split=split)
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        model(x).square().sum(1).mean().backward()
        kfac.step()
        found.append(model.w.grad)
        assert kfac.coverage().covered["w"]
        assert all(block.ready for block in kfac.blocks)
    for one in found[1:]:
        close(one, found[0])


def test_narrow_matrices():
    """Axes of one entry, which lie nowhere in particular."""
    for out, inputs in ((1, 3), (3, 1), (1, 1), (2, 2)):
        found = []
        for run in (
            lambda h, w: sum(F.linear(h, w[e]) for e in range(2)),
            lambda h, w: torch.bmm(h.expand(2, -1, -1), w.mT).sum(0),
            lambda h, w: (h @ w.mT).sum(0),
            lambda h, w: sum(h @ w.transpose(1, 2)[e] for e in range(2)),
        ):
            torch.manual_seed(2)
            model = nn.Module()
            model.first = nn.Linear(4, inputs).double()
            model.w = nn.Parameter(torch.randn(2, out, inputs, dtype=torch.float64))
            model.forward = lambda x, m=model, run=run: run(m.first(x), m.w)
            split = {"w": Experts()}
            kfac = KFAC(model, kl_clip=None, damping=DAMPING, loss=MeanLoss(), split=split)
            x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            model(x).square().sum(1).mean().backward()
            kfac.step()
            assert all(block.ready for block in kfac.blocks), (out, inputs)
            found.append(model.w.grad)
        for one in found[1:]:
            close(one, found[0])


def test_an_idle_expert_is_not_decomposed():
    net, made = em.Net(), []

    class Counting(Eigen):
        def decompose(self, factor, damping):
            made.append(len(factor))
            return super().decompose(factor, damping)

    kfac = kfac_of(net, inverse=Counting())
    for seed in range(2):
        backward(net, em.batch(seed=seed))
        kfac.step()
    assert sum(made) == 2 * 2 * (em.EXPERTS - 1 + 2)  # of two linear layers as well


def test_all_experts_are_applied_at_once():
    """What a step calls does not grow with the number of experts."""
    stacks = []
    for experts in (2, 6):
        model = nn.Module()
        model.first = nn.Linear(4, 4)
        model.w = nn.Parameter(torch.randn(experts, 4, 4))
        model.forward = lambda x, m=model: torch.einsum("ni,eoi->no", m.first(x), m.w)
        kfac = KFAC(model, kl_clip=None, split={"w": Experts()})
        model(torch.randn(6, 4)).square().sum(1).mean().backward()
        kfac.step()
        stacks.append([stack.shape[0] for stack in kfac.preconditioning.stacks])
    assert stacks == [[2, 1], [6, 1]]


def test_compiled():
    net = em.Net("bmm")
    expected = em.reference(net, em.batch())
    model = torch.compile(net, backend="eager")
    kfac = kfac_of_compiled(model, net)
    backward(net, em.batch(), call=model)
    kfac.step()
    check(net, kfac, expected)


def kfac_of_compiled(model, net):
    split = {"experts.w": Experts(inputs_first=net.experts.inputs_first)}
    settings = {"damping": DAMPING, "kl_clip": None, "loss": MeanLoss(), "split": split}
    return KFAC(model, **settings, update_every=1, refresh_every=1)


@pytest.mark.parametrize("name", ["linear", "index_select", "bmm"])
def test_the_gradient_of_an_input_alone_counts_for_nothing(name):
    """As adversarial training takes it, before the loss that is trained."""
    net, (x, t) = em.Net(name), em.batch()
    expected = em.reference(net, (x, t))
    kfac = kfac_of(net)
    net.zero_grad()
    inputs = x.clone().requires_grad_()
    loss = F.cross_entropy(net(inputs), t)
    (toward,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert toward.any()
    loss.backward()
    kfac.step()
    check(net, kfac, expected)


def test_a_parameter_of_another_class_is_refused_by_name():
    class Packed(nn.Parameter):
        pass

    net = em.Net()
    net.experts.w = Packed(net.experts.w.detach())
    kfac = kfac_of(net)
    backward(net, em.batch())
    kfac.step()
    assert kfac.coverage().uncovered["experts.w"] == "in forward it is a Packed"
