"""Slow and obviously right: the curvature of every layer from explicit sums, and dense solves.

Nothing here uses natgrad. A weight is a matrix `W [groups, rows, cols]`, its bias the last column;
for sample `n` and position `s` a layer computes `W a[n, s]`, and `g[n, s]` is the gradient of the
loss of sample `n`. Columns of a convolution are ordered (kernel position, channel).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import Case, losses

Named = Mapping[str, Tensor]


@dataclass
class Use:
    """`a [groups, n, s, cols]`, `g [groups, n, s, rows]`; a position that is not `used [n, s]`
    counts for nothing."""

    a: Tensor
    g: Tensor
    used: Tensor | None = None

    def __post_init__(self) -> None:
        if self.used is None:
            self.used = torch.ones(self.a.shape[1:3], dtype=self.a.dtype)


@dataclass
class View:
    """One weight as a matrix, and everything that happened to it in one forward and backward pass.

    `matrix` brings gradients by parameter name into `[groups, rows, cols]`. In `transposed` uses
    rows see the inputs and columns the gradients. `elementwise`: each row has its own input.
    """

    name: str
    matrix: Callable[[Named], Tensor]
    uses: list[Use] = field(default_factory=list)
    transposed: list[Use] = field(default_factory=list)
    elementwise: bool = False
    diagonal_inputs: bool = False


@dataclass
class Truth:
    """All that a test compares with: blocks, gradient of the mean loss, gradients of samples."""

    n: int
    views: dict[str, View]
    mean: dict[str, Tensor]
    per_sample: dict[str, Tensor]  # [n, *shape]

    def mean_matrix(self, view: View) -> Tensor:
        return view.matrix(self.mean)

    def sample_matrices(self, view: View) -> Tensor:
        """`[n, groups, rows, cols]`."""
        return torch.stack(
            [view.matrix({k: v[i] for k, v in self.per_sample.items()}) for i in range(self.n)]
        )


@cache
def truth(case: Case, n: int) -> Truth:
    """Of `case.model()` on `case.data(n)`; computed once, as several tests ask for the same."""
    model, inputs, samples = case.model(), case.data(n), case.samples(n)
    calls = record(model, inputs)
    each = losses(case, calls.out)
    outs = [call.out for call in calls.calls]
    gs = torch.autograd.grad(each.sum(), outs, retain_graph=True)
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    mean = torch.autograd.grad(each.mean(), list(parameters.values()), retain_graph=True)
    views: dict[str, View] = {}
    own: dict[str, Tensor] = {}
    for call, g in zip(calls.calls, gs, strict=True):
        for view in views_of(case, model, call, g, samples):
            known = views.setdefault(view.name, view)
            if known is not view:
                known.uses += view.uses
                known.transposed += view.transposed
        if mixes_samples(call.module):
            own |= affine_copies(call, g, samples)
    per_sample = own or loop_over_samples(case, model, inputs, samples, parameters)
    detached = dict(zip(parameters, (m.detach() for m in mean), strict=True))
    return Truth(samples, views, detached, per_sample)


# Gradients of samples.


def loop_over_samples(
    case: Case, model: nn.Module, inputs: tuple[Any, ...], n: int, parameters: Named
) -> dict[str, Tensor]:
    """One sample at a time, as a batch of one."""
    rows = []
    for i in range(n):
        alone = [x.narrow(case.batch_axis, i, 1) if case.batched else x for x in inputs]
        loss = losses(case, model(*alone)).sum()
        rows.append(torch.autograd.grad(loss, list(parameters.values())))
    return {k: torch.stack(gs) for k, gs in zip(parameters, zip(*rows, strict=True), strict=True)}


def vmapped_gradients(case: Case, model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """The same by `torch.func`, for models that it can transform."""
    parameters = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def loss(values: Named, *sample: Tensor) -> Tensor:
        alone = tuple(x.unsqueeze(case.batch_axis) for x in sample)
        return losses(case, torch.func.functional_call(model, dict(values), alone)).sum()

    axes = (None, *(case.batch_axis for _ in inputs))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # of bilinear
        return torch.func.vmap(torch.func.grad(loss), in_dims=axes)(parameters, *inputs)


def mixes_samples(module: nn.Module) -> bool:
    """Whether the output of a sample depends on the others: then it cannot be fed alone."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (
        module.training or module.running_mean is None
    )


