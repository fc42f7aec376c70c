"""Recurrent networks, and an oracle that runs one sample at a time through a loop over layers,
directions and time steps."""

from collections import defaultdict

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

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
