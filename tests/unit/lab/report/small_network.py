"""A small network with its matrices written out by autograd, without natgrad."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from natgrad.operators import Problem


def tanh_net(seed=0):
    """Two layers, 4 x 6 and 3 x 5 with their biases."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data(n=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def problem(n=12):
    return Problem(tanh_net(), F.cross_entropy, data(n), progress=False)


def dense(given):
    """H, F, C, the gradient ``[P]`` and the Jacobian ``[n, 3, P]`` of a problem on one batch."""
    model, (x, y) = given.model, given.data.source[0]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])

    def outputs(flat):
        parts = flat.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return functional_call(model, named, (x,))

    def loss(flat):
        return F.cross_entropy(outputs(flat), y)

    hessian = torch.autograd.functional.hessian(loss, theta)
    gradient = torch.autograd.functional.jacobian(loss, theta)
    jacobian = torch.autograd.functional.jacobian(outputs, theta)
    p = outputs(theta).softmax(1)
    curved = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    fisher = torch.einsum("nci,ncd,ndj->ij", jacobian, curved, jacobian) / len(x)
    each = torch.einsum("nc,nci->ni", p - F.one_hot(y, 3), jacobian)
    return hessian, fisher, each.mT @ each / len(x), gradient, jacobian


def blocks():
    """Where the layers' matrices lie among the parameters: ``[rows, cols]`` each, bias last."""
    first = torch.cat([torch.arange(20).view(4, 5), torch.arange(20, 24).view(4, 1)], 1)
    second = torch.cat([torch.arange(24, 36).view(3, 4), torch.arange(36, 39).view(3, 1)], 1)
    return first, second


def only(matrix, groups):
    """The entries within each group of indices, all others zero."""
    out = torch.zeros_like(matrix)
    for index in groups:
        out[index[:, None], index] = matrix[index[:, None], index]
    return out
