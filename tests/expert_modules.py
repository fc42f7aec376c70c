"""Mixtures of experts in one parameter, multiplied in all ways that are known; and their oracle.

Each way is a function from rows ``h [R, in]``, weights and routing to ``y [R, out]``, the sum over
an expert's outputs times the weight ``c [R, E]`` that the row has for it. `reference` computes the
same row by row, with a tensor for the output of each expert for each row, and takes the factors
from these.
"""

import torch
import torch.nn.functional as F
from torch import nn

EXPERTS, WIDTH, OUT, TOKENS, CLASSES = 4, 3, 5, 3, 3
IDLE = 2  # gets no row unless all experts see all rows
WAYS = {}


def way(sees="routed", *, inputs_first=False, bias=True):
    """``sees``: which rows an expert sees: those routed to it, all, padded, or weighted before."""

    def add(function):
        WAYS[function.__name__] = (function, sees, inputs_first, bias)
        return function

    return add


def routing(x):
    """``c [R, E]``: two experts a row, never the idle one, and none whose score is below -50."""
    scores = x.detach().flatten(0, -2)[:, :EXPERTS].clone()
    scores[:, IDLE] = -100.0
    top = scores.topk(2, 1)
    shares = top.values.softmax(1).masked_fill(top.values < -50, 0.0)
    return torch.zeros_like(scores).scatter(1, top.indices, shares)


def each(c):
    """For each expert that has rows: its number, its rows, and their weights ``[n, 1]``."""
    for e in range(EXPERTS):
        rows = c[:, e].nonzero().flatten()
        if len(rows):
            yield e, rows, c[rows, e, None]


def looped(one):
    def run(h, w, b, c):
        y = h.new_zeros(len(h), OUT)
        for e, rows, weight in each(c):
            y = y.index_add(0, rows, one(h[rows], w, b, e) * weight)
        return y

    run.__name__ = one.__name__
    return run


def loop(*args, **kwargs):
    return lambda one: way(*args, **kwargs)(looped(one))


@loop()
def linear(x, w, b, e):
    return F.linear(x, w[e], b[e])


@loop()
def linear_of_a_tensor_index(x, w, b, e):
    return F.linear(x, w[torch.tensor(e)], b[torch.tensor(e)])


@loop()
def transposed(x, w, b, e):
    return x @ w[e].mT + b[e]


@loop(inputs_first=True)
def matmul(x, w, b, e):
    return x @ w[e] + b[e]


@loop()
def mm_of_unbound(x, w, b, e):
    return torch.mm(x, w.unbind()[e].t()).add_(b[e])


@loop()
def from_the_left(x, w, b, e):
    return (w[e] @ x.mT).mT + b[e]


@loop()
def addmm(x, w, b, e):
    return torch.addmm(b[e], x, w[e].T)


@loop()
def vectors(x, w, b, e):
    return torch.stack([torch.mv(w[e], one) for one in x]) + b[e]


@loop(inputs_first=True)
def vectors_from_the_right(x, w, b, e):
    return torch.stack([one @ w[e] for one in x]) + b[e]


@loop()
def einsum_of_one(x, w, b, e):
    return torch.einsum("ni,oi->no", x, w[e]) + b[e]


@loop()
def clone(x, w, b, e):
    return F.linear(x, w[e].clone(), b[e])


@loop(inputs_first=True)
def contiguous(x, w, b, e):
    return F.linear(x, w.mT.contiguous()[e], b[e])


@loop()
def a_slice(x, w, b, e):
    return torch.bmm(x[None], w[e : e + 1].mT)[0] + b[e]


def pairs_of(c):
    rows, ids = c.nonzero(as_tuple=True)
    return rows, ids, c[rows, ids, None]


def gathered(one):
    def run(h, w, b, c):
        rows, ids, weight = pairs_of(c)
        return h.new_zeros(len(h), OUT).index_add(0, rows, one(h[rows], w, b, ids) * weight)

    run.__name__ = one.__name__
    return run


