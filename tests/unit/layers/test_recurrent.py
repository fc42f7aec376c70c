"""Recurrent modules are watched by a computation equal to the fused one, on updates only."""

import copy
import pickle
from itertools import combinations, product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import natgrad
from recurrent_cases import (
    CELLS,
    HIDDEN,
    INPUTS,
    KINDS,
    SAMPLES,
    STEPS,
    Loop,
    Net,
    batch,
    dense,
    make,
    sample_loss,
    sequences,
    step,
)


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Spy(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def results(rnn, x, state):
    rnn.zero_grad()
    leaf = x.data if isinstance(x, PackedSequence) else x
    leaf.grad = None
    out, end = rnn(x, state)
    out = out.data if isinstance(out, PackedSequence) else out
    ends = end if isinstance(end, tuple) else (end,)
    (sample_loss(out) + sum(e.sin().sum() for e in ends)).backward()
    grads = [p.grad for p in rnn.parameters()] + [leaf.grad]
    return [out.detach(), *(e.detach() for e in ends), *grads]


def options(half=None):
    """All of them; or a half, in which any three meet in all ways, and the rest are the other."""
    for layers, both, bias, first in product((1, 3), (False, True), (False, True), (False, True)):
        if half is None or (layers == 3) ^ both ^ bias ^ first == half:
            yield {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first}


def test_halves_of_the_options():
    halves = [[tuple(one.values()) for one in options(half)] for half in (False, True)]
    assert sorted(halves[0] + halves[1]) == sorted(tuple(one.values()) for one in options())
    for half in halves:
        for axes in combinations(range(4), 3):
            assert len({tuple(one[axis] for axis in axes) for one in half}) == 8


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("layout", ["batch", "sample", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_are_those_of_the_fused_function(kind, layout, given):
    for chosen in options(half=given):
        rnn = make(kind, **chosen)
        x, n = torch.randn(STEPS, SAMPLES, INPUTS, requires_grad=True), SAMPLES
        if layout == "sample":
            x, n = torch.randn(STEPS, INPUTS, requires_grad=True), None
        elif layout == "packed":
            packed = pack_sequence(sequences(), enforce_sorted=False)
            x = packed._replace(data=packed.data.requires_grad_())
        elif chosen["batch_first"]:
            x = torch.randn(SAMPLES, STEPS, INPUTS, requires_grad=True)
        state = None
        if given:
            lead = (chosen["num_layers"] * (1 + chosen["bidirectional"]),) + ((n,) if n else ())
            state = torch.randn(*lead, rnn.proj_size or HIDDEN)
            state = (state, torch.randn(*lead, HIDDEN)) if isinstance(rnn, nn.LSTM) else state
        fused = results(rnn, x, state)
        kfac = natgrad.KFAC(rnn, kl_clip=None)
        assert kfac.capture.armed
        watched = results(rnn, x, state)
        kfac.detach()
        for a, b in zip(watched, fused, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            assert a.stride() == b.stride() or a.numel() < 2 or not a.is_contiguous()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_are_those_of_the_fused_function(kind, bias):
    cls, own = CELLS[kind]
    net = Loop(cls(INPUTS, HIDDEN, bias=bias, **own))
    x = batch().requires_grad_()

    def grads():
        out = net(x)
        found = torch.autograd.grad(sum(map(sample_loss, out)), [x, *net.parameters()])
        return [*out, *found]

    fused = grads()
    natgrad.KFAC(net, kl_clip=None)
    for a, b in zip(grads(), fused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    one = net.cell(x[0, 0])  # without a batch
    assert (one[0] if kind == "lstm" else one).shape == (HIDDEN,)


def test_the_fused_function_runs_where_nothing_is_watched():
    net, x = Net(make("lstm")), batch()

    def fused(grad=True):
        with Spy() as spy, torch.set_grad_enabled(grad):
            out = net(x)
        if grad:
            sum(map(sample_loss, out)).backward()
        return torch.lstm in spy.seen

    kfac = natgrad.KFAC(net, kl_clip=None, update_every=2)
    assert fused(grad=False)
    assert not fused()
    kfac.step()
    assert fused()
    kfac.step()
    assert not fused()
    kfac.detach()
    assert fused()


def test_an_error_in_forward_leaves_nothing_behind():
    net = Net(make("gru"))
    natgrad.KFAC(net, kl_clip=None)
    with pytest.raises(RuntimeError, match="input_size"):
        net(torch.randn(2, 3, INPUTS + 1))
    assert torch._C._len_torch_function_stack() == 0


def test_without_a_graph_dropout_is_drawn_as_with_one():
    """A reentrant checkpoint runs its segment without a graph first, and again with one."""
    net, x = Net(make("lstm", num_layers=2, dropout=0.5)), batch()
    natgrad.KFAC(net, kl_clip=None)
    with Spy() as spy, torch.no_grad():
        net(x)
        assert torch.lstm not in spy.seen
        net.eval()(x)
        assert torch.lstm in spy.seen


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_not_watched(again):
    net, x = Net(make("lstm")), batch()
    natgrad.KFAC(net, kl_clip=None)
    other = again(net)
    with Spy() as spy:
        out = other(x)
    assert torch.lstm in spy.seen
    torch.testing.assert_close(torch.stack(out), torch.stack(net(x)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing(reentrant, dropout):
    class Saving(Net):
        def forward(self, x):
            return list(checkpoint(lambda x: self.rnn(x)[0], x, use_reentrant=reentrant))

    blocks = []
    x = batch().requires_grad_()
    rnn = make("lstm_proj", batch_first=True, num_layers=2, dropout=dropout)
    for cls in (Net, Saving):
        torch.manual_seed(1)
        rnn.zero_grad()
        kfac, raw = step(cls(rnn), x, structure=natgrad.Full())
        kfac.detach()
        blocks.append([*map(dense, kfac.blocks), *raw.values()])
    for a, b in zip(*blocks, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_dropout_is_between_layers_and_only_in_training():
    rnn = make("rnn_relu", num_layers=2, dropout=0.5, bias=False, batch_first=True)
    for p in rnn.parameters():
        nn.init.constant_(p, 1 / 8)
    net, x = Net(rnn), torch.ones(64, 1, INPUTS)
    seen = []
    kfac = natgrad.KFAC(net, kl_clip=None)
    kfac.capture.on_pair = lambda use, a, g, this: seen.append((use[0].name, a))
    sum(map(sample_loss, net(x))).backward()
    inputs = dict(seen)
    assert (inputs["rnn.ih_l0"] == 1).all()
    share = (inputs["rnn.ih_l1"] == 0).double().mean()
    assert 0.3 < share < 0.7
    torch.testing.assert_close(inputs["rnn.ih_l1"].max(), torch.tensor(2 * 3 / 8))
    net.eval()
    assert len({float(out.detach().sum()) for out in net(x)}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_coverage_lists_every_parameter(kind):
    net = Net(make(kind, num_layers=2, bidirectional=True))
    kfac = natgrad.KFAC(net, kl_clip=None)
    assert set(kfac.coverage().covered) == {name for name, _ in net.named_parameters()}
    assert not kfac.coverage().uncovered


def test_a_forward_of_its_own_is_not_covered():
    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    net = nn.Sequential(Own(INPUTS, HIDDEN), nn.Linear(HIDDEN, 2))
    kfac = natgrad.KFAC(net, kl_clip=None)
    assert set(kfac.coverage().covered) == {"1.weight", "1.bias"}


@pytest.mark.parametrize("structure", [natgrad.Kronecker(), natgrad.EKFAC()])
def test_training_lowers_the_loss(structure):
    torch.set_default_dtype(torch.float32)
    net = nn.ModuleDict({"rnn": nn.LSTM(INPUTS, 16, 2, batch_first=True, dropout=0.1)})
    net["head"] = nn.Linear(16, 1)
    net.forward = lambda x: net["head"](net["rnn"](x)[0])[..., 0]
    x = torch.randn(64, 10, INPUTS)
    y = x[..., 0].cumsum(1).tanh()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    kfac = natgrad.KFAC(
        net,
        optimizer,
        update_every=2,
        refresh_every=4,
        structure=structure,
        loss=natgrad.MeanLoss(10),
    )
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        kfac.step()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
