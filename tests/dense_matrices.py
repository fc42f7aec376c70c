"""Slow and obviously right: the matrices of a model over data, written out in float64.

    H = ∇²L,   G = Σ_n J_nᵀ (∂²L/∂f_n²) J_n,   C = N Σ_n (J_nᵀ ∂L/∂f_n)(J_nᵀ ∂L/∂f_n)ᵀ

`L` is one call of torch's own mean loss on all data at once, so that no weight of a sample is
written here; `J_n` is the Jacobian of sample `n`'s outputs `f_n`. Rows and columns are parameters
in `named_parameters()` order. Nothing here uses natgrad.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
from oracles import Use, View

Mean = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Dense:
    """`mean(output, targets)` is the loss `L` of all data; `inputs` are what the model is called
    with. Only trainable parameters whose names are `chosen` are in the matrices."""

    model: nn.Module
    mean: Mean
    inputs: tuple[Any, ...]
    targets: Any
    chosen: Callable[[str], bool] = lambda name: True

    # Parameters as one vector.

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and self.chosen(name)}

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def slices(self) -> dict[str, slice]:
        found, start = {}, 0
        for name, p in self.parameters.items():
            found[name] = slice(start, start + p.numel())
            start += p.numel()
        return found

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([named[name].flatten() for name in self.parameters])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return {n: flat[s].view_as(self.parameters[n]) for n, s in self.slices.items()}

    @property
    def theta(self) -> Tensor:
        return self.flat(self.parameters).detach()

    def output(self, theta: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found = torch.func.functional_call(self.model, self.named(theta), self.inputs)
        return found if isinstance(found, Tensor) else found.logits

    def loss(self, theta: Tensor) -> Tensor:
        return self.mean(self.output(theta), self.targets)

    # Derivatives.

    @cached_property
    def gradient(self) -> Tensor:
        return torch.autograd.functional.jacobian(self.loss, self.theta)

    @cached_property
    def f(self) -> Tensor:
        return self.output(self.theta).detach()

    @property
    def n(self) -> int:
        return len(self.f)

    @cached_property
    def jacobian(self) -> Tensor:
        """`[n, D, P]`, D outputs of a sample in row-major order."""
        return torch.autograd.functional.jacobian(self.output, self.theta, vectorize=True).reshape(
            self.n, -1, self.size
        )

    @cached_property
    def output_gradient(self) -> Tensor:
        """`∂L/∂f [n, D]`."""
        found = torch.autograd.functional.jacobian(lambda f: self.mean(f, self.targets), self.f)
        return found.reshape(self.n, -1)

    @cached_property
    def output_hessian(self) -> Tensor:
        """`∂²L/∂f_n² [n, D, D]`; the entries between samples are zero."""
        found = torch.autograd.functional.hessian(lambda f: self.mean(f, self.targets), self.f)
        n, d = self.n, self.f[0].numel()
        whole = found.reshape(n, d, n, d)
        own = whole.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        assert torch.allclose(own.square().sum(), whole.square().sum())
        return own

    @cached_property
    def H(self) -> Tensor:  # noqa: N802 - as everywhere
        return symmetric(torch.autograd.functional.hessian(self.loss, self.theta, vectorize=True))

    @cached_property
    def G(self) -> Tensor:  # noqa: N802 - as everywhere
        return sum(j.T @ h @ j for j, h in zip(self.jacobian, self.output_hessian, strict=True))

    @cached_property
    def sample_gradients(self) -> Tensor:
        """`N ∂L/∂θ` through the output of each sample, `[n, P]`: their mean is the gradient."""
        return self.n * torch.einsum("nd,ndp->np", self.output_gradient, self.jacobian)

    @cached_property
    def C(self) -> Tensor:  # noqa: N802 - as everywhere
        return sum(torch.outer(s, s) for s in self.sample_gradients) / self.n

    @cached_property
    def drawn(self) -> Tensor:
        """The Fisher matrix as the expectation over every class a softmax `[n, C]` may draw."""
        total = torch.zeros(self.size, self.size, dtype=torch.float64)
        for j, f in zip(self.jacobian, self.f, strict=True):
            for c, p in enumerate(f.softmax(0)):
                score = j.T @ (f.softmax(0) - F.one_hot(torch.tensor(c), len(f)))
                total += p * torch.outer(score, score)
        return total / self.n

    # Layers.

    @cached_property
    def layers(self) -> dict[str, Tensor]:
        """Where `W [groups, rows, cols]` of each layer lies in a flat vector."""
        index = {n: torch.arange(s.start, s.stop) for n, s in self.slices.items()}
        return layers_of(self.model, {n: i.view_as(self.parameters[n]) for n, i in index.items()})

    def blocks(self, matrix: Tensor) -> dict[str, Tensor]:
        return {k: matrix[i.flatten()][:, i.flatten()] for k, i in self.layers.items()}

    def masked(self, matrix: Tensor, keep: Callable[[Tensor], Tensor]) -> Tensor:
        """Of each layer's block what `keep(index [groups, rows, cols])`, a label for every entry of
        `W`, says: entries between equal labels."""
        out = torch.zeros_like(matrix)
        for index in self.layers.values():
            where, labels = index.flatten(), keep(index).flatten()
            same = labels[:, None] == labels[None, :]
            out[where[:, None], where] = matrix[where][:, where] * same
        return out

    def full(self, matrix: Tensor) -> Tensor:
        return self.masked(matrix, torch.zeros_like)

    def unit_wise(self, matrix: Tensor) -> Tensor:
        return self.masked(
            matrix, lambda i: torch.arange(i[..., :1].numel()).view(i.shape[0], -1, 1).expand_as(i)
        )

    def diagonal(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal().diag()

    # Kronecker products.

    def vectors(self, kind: str) -> list[Tensor]:
        """Output vectors `[n, …]` whose outer products sum to the `N Λ` of `G`, or to those of
        `C`."""
        if kind == "C":
            return [(self.n * self.output_gradient).view_as(self.f)]
        values, basis = torch.linalg.eigh(self.n * self.output_hessian)
        roots = basis * values.clamp(min=0).sqrt()[:, None]
        return [r.reshape(self.f.shape) for r in roots.unbind(-1)]

    def views(self, vectors: list[Tensor]) -> dict[str, list[View]]:
        """Inputs and output gradients of each layer, for each vector."""
        seen = oracles.record(self.model, self.inputs)
        calls = [call for call in seen.calls if call.out.requires_grad]
        case = _Plain()
        found: dict[str, list[View]] = {}
        for v in vectors:
            gs = torch.autograd.grad(seen.out, [c.out for c in calls], v, retain_graph=True)
            own: dict[str, View] = {}
            for call, g in zip(calls, gs, strict=True):
                for view in oracles.views_of(case, self.model, call, g, self.n):
                    known = own.setdefault(view.name, view)
                    if known is not view:
                        known.uses += view.uses
                        known.transposed += view.transposed
            for name, view in own.items():
                found.setdefault(name, []).append(view)
        return found

    def factors(self, kind: str, sharing: str) -> dict[str, tuple[Tensor, Tensor]]:
        """`A` and `G` of each layer that has them."""
        found = {}
        for name, views in self.views(self.vectors(kind)).items():
            first = views[0]
            if first.elementwise:
                continue
            A, G = _moments([v.uses for v in views], self.n, sharing)
            if first.transposed:
                turned = [[Use(u.g, u.a, u.used) for u in v.transposed] for v in views]
                Gt, At = _moments(turned, self.n, sharing)
                A, At = oracles.keep_diagonal(A), oracles.keep_diagonal(At)
                s = oracles.trace(A) / oracles.trace(At)
                A, G = (A + s * At) / 2, G + Gt / s
            found[name] = (oracles.keep_diagonal(A) if first.diagonal_inputs else A), G
        return found

    def kronecker(self, kind: str, sharing: str) -> Tensor:
        matrix = getattr(self, kind)
        out = self._others(matrix)
        for name, (A, G) in self.factors(kind, sharing).items():
            self._put(out, name, oracles.kronecker_block(A, G))
        return out

    def ekfac(self, kind: str) -> Tensor:
        """The diagonal of the matrix itself in the eigenbasis of `expand`: as the block of a layer
        is `1/N Σ vec(dW) vec(dW)ᵀ`, that is `1/N Σ (Q_Gᵀ dW Q_A)²`."""
        matrix = getattr(self, kind)
        out = self._others(matrix)
        for name, (A, G) in self.factors(kind, "expand").items():
            basis = torch.block_diag(
                *(torch.kron(_basis(g), _basis(a)) for a, g in zip(A, G, strict=True))
            )
            where = self.layers[name].flatten()
            values = (basis * (matrix[where][:, where] @ basis)).sum(0)
            self._put(out, name, basis * values @ basis.T)
        return out

    def _others(self, matrix: Tensor) -> Tensor:
        """Of layers without factors: the blocks of units in norm layers, all of a tied weight."""
        out = self.unit_wise(matrix)
        for name, index in self.layers.items():
            if isinstance(dict(self.model.named_modules()).get(name), nn.Embedding):
                where = index.flatten()
                self._put(out, name, matrix[where][:, where])
        return out

    def _put(self, out: Tensor, name: str, block: Tensor) -> None:
        where = self.layers[name].flatten()
        out[where[:, None], where] = block


class HessianFactors(Dense):
    """K-FAC of the Hessian: the gradients' second moment gives way to second derivatives."""

    def factors(self, kind: str, sharing: str) -> dict[str, tuple[Tensor, Tensor]]:
        """`A` as ever, and the second derivatives of `L` in a layer's output, at one position
        (`expand`) or summed over all pairs of positions of a sample (`reduce`)."""
        if kind != "H":
            return super().factors(kind, sharing)
        inputs = super().factors("C", sharing)
        found = {}
        for name, (view,) in self.views(self.vectors("C")).items():
            if view.elementwise or view.transposed:  # a weight that is used twice has no factors
                continue
            whole = self._second(name, view.uses[0].g.shape)
            pairs = "bnsrbnsq->brq" if sharing == "expand" else "bnsrbntq->brq"
            found[name] = inputs[name][0], torch.einsum(pairs, whole)
        return found

    def _second(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """`∂²L/∂y²` for what is added to a layer's output, `y [groups, n, s, rows]`."""

        def loss(y: Tensor) -> Tensor:
            with added(self.model, name, y):
                return self.loss(self.theta)

        zero = torch.zeros(shape, dtype=torch.float64)
        return torch.autograd.functional.hessian(loss, zero, vectorize=True)


class _Plain:
    """What `oracles` asks of a case."""

    batched, batch_axis = True, 0


class added:  # noqa: N801 - reads as a verb
    """`with added(model, name, y)`: the layer's output is `y [groups, n, s, rows]` more."""

    def __init__(self, model: nn.Module, name: str, y: Tensor) -> None:
        self.y, self.role = y, ""
        self.module = dict(model.named_modules()).get(name)
        if self.module is None or isinstance(_parent(model, name), nn.MultiheadAttention):
            self.module, self.role = _parent(model, name), name.rpartition(".")[2]

    def __enter__(self) -> None:
        self.handle = self.module.register_forward_hook(self._hook)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _hook(self, module: nn.Module, args: Any, out: Any) -> Any:
        if self.role:
            return self._attention(module, args[:3]), None
        if isinstance(module, nn.Conv2d):
            return out + self.y.permute(1, 0, 3, 2).reshape(out.shape)
        return out + self.y[0].reshape(out.shape)

    def _attention(self, m: nn.MultiheadAttention, args: tuple[Tensor, ...]) -> Tensor:
        more = {self.role: self.y[0]}
        weights, biases = m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3)
        split = [
            (x @ w.mT + b + more.get(role, 0.0)).unflatten(2, (m.num_heads, -1)).transpose(1, 2)
            for role, x, w, b in zip(("query", "key", "value"), args, weights, biases, strict=True)
        ]
        scores = split[0] @ split[1].mT / split[0].shape[-1] ** 0.5
        mixed = (scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2)
        return F.linear(mixed, m.out_proj.weight, m.out_proj.bias) + more.get("out_proj", 0.0)


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _moments(uses: list[list[Use]], n: int, sharing: str) -> tuple[Tensor, Tensor]:
    """Of inputs, which are the same for all vectors, and of the gradients of all of them."""
    each = [oracles.second_moments(one, n, sharing) for one in uses]
    return each[0][0], sum(g for _, g in each)


