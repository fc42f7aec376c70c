"""Recurrent modules: the watched computation is the fused one, and its statistics are exact.

The oracle runs one sample at a time through a loop over layers, directions and time steps.
"""

import copy
import pickle
from collections import defaultdict
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import natgrad

INPUTS, HIDDEN, STEPS, SAMPLES, DAMPING = 3, 4, 5, 6, 1e-2
LENGTHS = (2, 5, 3, 5, 1, 4)
KINDS = {
    "rnn_tanh": (nn.RNN, {}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTM, {}),
    "lstm_proj": (nn.LSTM, {"proj_size": 2}),
    "gru": (nn.GRU, {}),
}
CELLS = {
    "rnn_tanh": (nn.RNNCell, {}),
    "rnn_relu": (nn.RNNCell, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTMCell, {}),
    "gru": (nn.GRUCell, {}),
}
STRUCTURES = {
    "expand": natgrad.Kronecker(),
    "reduce": natgrad.Kronecker("reduce"),
    "full": natgrad.Full(),
    "diagonal": natgrad.Diagonal(),
}


def make(kind, dtype=torch.float64, **options):
    cls, own = KINDS[kind]
    return cls(INPUTS, HIDDEN, **own, **options).to(dtype)


class Net(nn.Module):
    """``[n, t, d]`` or lists of ``[t, d]`` to be packed -> a list of outputs ``[t, d]``."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, *xs):
        return [out for x in xs for out in self.run(x)]

    def run(self, x):
        if isinstance(x, list):
            out, _ = self.rnn(pack_sequence(x, enforce_sorted=False))
            rows, lengths = pad_packed_sequence(out, batch_first=True)
            return [r[:n] for r, n in zip(rows, lengths, strict=True)]
        if self.rnn.batch_first:
            return list(self.rnn(x)[0])
        return list(self.rnn(x.transpose(0, 1))[0].transpose(0, 1))


class Loop(nn.Module):
    """A cell in a loop over time, ``[n, t, d]``."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, out = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return list(torch.stack(out, 1))


def sample_loss(out):
    return (out + out.cos()).mul(torch.arange(1.0, 1 + out.numel()).view_as(out)).sum() / 7


def sequences(lengths=LENGTHS, dtype=torch.float64):
    return [torch.randn(n, INPUTS, dtype=dtype) for n in lengths]


def batch(dtype=torch.float64):
    return torch.randn(SAMPLES, STEPS, INPUTS, dtype=dtype)


def step(net, *xs, **settings):
    """One step of the mean loss; returns KFAC and the gradients before it, by id."""
    settings = {
        "kl_clip": None,
        "damping": DAMPING,
        "update_every": 1,
        "refresh_every": 1,
    } | settings
    kfac = natgrad.KFAC(net, **settings)
    (sum(sample_loss(out) for out in net(*xs)) / SAMPLES).backward()
    raw = {id(p): p.grad.clone() for p in net.parameters() if p.grad is not None}
    kfac.step()
    return kfac, raw


def dense(block):
    return block.structure.dense(block.kept(), block.forms, block.shape)


def factor(block, name):
    return block.forms[name].dense(block.kept()[name])[0]


def matrix(block, read):
    """``read(parameter)`` of a block's parameters as ``[rows, cols]``."""
    return torch.cat([read(p).reshape(block.shape[1], -1) for p in block.parameters], -1)


# The oracle.


def loop(rnn, x):
    """One sample ``x [t, d]`` -> outputs ``[t, ways * hidden]``, and by projection the pairs
    ``(input, output)`` of all time steps."""
    seen = defaultdict(list)
    kind = rnn.mode.removeprefix("RNN_").lower()

    def project(name, a):
        w, b = getattr(rnn, f"weight_{name}"), getattr(rnn, f"bias_{name}", None)
        out = w @ a if b is None or not rnn.bias else w @ a + b
        seen[name].append((a, out))
        return out

    for depth in range(rnn.num_layers):
        ways = []
        for suffix in ("", "_reverse") if rnn.bidirectional else ("",):
            place, outs = f"_l{depth}{suffix}", {}
            h = x.new_zeros(rnn.proj_size or HIDDEN)
            c = x.new_zeros(HIDDEN)
            times = range(len(x))
            for t in reversed(times) if suffix else times:
                u, v = project("ih" + place, x[t]), project("hh" + place, h)
                if kind == "lstm":
                    i, f, g, o = (u + v).chunk(4)
                    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                    h = torch.sigmoid(o) * torch.tanh(c)
                    if rnn.proj_size:
                        h = project("hr" + place, h)
                elif kind == "gru":
                    (ur, uz, un), (vr, vz, vn) = u.chunk(3), v.chunk(3)
                    z = torch.sigmoid(uz + vz)
                    n = torch.tanh(un + torch.sigmoid(ur + vr) * vn)
                    h = (1 - z) * n + z * h
                else:
                    h = getattr(torch, kind)(u + v)
                outs[t] = h
            ways.append(torch.stack([outs[t] for t in times]))
        x = torch.cat(ways, -1)
    return x, seen


