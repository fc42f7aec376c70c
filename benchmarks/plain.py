"""Curvature by hooks and torch alone: what a page of one's own code gives, and the exact results.

    G = 1/n Σ_r Σ_i vec(g aᵀ) vec(g aᵀ)ᵀ,   g = J_outputᵀ r

for cross-entropy, a model of Linear and Conv2d layers with biases, and one batch. `a` is a layer's
input with a one behind it, `r` runs over the columns of a root of the loss's Hessian in the output.
In float64 the same functions give what errors are measured against.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Factors = dict[str, tuple[Tensor, Tensor]]  # A and B of each layer


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def layers(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, nn.Conv2d)
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}


def roots(logits: Tensor) -> Tensor:
    """`[n, C] -> [C, n, C]`, `√p_c (e_c - p)`: outer products over c sum to `diag(p) - p pᵀ`."""
    p = logits.detach().softmax(1)
    away = torch.eye(p.shape[1], dtype=p.dtype) - p[:, None]
    return (away * p.sqrt()[..., None]).transpose(0, 1)


def capture(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By layer: a `[n, positions, cols + 1]`, g `[C, n, positions, rows]`; one batched backward."""
    inputs, outputs, own = {}, {}, layers(model)

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), out

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in own.items()]
    out = model(x)
    for handle in handles:
        handle.remove()
    sent = torch.autograd.grad(out, [outputs[n] for n in own], roots(out), is_grads_batched=True)
    captured = {}
    for (name, m), g in zip(own.items(), sent, strict=True):
        a = inputs[name]
        if isinstance(m, nn.Conv2d):
            a, g = F.unfold(a, m.kernel_size, m.dilation, m.padding, m.stride).mT, g.flatten(3).mT
        else:
            a, g = a[:, None], g[:, :, None]
        captured[name] = torch.cat([a, torch.ones_like(a[..., :1])], -1), g
    return captured


def sample_gradients(a: Tensor, g: Tensor) -> Tensor:
    """`[C, n, rows, cols + 1]`, the bias in the last column."""
    return torch.einsum("cnto,nti->cnoi", g, a)


def fisher(model: nn.Module, x: Tensor) -> Tensor:
    """The whole matrix, `[P, P]`."""
    parts = []
    for a, g in capture(model, x).values():
        rows = sample_gradients(a, g).flatten(0, 1)
        parts += [rows[..., :-1].flatten(1), rows[..., -1]]
    jacobian = torch.cat(parts, 1)
    return jacobian.T @ jacobian / len(x)


def diagonal(model: nn.Module, x: Tensor) -> Tensor:
    """Of `G`, `[P]`."""
    parts = []
    for a, g in capture(model, x).values():
        if a.shape[1] == 1:  # the square of a product is the product of squares
            squares = g.square().sum(0)[:, 0].T @ a.square()[:, 0]
        else:
            squares = sample_gradients(a, g).square().sum((0, 1))
        parts += [squares[:, :-1], squares[:, -1]]
    return flatten(parts) / len(x)


def trace(model: nn.Module, x: Tensor) -> float:
    """Of `G`."""
    total = 0.0
    for a, g in capture(model, x).values():
        if a.shape[1] == 1:
            total += float((g.square().sum((0, 2, 3)) * a.square().sum((1, 2))).sum())
        else:
            total += float(sample_gradients(a, g).square().sum())
    return total / len(x)


def kfac(model: nn.Module, x: Tensor) -> Factors:
    """`A = Σ a aᵀ / (n positions)`, `B = Σ g gᵀ / n` (expand)."""
    factors = {}
    for name, (a, g) in capture(model, x).items():
        inputs, gradients = a.flatten(0, 1), g.flatten(0, 2)
        factors[name] = inputs.T @ inputs / len(inputs), gradients.T @ gradients / len(x)
    return factors