def _basis(m: Tensor) -> Tensor:
    """Eigenvectors; a diagonal matrix stays in its own order."""
    if torch.equal(m, m.diagonal().diag()):
        return torch.eye(len(m), dtype=m.dtype)
    return torch.linalg.eigh(m).eigenvectors.contiguous()


def symmetric(m: Tensor) -> Tensor:
    return (m + m.T) / 2


def layers_of(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters, or anything in their shapes, as one matrix `[groups, rows, cols]` a layer."""
    found: dict[str, Tensor] = {}
    inside: set[str] = set()
    for name, m in model.named_modules():
        own = {k: named.get(f"{name}.{k}" if name else k) for k, _ in m.named_parameters()}
        if name in inside or all(own.get(k) is None for k, _ in m.named_parameters(recurse=False)):
            continue
        weight, bias = own.get("weight"), own.get("bias")
        if isinstance(m, nn.MultiheadAttention):
            inside.add(f"{name}.out_proj")
            ws, bs = own["in_proj_weight"].chunk(3), own["in_proj_bias"].chunk(3)
            for role, w, b in zip(("query", "key", "value"), ws, bs, strict=True):
                found[f"{name}.{role}"] = _matrix(w[None], b)
            found[f"{name}.out_proj"] = _matrix(own["out_proj.weight"][None], own["out_proj.bias"])
        elif isinstance(m, nn.Embedding):
            found[name] = weight.mT[None]
        elif isinstance(m, nn.Conv2d):
            found[name] = _matrix(oracles.conv_matrix(weight, m.groups), bias)
        elif isinstance(m, nn.Linear):
            found[name] = _matrix(None if weight is None else weight[None], bias)
        else:  # a norm layer
            found[name] = torch.stack([t for t in (weight, bias) if t is not None], -1)[None]
    return found


def _matrix(weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`[groups, rows, cols]`, the bias as the last column."""
    if weight is None:
        return bias[None, :, None]
    return weight if bias is None else torch.cat([weight, bias.reshape(*weight.shape[:2], 1)], -1)


# Three networks.


class Block(nn.Module):
    """Attention and two layers around a GELU, each after a norm layer and beside a shortcut."""

    def __init__(self, width: int, heads: int, module: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        if module:
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        else:
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width + 1), nn.Linear(width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + (
            self.attention(h, h, h, need_weights=False)[0]
            if "attention" in self._modules
            else self._attend(h)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _attend(self, h: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Two blocks, one with torch's attention module and one with its function; a tied head."""

    entries, tokens = 6, 3

    def __init__(self, width: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.entries, width)
        self.places = nn.Embedding(self.tokens, width)
        self.blocks = nn.Sequential(Block(width, heads, True), Block(width, heads, False))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.entries, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand_as(x)  # every sample has its own
        return self.head(self.norm(self.blocks(self.embedding(x) + self.places(places))))


def mlp(act: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), act(), nn.Linear(4, 4), act(), nn.Linear(4, 3))


def cnn(act: type[nn.Module] = nn.ReLU) -> nn.Module:
    """With groups, a layer without a bias, and running statistics that the data do not have."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        act(),
        nn.Conv2d(4, 4, 2, groups=2),
        act(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def ready(model: nn.Module, seed: int = 0) -> nn.Module:
    """In float64 and eval mode, with parameters and buffers that are neither ones nor zeros."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = model.double().eval()
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.6 + 0.05)
        for name, b in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                b.uniform_(0.5, 1.5)
    return model


def tokens_mean(output: Tensor, targets: Tensor) -> Tensor:
    """Over all positions of logits `[n, tokens, classes]`."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 4, 4, dtype=torch.float64), torch.randint(3, (n,))


def rows(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, dtype=torch.float64), torch.randint(3, (n,))


def sentences(n: int) -> tuple[Tensor, Tensor]:
    shape = (n, Transformer.tokens)
    return torch.randint(Transformer.entries, shape), torch.randint(Transformer.entries, shape)


NETWORKS: dict[
    str, tuple[Callable[[], nn.Module], Mean, Callable[[int], tuple[Tensor, Tensor]]]
] = {
    "mlp": (mlp, F.cross_entropy, rows),
    "cnn": (cnn, F.cross_entropy, images),
    "transformer": (Transformer, tokens_mean, sentences),
}
SAMPLES = 6


@cache
def network(name: str) -> Dense:
    """Made once, as many tests ask for the same."""
    build, mean, data = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        x, y = data(SAMPLES)
    return HessianFactors(ready(build()), mean, (x,), y)


def uneven(x: Any, y: Any, sizes: tuple[int, ...] = (1, 3, 2)) -> list[tuple[Any, Any]]:
    """Cut into batches of different sizes."""
    return list(zip(x.split(sizes), y.split(sizes), strict=True))