def oracle(rnn, samples):
    """By projection and sample: ``a [t, cols]`` and ``g [t, rows]`` of that sample's own loss."""
    pairs = defaultdict(list)
    for x in samples:
        out, seen = loop(rnn, x)
        names = list(seen)
        outputs = [o for name in names for _, o in seen[name]]
        found = iter(torch.autograd.grad(sample_loss(out), outputs))
        for name in names:
            a = torch.stack([a.detach() for a, _ in seen[name]])
            if rnn.bias and not name.startswith("hr"):
                a = torch.cat([a, torch.ones(len(a), 1)], 1)
            pairs[name].append((a, torch.stack([next(found) for _ in seen[name]])))
    return pairs


def outer(v):
    return torch.outer(v, v)


def expected(pairs, name):
    """The dense block of one projection."""
    n = len(pairs)
    if name == "expand":
        a = sum(a.T @ a for a, _ in pairs) / sum(len(a) for a, _ in pairs)
        return torch.kron(sum(g.T @ g for _, g in pairs) / n, a)
    if name == "reduce":
        a = sum(outer(a.mean(0)) for a, _ in pairs) / n
        return torch.kron(sum(outer(g.sum(0)) for _, g in pairs) / n, a)
    full = sum(outer((g.T @ a).flatten()) for a, g in pairs) / n
    return full.diag().diag() if name == "diagonal" else full


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# The watched computation is the fused one.


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


def options():
    for layers, both, bias, first in product((1, 3), (False, True), (False, True), (False, True)):
        yield {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first}


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("layout", ["batch", "sample", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_are_those_of_the_fused_function(kind, layout, given):
    for chosen in options():
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


# Statistics against the oracle.


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chosen",
    [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}],
    ids=["plain", "deep", "no_bias"],
)
def test_blocks_are_those_of_a_loop_over_samples(kind, structure, packed, chosen):
    rnn = make(kind, **chosen)
    x = sequences() if packed else batch()
    pairs = oracle(rnn, x)
    kfac, raw = step(Net(rnn), x, structure=STRUCTURES[structure])
    assert {b.name for b in kfac.blocks} == {f"rnn.{name}" for name in pairs}
    for block in kfac.blocks:
        want = expected(pairs[block.name.removeprefix("rnn.")], structure)
        torch.testing.assert_close(dense(block), want, rtol=1e-9, atol=1e-11)
        g = matrix(block, lambda p: raw[id(p)])
        solved = torch.linalg.solve(want + DAMPING * torch.eye(len(want)), g.flatten())
        got = matrix(block, lambda p: p.grad).flatten()
        torch.testing.assert_close(got, solved, rtol=1e-9, atol=1e-9 * float(solved.abs().max()))


def sample_gradients(net, samples):
    """By parameter, ``[n, ...]``: each sample alone through the fused function."""
    rows = defaultdict(list)
    for xs in samples:
        net.zero_grad()
        sum(sample_loss(out) for out in net(*xs)).backward()
        for name, p in net.named_parameters():
            rows[name].append(p.grad.clone())
    net.zero_grad()
    return {name: torch.stack(g) for name, g in rows.items()}


def full_block(grads, block, net):
    names = {id(p): name for name, p in net.named_parameters()}
    whole = [grads[names[id(p)]].reshape(SAMPLES, block.shape[1], -1) for p in block.parameters]
    rows = torch.cat(whole, -1).flatten(1)
    return rows.T @ rows / SAMPLES