def kfac_product(model: nn.Module, factors: Factors, v: Tensor, *, apart: bool = False) -> Tensor:
    """`[P, k] -> [P, k]`; `apart` leaves out what couples weights and biases."""
    own, parts = layers(model), []
    pieces = iter(v.split([p.numel() for p in model.parameters()]))
    for name, (A, B) in factors.items():
        weight, bias = next(pieces), next(pieces)
        if apart:
            A = torch.block_diag(A[:-1, :-1], A[-1:, -1:])
        rows = len(own[name].bias)
        w = torch.cat([weight.view(rows, -1, v.shape[1]), bias[:, None]], 1)
        product = torch.einsum("po,oik,ij->pjk", B, w, A)
        parts += [product[:, :-1].flatten(0, 1), product[:, -1]]
    return torch.cat(parts)


def _pushed_through(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[n, C]`, a free tensor u like it, and `Jᵀu [P]`, whose derivative in u is `J`."""
    out = model(x)
    u = torch.zeros_like(out, requires_grad=True)
    return out, u, flatten(torch.autograd.grad(out, list(model.parameters()), u, create_graph=True))


def _curved(p: Tensor, jv: Tensor) -> Tensor:
    """`(diag(p) - p pᵀ) jv / n`, over leading axes of jv."""
    pj = p * jv
    return (pj - p * pj.sum(-1, keepdim=True)) / len(p)


def products(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """`G v` for `v [P, k]`, a column at a time."""
    out, u, pulled = _pushed_through(model, x)
    p, found = out.detach().softmax(1), []
    for column in v.T:
        (jv,) = torch.autograd.grad(pulled, u, column, retain_graph=True)
        back = torch.autograd.grad(out, list(model.parameters()), _curved(p, jv), retain_graph=True)
        found.append(flatten(back))
    return torch.stack(found, 1)


def product(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """`G v` for `v [P, k]`, all columns in one batched pass."""
    out, u, pulled = _pushed_through(model, x)
    p = out.detach().softmax(1)
    (jv,) = torch.autograd.grad(pulled, u, v.T, retain_graph=True, is_grads_batched=True)
    parameters = list(model.parameters())
    back = torch.autograd.grad(out, parameters, _curved(p, jv), is_grads_batched=True)
    return torch.cat([t.flatten(1) for t in back], 1).T


def gram_eigenvalues(model: nn.Module, x: Tensor) -> Tensor:
    """All that are not zero by construction, `[n C]`, ascending: those of `J Jᵀ / n`."""
    gram: Tensor | float = 0.0
    for a, g in capture(model, x).values():
        if a.shape[1] == 1:
            c, n = g.shape[:2]
            a, g = a[:, 0], g.flatten(0, 2)
            gram = gram + (g @ g.T).view(c, n, c, n).mul_((a @ a.T)[:, None]).view(c * n, c * n)
        else:
            rows = sample_gradients(a, g).flatten(0, 1).flatten(1)
            gram = gram + rows @ rows.T
    return torch.linalg.eigvalsh(gram / len(x))


def top_eigenvalues(model: nn.Module, x: Tensor, y: Tensor, k: int, steps: int) -> Tensor:
    """The k largest of H, descending, by Lanczos with all vectors kept orthogonal."""
    parameters = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    gradient = flatten(torch.autograd.grad(loss, parameters, create_graph=True))
    v = torch.randn(len(gradient), dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    basis = v.new_zeros(min(steps, len(v)), len(v))
    small = v.new_zeros(len(basis), len(basis))
    size = float(v.norm())
    for i in range(len(basis)):
        if float(v.norm()) < 1e-12 * size:  # nothing is left outside of the basis
            small = small[:i, :i]
            break
        basis[i] = v / v.norm()
        v = flatten(torch.autograd.grad(gradient, parameters, basis[i], retain_graph=True))
        for _ in range(2):  # once leaves rounding errors that grow
            along = basis[: i + 1] @ v
            v = v - along @ basis[: i + 1]
            small[i, : i + 1] += along
    return torch.linalg.eigvalsh(small)[-k:].flip(0)  # reads the lower triangle