def affine_copies(call: "Call", g: Tensor, n: int) -> dict[str, Tensor]:
    """Every sample has weights and biases of its own, on the statistics of the whole batch."""
    m, x = call.module, call.args[0].detach()
    hat = normalised(m, x)
    fold = len(x) // n  # tokens of one sample that stand in the batch axis
    shape = (n, *(1 for _ in x.shape[1:]))
    copies = [p.detach().expand(n, -1).clone().requires_grad_() for p in (m.weight, m.bias)]
    w, b = (c.view(*shape[:1], -1, *shape[2:]).repeat_interleave(fold, 0) for c in copies)
    y = w * hat + b
    torch.testing.assert_close(y.detach(), call.out.detach())
    return dict(zip(call.names("weight", "bias"), torch.autograd.grad(y, copies, g), strict=True))


# What a forward pass showed.


@dataclass
class Call:
    name: str
    module: nn.Module
    args: tuple[Any, ...]
    out: Tensor

    def names(self, *parameters: str) -> list[str]:
        return [f"{self.name}.{p}" if self.name else p for p in parameters]


@dataclass
class Record:
    calls: list[Call]
    out: Tensor


def record(model: nn.Module, inputs: tuple[Any, ...]) -> Record:
    calls: list[Call] = []
    handles = []
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue

        def hook(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
            calls.append(Call(name, module, args, out[0] if isinstance(out, tuple) else out))

        handles.append(module.register_forward_hook(hook))
    out = model(*inputs)
    for handle in handles:
        handle.remove()
    return Record(calls, out)


# Modules as matrices.


def views_of(case: Case, model: nn.Module, call: Call, g: Tensor, n: int) -> Iterator[View]:
    m, x = call.module, call.args[0].detach()
    if isinstance(m, nn.MultiheadAttention):
        yield from attention_views(call, g)
    elif isinstance(m, nn.Embedding):
        yield embedding_view(case, model, call, g, n)
    elif isinstance(m, nn.modules.conv._ConvTransposeNd):
        yield from transposed_views(case, call, g)
    elif isinstance(m, nn.modules.conv._ConvNd):
        x = x if case.batched else x.unsqueeze(0)
        g = g if case.batched else g.unsqueeze(0)
        a, gs = patches(m, x), by_group(g, m.groups)
        yield with_bias(model, call, a, gs, lambda w: conv_matrix(w, m.groups), m.groups)
    elif isinstance(m, nn.Bilinear):
        pairs = torch.einsum("...i,...j->...ij", *(t.detach() for t in call.args)).flatten(-2)
        a, gs = tokens(case, pairs, n), tokens(case, g, n)
        yield with_bias(model, call, a, gs, lambda w: w.flatten(1)[None], 1)
    elif isinstance(m, nn.Linear) or type(m).__name__ in ("Conv1D", "RightProduct"):
        turned = not isinstance(m, nn.Linear)
        a, gs = tokens(case, x, n), tokens(case, g, n)
        users = users_of(model, m.weight)
        if any(isinstance(other, nn.Embedding) for _, other in users):
            name = next(k for k, other in users if isinstance(other, nn.Embedding))
            weight = parameter_name(model, m.weight)
            yield View(
                name,
                lambda named: named[weight].mT[None],
                transposed=[Use(gs, a)],
                diagonal_inputs=True,
            )
        else:
            yield with_bias(model, call, a, gs, lambda w: (w.mT if turned else w)[None], 1)
    else:
        yield norm_view(call)


def users_of(model: nn.Module, weight: Tensor) -> list[tuple[str, nn.Module]]:
    """All modules with this weight."""
    return [(k, m) for k, m in model.named_modules() if getattr(m, "weight", None) is weight]


def parameter_name(model: nn.Module, parameter: Tensor) -> str:
    return next(k for k, p in model.named_parameters() if p is parameter)


def with_bias(
    model: nn.Module,
    call: Call,
    a: Tensor,
    g: Tensor,
    as_matrix: Callable[[Tensor], Tensor],
    groups: int,
) -> View:
    """A view of a trained weight and a trained bias; a bias that one of several users of the weight
    has alone is no column of it."""
    m = call.module
    users = users_of(model, m.weight)
    bias = m.bias if len({id(other.bias) for _, other in users}) == 1 else None
    names = {}
    if m.weight.requires_grad:
        names["weight"] = parameter_name(model, m.weight)
    else:
        a = a[..., :0]
    if bias is not None and bias.requires_grad:
        names["bias"] = parameter_name(model, bias)
        a = torch.cat([a, torch.ones(*a.shape[:-1], 1, dtype=a.dtype)], -1)

    def matrix(named: Named) -> Tensor:
        columns = []
        if "weight" in names:
            columns.append(as_matrix(named[names["weight"]]))
        if "bias" in names:
            columns.append(named[names["bias"]].reshape(groups, -1, 1))
        return torch.cat(columns, -1)

    return View(users[0][0], matrix, [Use(a, g)])


def tokens(case: Case, t: Tensor, n: int) -> Tensor:
    """`[n, ..., d]`, also flattened, unbatched or with the samples elsewhere -> `[1, n, s, d]`."""
    if case.batched and case.batch_axis:
        t = t.movedim(case.batch_axis, 0)
    return t.reshape(1, n, t.numel() // (n * t.shape[-1]), t.shape[-1])


def by_group(t: Tensor, groups: int) -> Tensor:
    """`[n, channels, *space]` -> `[groups, n, s, channels / groups]`."""
    return torch.stack([part.flatten(2).mT for part in t.chunk(groups, 1)])


def conv_matrix(weight: Tensor, groups: int) -> Tensor:
    """`[outputs, inputs, *kernel]` -> `[groups, outputs / groups, kernel * inputs]`."""
    return torch.stack([w.movedim(1, -1).flatten(1) for w in weight.chunk(groups)])


def patches(m: Any, x: Tensor) -> Tensor:
    """`[groups, n, s, kernel * inputs]`, window by window."""
    kernel, dims = m.kernel_size, len(m.kernel_size)
    if m.padding == "valid":
        sides = [(0, 0)] * dims
    elif m.padding == "same":
        reach = [d * (k - 1) for k, d in zip(kernel, m.dilation, strict=True)]
        sides = [(r // 2, r - r // 2) for r in reach]
    else:
        sides = [(p, p) for p in m.padding]
    flat = [side for pair in reversed(sides) for side in pair]
    mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
    x = F.pad(x, flat, mode=mode) if any(flat) else x
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, m.dilation, strict=True)]
    starts = [
        range(0, size - r + 1, s) for size, r, s in zip(x.shape[2:], reach, m.stride, strict=True)
    ]
    rows = []
    for corner in product(*starts):
        window = tuple(
            slice(i, i + r, d) for i, r, d in zip(corner, reach, m.dilation, strict=True)
        )
        patch = x[(slice(None), slice(None), *window)]
        rows.append(per_group(patch, m))
    return torch.stack(rows, 2)


def per_group(patch: Tensor, m: Any) -> Tensor:
    """`[n, channels, *kernel]` -> `[groups, n, kernel * channels / groups]`, channel fastest."""
    return torch.stack([part.movedim(1, -1).flatten(1) for part in patch.chunk(m.groups, 1)])


def transposed_views(case: Case, call: Call, g: Tensor) -> Iterator[View]:
    """The weight, whose output is the patch an input pixel is spread over, and the bias."""
    m, x = call.module, call.args[0].detach()
    if not case.batched:
        x, g = x.unsqueeze(0), g.unsqueeze(0)
    weight, bias = call.names("weight", "bias")
    if m.weight.requires_grad:
        rows = []
        for pixel in product(*map(range, x.shape[2:])):
            patch = g.new_zeros(*g.shape[:2], *m.kernel_size)
            for tap in product(*map(range, m.kernel_size)):
                at = [
                    p * s - pad + t * d
                    for p, s, pad, t, d in zip(
                        pixel, m.stride, m.padding, tap, m.dilation, strict=True
                    )
                ]
                if all(0 <= i < size for i, size in zip(at, g.shape[2:], strict=True)):
                    patch[(slice(None), slice(None), *tap)] = g[(slice(None), slice(None), *at)]
            rows.append(per_group(patch, m))

        def matrix(named: Named) -> Tensor:
            # [inputs, outputs / groups, *kernel] -> [groups, kernel * outputs, inputs]
            parts = named[weight].chunk(m.groups)
            return torch.stack([w.movedim(1, -1).flatten(1).mT for w in parts])

        yield View(call.name, matrix, [Use(by_group(x, m.groups), torch.stack(rows, 2))])
    if m.bias is not None and m.bias.requires_grad:
        name = bias if m.weight.requires_grad else call.name
        gs = by_group(g, 1)
        yield View(
            name,
            lambda named: named[bias].reshape(1, -1, 1),
            [Use(torch.ones(*gs.shape[:-1], 1, dtype=gs.dtype), gs)],
        )


def embedding_view(case: Case, model: nn.Module, call: Call, g: Tensor, n: int) -> View:
    m, x = call.module, call.args[0]
    weight = parameter_name(model, m.weight)
    where = x.reshape(n, -1)
    used = torch.ones(where.shape, dtype=g.dtype)
    if m.padding_idx is not None:
        used = (where != m.padding_idx).to(g.dtype)
    a = F.one_hot(where, m.num_embeddings).to(g.dtype)
    gs = tokens(case, g, n)
    use = Use((a * used[..., None])[None], gs * used[None, ..., None], used)
    return View(call.name, lambda named: named[weight].mT[None], [use], diagonal_inputs=True)


def attention_views(call: Call, g: Tensor) -> Iterator[View]:
    """The projections written out, with their outputs as tensors that have gradients."""
    m = call.module

    def samples_first(t: Tensor) -> Tensor:
        if t.ndim == 2:
            return t.unsqueeze(0)
        return t if m.batch_first else t.transpose(0, 1)

    query, key, value = (samples_first(t.detach()) for t in call.args[:3])
    packed = m.in_proj_weight is not None
    weights = (
        m.in_proj_weight.chunk(3) if packed else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    )
    biases = (0, 0, 0) if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
    heads = [x @ w.mT + b for x, w, b in zip((query, key, value), weights, biases, strict=True)]
    split = [t.unflatten(2, (m.num_heads, -1)).transpose(1, 2) for t in heads]  # [n, head, s, d]
    scores = split[0] @ split[1].mT / split[0].shape[-1] ** 0.5
    mixed = (scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2)
    out = mixed @ m.out_proj.weight.mT
    if m.out_proj.bias is not None:
        out = out + m.out_proj.bias
    torch.testing.assert_close(out, samples_first(call.out))
    gs = torch.autograd.grad(out, [*heads, out], samples_first(g))
    sources = (query, key, value, mixed.detach())
    roles = ("query", "key", "value", "out_proj")
    width = m.embed_dim
    for i, (role, a, gs_i) in enumerate(zip(roles, sources, gs, strict=True)):
        if role == "out_proj":
            weight, bias = call.names("out_proj.weight", "out_proj.bias")
            rows_w = rows_b = slice(0, width)
        else:
            own = "in_proj_weight" if packed else f"{role[0]}_proj_weight"
            weight, bias = call.names(own, "in_proj_bias")
            rows_b = slice(i * width, (i + 1) * width)
            rows_w = rows_b if packed else slice(0, width)
        has_bias = m.in_proj_bias is not None

        def matrix(
            named: Named,
            weight: str = weight,
            bias: str = bias,
            rows_w: slice = rows_w,
            rows_b: slice = rows_b,
            has_bias: bool = has_bias,
        ) -> Tensor:
            columns = [named[weight][rows_w]]
            if has_bias:
                columns.append(named[bias][rows_b].unsqueeze(1))
            return torch.cat(columns, 1)[None]

        if has_bias:
            a = torch.cat([a, torch.ones(*a.shape[:-1], 1, dtype=a.dtype)], -1)
        yield View(f"{call.name}.{role}", matrix, [Use(a[None], gs_i[None])])


def norm_view(call: Call) -> View:
    """`W [rows, 2]`: weight and bias of every row."""
    m = call.module
    own = {k: getattr(m, k, None) for k in ("weight", "gamma", "bias")}
    names = call.names(*(k for k, p in own.items() if p is not None and p.requires_grad))
    return View(
        call.name,
        lambda named: torch.stack([named[k].flatten() for k in names], -1)[None],
        elementwise=True,
    )


def normalised(m: Any, x: Tensor) -> Tensor:
    """A batch norm's `x_hat` with the statistics of the batch."""
    axes = [i for i in range(x.ndim) if i != 1]
    mean = x.mean(axes, keepdim=True)
    variance = (x - mean).square().mean(axes, keepdim=True)
    return (x - mean) / (variance + m.eps).sqrt()


# Blocks.


def kronecker(view: View, n: int, sharing: str) -> tuple[Tensor, Tensor]:
    """`A [groups, cols, cols]` and `G [groups, rows, rows]`."""
    if not view.transposed:
        A, G = second_moments(view.uses, n, sharing)
        return (keep_diagonal(A) if view.diagonal_inputs else A), G
    Gt, At = second_moments([Use(u.g, u.a, u.used) for u in view.transposed], n, sharing)
    if not view.uses:
        return keep_diagonal(At), Gt
    A, G = second_moments(view.uses, n, sharing)
    A, At = keep_diagonal(A), keep_diagonal(At)
    # Two products become one after scaling both to the same trace of A.
    s = trace(A) / trace(At)
    return (A + s * At) / 2, G + Gt / s


def second_moments(uses: list[Use], n: int, sharing: str) -> tuple[Tensor, Tensor]:
    """Of inputs and of gradients: sums over every sample and position."""
    groups, cols, rows = uses[0].a.shape[0], uses[0].a.shape[-1], uses[0].g.shape[-1]
    A = torch.zeros(groups, cols, cols, dtype=torch.float64)
    G = torch.zeros(groups, rows, rows, dtype=torch.float64)
    for k in range(groups):
        count = 0.0
        for i in range(n):
            pairs = [
                (u.a[k, i, s], u.g[k, i, s])
                for u in uses
                for s in range(u.a.shape[2])
                if u.used[i, s]
            ]
            if sharing == "expand":
                for a, g in pairs:
                    A[k] += torch.outer(a, a)
                    G[k] += torch.outer(g, g)
                    count += 1
            else:
                a = sum(a for a, _ in pairs) / max(1, len(pairs)) + torch.zeros(cols)
                g = sum(g for _, g in pairs) + torch.zeros(rows)
                A[k] += torch.outer(a, a)
                G[k] += torch.outer(g, g)
                count += 1
        A[k] /= count
        G[k] /= n
    return A, G


def keep_diagonal(m: Tensor) -> Tensor:
    return torch.diag_embed(m.diagonal(dim1=1, dim2=2))


def trace(m: Tensor) -> Tensor:
    return m.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]


def kronecker_block(A: Tensor, G: Tensor) -> Tensor:
    return torch.block_diag(*(torch.kron(g, a) for a, g in zip(A, G, strict=True)))


def fisher(samples: Tensor) -> Tensor:
    """`samples [n, ...]` -> the mean of `vec(dW) vec(dW)^T`, `[P, P]`."""
    rows = samples.flatten(1)
    return sum(torch.outer(r, r) for r in rows) / len(rows)


def unit_wise(block: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Only entries between parameters of one row of `W`."""
    groups, rows, cols = shape
    unit = torch.arange(groups * rows).repeat_interleave(cols)
    return block * (unit[:, None] == unit[None, :])


def solve(block: Tensor, damping: float, m: Tensor) -> Tensor:
    """`(block + damping I)^-1 vec(m)`, shaped like `m`."""
    damped = block + damping * torch.eye(len(block), dtype=block.dtype)
    return torch.linalg.solve(damped, m.flatten()).view(m.shape)


def pi_damped(A: Tensor, G: Tensor, damping: float) -> Tensor:
    """The block of factors that are damped one by one, `(G + I √γ/π) x (A + I π√γ)`."""
    blocks = []
    for a, g in zip(A, G, strict=True):
        pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
        eye_a, eye_g = torch.eye(len(a), dtype=a.dtype), torch.eye(len(g), dtype=g.dtype)
        root = damping**0.5
        blocks.append(torch.kron(g + root / pi * eye_g, a + root * pi * eye_a))
    return torch.block_diag(*blocks)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9, *, scale: float = 0.0) -> bool:
    """Equal up to `tolerance` times the norm of what is expected, or times a `scale` above it."""
    if found.shape != expected.shape:
        return False
    return float((found - expected).norm()) <= tolerance * max(float(expected.norm()), scale)


def term_scale(view: View, n: int) -> tuple[float, float]:
    """Norms of A and G before positions cancel. Keys of an attention are the example: a constant
    added to all of them changes nothing, so their gradients sum to zero, but for rounding."""
    if view.elementwise:
        return 0.0, 0.0
    A, G = kronecker(view, n, "expand")
    return float(A.norm()), float(G.norm())