@pytest.mark.parametrize("kind", CELLS)
def test_full_blocks_of_a_cell_take_its_calls_together(kind):
    cls, own = CELLS[kind]
    net, x = Loop(cls(INPUTS, HIDDEN, **own)), batch()
    grads = sample_gradients(net, [(x[n : n + 1],) for n in range(SAMPLES)])
    kfac, _ = step(net, x, structure=natgrad.Full())
    assert [b.name for b in kfac.blocks] == ["cell.ih", "cell.hh"]
    for block in kfac.blocks:
        torch.testing.assert_close(
            dense(block), full_block(grads, block, net), rtol=1e-9, atol=1e-11
        )


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("structure", ["expand", "reduce"])
def test_a_cell_in_a_loop_is_a_sequence(kind, structure):
    rnn, x = make(kind), batch()
    cls, own = CELLS[kind]
    cell = cls(INPUTS, HIDDEN, **own)
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in rnn.state_dict().items()})
    one, _ = step(Net(rnn), x, structure=STRUCTURES[structure])
    two, _ = step(Loop(cell), x, structure=STRUCTURES[structure])
    for a, b in zip(one.blocks, two.blocks, strict=True):
        torch.testing.assert_close(dense(a), dense(b), rtol=1e-10, atol=1e-12)


def test_samples_of_two_packed_calls_stay_together():
    """Each call sorts its samples by length, so they come in different orders."""
    net = Net(make("gru"))
    one, two = sequences(LENGTHS), sequences(LENGTHS[::-1])
    grads = sample_gradients(net, [([a], [b]) for a, b in zip(one, two, strict=True)])
    kfac, _ = step(net, one, two, structure=natgrad.Full())
    for block in kfac.blocks:
        torch.testing.assert_close(
            dense(block), full_block(grads, block, net), rtol=1e-9, atol=1e-11
        )


class Classifier(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0].mean(1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_fisher(kind, frozen):
    """Also where the gradient of the input projection is only wanted for the hidden one."""
    net, x = Classifier(make(kind, batch_first=True)), batch()
    if frozen:
        net.rnn.weight_ih_l0.requires_grad_(False)
        net.rnn.bias_ih_l0.requires_grad_(False)
    kfac = natgrad.KFAC(
        net,
        kl_clip=None,
        update_every=1,
        structure=natgrad.Full(),
        curvature=natgrad.ExactFisher(),
    )
    out = net(x)
    kfac.observe(out)
    nn.functional.cross_entropy(out, torch.zeros(SAMPLES, dtype=torch.long)).backward()
    kfac.step()
    assert len(kfac.blocks) == (3 if kind == "lstm_proj" else 2) - frozen
    kfac.detach()
    for block in kfac.blocks:
        total = 0
        for n in range(SAMPLES):
            logits = net(x[n : n + 1])[0]
            rows = [torch.autograd.grad(z, block.parameters, retain_graph=True) for z in logits]
            jac = torch.stack(
                [torch.cat([g.reshape(block.shape[1], -1) for g in r], -1).flatten() for r in rows]
            )
            p = logits.softmax(0).detach()
            total = total + jac.T @ (p.diag() - outer(p)) @ jac / SAMPLES
        torch.testing.assert_close(dense(block), total, rtol=1e-9, atol=1e-12)


# Around the computation.


class Spy(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_a_frozen_parameter_leaves_the_other_blocks_exact(frozen):
    rnn, x = make("gru"), batch()
    pairs = oracle(rnn, x)
    getattr(rnn, frozen).requires_grad_(False)
    kfac, _ = step(Net(rnn), x)
    assert set(kfac.coverage().uncovered) == {f"rnn.{frozen}"}
    for block in kfac.blocks:
        own = pairs[block.name.removeprefix("rnn.")]
        want = sum(g.T @ g for _, g in own) / SAMPLES
        torch.testing.assert_close(factor(block, "G"), want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float32(structure):
    torch.set_default_dtype(torch.float32)
    rnn, x = make("lstm_proj", torch.float32, bidirectional=True), sequences(dtype=torch.float32)
    kfac, _ = step(Net(rnn), x, structure=STRUCTURES[structure])
    pairs = oracle(rnn, x)
    for block in kfac.blocks:
        want = expected(pairs[block.name.removeprefix("rnn.")], structure)
        torch.testing.assert_close(dense(block), want, rtol=1e-3, atol=1e-4 * float(want.max()))


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
        net, optimizer, update_every=2, refresh_every=4, structure=structure, terms_per_sample=10
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