def gather(*args, **kwargs):
    return lambda one: way(*args, **kwargs)(gathered(one))


@gather()
def gathered_bmm(x, w, b, ids):
    return torch.bmm(w[ids], x.unsqueeze(-1)).squeeze(-1).add_(b[ids])


@gather(inputs_first=True)
def gathered_bmm_from_the_right(x, w, b, ids):
    out = torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1)
    out.add_(b[ids])
    return out


@gather()
def index_select(x, w, b, ids):
    return (x.unsqueeze(1) @ w.index_select(0, ids).mT).squeeze(1) + b[ids]


@gather()
def gathered_einsum(x, w, b, ids):
    return torch.einsum("ri,roi->ro", x, w[ids]) + b[ids]


@gather(inputs_first=True)
def gathered_transpose(x, w, b, ids):
    return torch.einsum("ri,roi->ro", x, w.transpose(1, 2)[ids]) + b[ids]


@way()
def table_of_experts(h, w, b, c):
    ids = c.topk(2, 1).indices
    out = torch.einsum("ni,nkoi->nko", h, w[ids]) + b[ids]
    return (out * c.gather(1, ids).unsqueeze(-1)).sum(1)


@gather()
def grouped(x, w, b, ids):
    order = ids.argsort(stable=True)
    ends = torch.bincount(ids, minlength=EXPERTS).cumsum(0).to(torch.int32)
    out = torch.ops.transformers.grouped_mm_fallback(x[order], w.mT, ends)
    return (out + b[ids[order]])[order.argsort()]


@gather(inputs_first=True)
def grouped_in_place(x, w, b, ids):
    order = ids.argsort(stable=True)
    ends = torch.bincount(ids, minlength=EXPERTS).cumsum(0).to(torch.int32)
    out = torch.ops.transformers.grouped_mm_fallback(x[order], w, offs=ends)
    out.add_(b[ids[order]])
    return out[order.argsort()]


def weighted(out, c):
    """``out [E, R, o]``"""
    return torch.einsum("ero,re->ro", out, c)


@way("all")
def bmm(h, w, b, c):
    return weighted(torch.bmm(h.expand(EXPERTS, -1, -1), w.mT) + b[:, None], c)


@way("all", inputs_first=True)
def baddbmm(h, w, b, c):
    return weighted(torch.baddbmm(b[:, None], h.expand(EXPERTS, -1, -1), w), c)


@way("all")
def broadcast(h, w, b, c):
    return weighted(h @ w.mT + b[:, None], c)


@way("all")
def broadcast_twice(h, w, b, c):
    out = h.view(-1, 1, TOKENS, WIDTH) @ w.mT.unsqueeze(0) + b[:, None]
    return weighted(out.movedim(1, 0).flatten(1, 2), c)


@way("all", inputs_first=True)
def einsum(h, w, b, c):
    return torch.einsum("neo,ne->no", torch.einsum("ni,eio->neo", h, w) + b, c)


@way("all")
def einsum_with_dots(h, w, b, c):
    h = h.view(-1, TOKENS, WIDTH)
    return weighted((torch.einsum("...i,eoi->e...o", h, w) + b[:, None, None]).flatten(1, 2), c)


@way("weighted", bias=False)
def einsum_over_experts(h, w, b, c):
    return torch.einsum("nei,eoi->no", c.unsqueeze(-1) * h.unsqueeze(1), w)


@way("padded")
def capacity(h, w, b, c):
    size = int((c > 0).sum(0).max())
    slots = h.new_zeros(EXPERTS, size, WIDTH)
    for e, rows, _ in each(c):
        slots = slots.index_put((torch.tensor(e), torch.arange(len(rows))), h[rows])
    out = torch.einsum("eci,eoi->eco", slots, w) + b[:, None]
    y = h.new_zeros(len(h), OUT)
    for e, rows, weight in each(c):
        y = y.index_add(0, rows, out[e, : len(rows)] * weight)
    return y


