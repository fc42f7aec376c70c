"""Dense matrices by autograd alone; every library is checked against them before natgrad is.

    H = ∇²L,   G = 1/N Σ JᵀΛJ,   C = 1/N Σ ∇ℓ ∇ℓᵀ,   K-FAC block = B ⊗ A

`L` is the mean of the losses `ℓ` of single samples, `J` the Jacobian of a sample's output and `Λ`
the Hessian of `ℓ` in that output. Rows and columns are parameters in `named_parameters()` order.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


def second_derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Backward over backward: torch's forward mode warns when it is first used."""
    found: Callable[[Tensor], Tensor] = torch.func.jacrev(torch.func.jacrev(function))
    return found


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def call(model: nn.Module, theta: Tensor, x: Tensor) -> Tensor:
    """The model's output at parameters `theta [P]`."""
    named, start = {}, 0
    for name, p in model.named_parameters():
        named[name] = theta[start : start + p.numel()].view_as(p)
        start += p.numel()
    out: Tensor = torch.func.functional_call(model, named, (x,))
    return out


def losses(loss: Loss, out: Tensor, y: Tensor) -> Tensor:
    """`[n]`: every sample as a batch of one."""
    return torch.stack([loss(out[i : i + 1], y[i : i + 1]) for i in range(len(out))])


def hessian(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    return second_derivative(lambda t: loss(call(model, t, x), y))(flat(model))


def sample_gradients(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """`∇ℓ` of every sample, `[n, P]`."""
    found: Tensor = torch.func.jacrev(lambda t: losses(loss, call(model, t, x), y))(flat(model))
    return found


def empirical_fisher(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    rows = sample_gradients(model, loss, x, y)
    return rows.T @ rows / len(x)


def roots(loss: Loss, out: Tensor, y: Tensor) -> Tensor:
    """`[n, outputs, outputs]`: symmetric square roots of `Λ`."""
    each = torch.stack(
        [
            second_derivative(lambda o, i=i: loss(o[None], y[i : i + 1]))(out[i].detach())
            for i in range(len(out))
        ]
    )
    values, basis = torch.linalg.eigh(each)
    return basis * values.clamp(min=0).sqrt()[:, None] @ basis.mT


def ggn(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    jacobian = torch.func.jacrev(lambda t: call(model, t, x))(flat(model))
    rows = (roots(loss, model(x), y) @ jacobian).flatten(0, 1)
    return rows.T @ rows / len(x)


def layer_blocks(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, block: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`[P, P]` with `block(a, g)` for each Linear and Conv2d layer, zero between layers.

    a: inputs of the layer with a one behind them `[n, positions, columns]`; g: gradients of its
    output, one for each column of a root of `Λ`, `[outputs, n, positions, rows]`.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    inputs, outputs = {}, {}

    def keep(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        inputs[module], outputs[module] = args[0].detach(), out

    handles = [m.register_forward_hook(keep) for m in layers]
    out = model(x)
    for handle in handles:
        handle.remove()
    sent = roots(loss, out, y).unbind(-1)
    tensors = [outputs[m] for m in layers]
    backward = [torch.autograd.grad(out, tensors, r, retain_graph=True) for r in sent]
    start, places = 0, {}
    for name, p in model.named_parameters():
        places[name] = torch.arange(start, start + p.numel()).view(len(p), -1)
        start += p.numel()
    whole = torch.zeros(start, start, dtype=x.dtype)
    names = {m: name for name, m in model.named_modules()}
    for i, m in enumerate(layers):
        a, g = inputs[m], torch.stack([grads[i] for grads in backward])
        if isinstance(m, nn.Conv2d):
            a = F.unfold(a, m.kernel_size, m.dilation, m.padding, m.stride).mT
            g = g.flatten(3).mT
        else:
            a, g = a[:, None], g[:, :, None]
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        where = torch.cat([places[f"{names[m]}.{part}"] for part in ("weight", "bias")], 1)
        whole[where.reshape(-1, 1), where.reshape(1, -1)] = block(a, g)
    return whole


def kfac_expand(a: Tensor, g: Tensor) -> Tensor:
    """Every position counts as a sample of its own."""
    n, positions, _ = a.shape
    A = torch.einsum("nti,ntj->ij", a, a) / (n * positions)
    B = torch.einsum("rnti,rntj->ij", g, g) / n
    return torch.kron(B, A)


def kfac_reduce(a: Tensor, g: Tensor) -> Tensor:
    """Inputs are averaged over positions, gradients are summed."""
    return kfac_expand(a.mean(1, keepdim=True), g.sum(2, keepdim=True))


def ekfac(a: Tensor, g: Tensor) -> Tensor:
    """In the eigenbasis of K-FAC (expand), with the true diagonal there."""
    n = len(a)
    A = torch.einsum("nti,ntj->ij", a, a)
    B = torch.einsum("rnti,rntj->ij", g, g)
    basis = torch.kron(torch.linalg.eigh(B).eigenvectors, torch.linalg.eigh(A).eigenvectors)
    gradients = torch.einsum("rnti,ntj->rnij", g, a).flatten(0, 1).flatten(1)
    return basis * ((gradients @ basis).square().sum(0) / n) @ basis.T


def true_block(a: Tensor, g: Tensor) -> Tensor:
    """The block of `G` itself."""
    gradients = torch.einsum("rnti,ntj->rnij", g, a).flatten(0, 1).flatten(1)
    return gradients.T @ gradients / len(a)