class Mixture(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.run, self.sees, self.inputs_first, has_bias = WAYS[name]
        shape = (EXPERTS, WIDTH, OUT) if self.inputs_first else (EXPERTS, OUT, WIDTH)
        self.w = nn.Parameter(torch.randn(shape) / 2)
        self.w_bias = nn.Parameter(torch.randn(EXPERTS, OUT) / 2) if has_bias else None

    def forward(self, h, c):
        return self.run(h, self.w, self.w_bias, c)


class Net(nn.Module):
    """Samples of tokens, which are rows to the experts."""

    def __init__(self, name="linear"):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(EXPERTS + 2, WIDTH)
        self.experts, self.head = Mixture(name), nn.Linear(OUT, CLASSES)
        self.double()

    def forward(self, x):
        h = self.first(x).tanh().flatten(0, 1)
        y = self.experts(h, routing(x)).tanh()
        return self.head(y).unflatten(0, (len(x), -1)).mean(1)


def batch(n=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, TOKENS, EXPERTS + 2, dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def reference(net, *batches):
    """By expert: the number of rows, A, G, and the gradient with the bias as its last column; of
    one loss, the mean over the samples of all batches, and by a loop over all rows."""
    mix = net.experts
    weight = mix.w.detach().mT if mix.inputs_first else mix.w.detach()
    samples = sum(len(x) for x, _ in batches)
    found = {e: [] for e in range(EXPERTS)}
    for x, t in batches:
        h = net.first(x).tanh().flatten(0, 1).detach()
        c = routing(x)
        size = int((c > 0).sum(0).max())
        y = [0.0] * len(h)
        outputs = []
        for e in range(EXPERTS):
            rows = range(len(h)) if mix.sees in ("all", "weighted") else c[:, e].nonzero().flatten()
            for r in map(int, rows):
                a = h[r] * c[r, e] if mix.sees == "weighted" else h[r]
                z = weight[e] @ a
                z = (z if mix.w_bias is None else z + mix.w_bias.detach()[e]).requires_grad_()
                y[r] = y[r] + (z if mix.sees == "weighted" else z * c[r, e])
                outputs.append((e, a, z))
            if mix.sees == "padded":
                found[e] += [(torch.zeros_like(h[0]), h.new_zeros(OUT))] * (size - len(rows))
        logits = net.head(torch.stack(y).tanh()).unflatten(0, (len(x), -1)).mean(1)
        loss = F.cross_entropy(logits, t, reduction="sum") / samples
        for (e, a, _), g in zip(
            outputs, torch.autograd.grad(loss, [z for *_, z in outputs]), strict=True
        ):
            found[e].append((a, g))
    return {e: _factors(own, samples, mix.w_bias is not None) for e, own in found.items()}


def _factors(pairs, samples, has_bias):
    ones = int(has_bias)
    cols = WIDTH + ones
    a = torch.stack([torch.cat([a, a.new_ones(ones)]) for a, _ in pairs] or [torch.zeros(cols)])
    g = torch.stack([g for _, g in pairs] or [torch.zeros(OUT)])
    a, g = a.double(), g.double()
    return len(pairs), a.mT @ a / max(1, len(pairs)), samples * g.mT @ g, g.mT @ a


def matrix_of(mix, e, of):
    """``[out, in (+ 1)]`` of one expert: of gradients, or of weights."""
    own = of(mix.w)[e].mT if mix.inputs_first else of(mix.w)[e]
    return own if mix.w_bias is None else torch.cat([own, of(mix.w_bias)[e, :, None]], 1)


def solved(a, g, gradient, damping):
    """``(G x A + damping)^-1`` of a gradient, dense."""
    block = torch.kron(g, a)
    block += damping * torch.eye(len(block), dtype=block.dtype)
    return torch.linalg.solve(block, gradient.flatten()).view_as(gradient)
