"""Slow and obviously right: losses, gradients of samples and dense matrices of a small model."""

import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.errors import SettingError

DTYPE = torch.float64


def refuses(sentence):
    return pytest.raises(SettingError, match=f"^{re.escape(sentence)}$")


def network(*widths, activation=nn.Tanh, bias=True):
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias, dtype=DTYPE), activation()]
    return nn.Sequential(*layers[:-1])


def classified(n, inputs, classes):
    return torch.randn(n, inputs, dtype=DTYPE), torch.randint(classes, (n,))


def batches(x, y, *sizes):
    """Of unequal sizes, which a mean of means would get wrong."""
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def minimised(model, loss, x, y, steps=200):
    """The model at a minimum of its loss, by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=steps,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        return value

    optimizer.step(closure)
    optimizer.zero_grad()
    return model


class Brute:
    """Everything as a function of the flat parameters."""

    def __init__(self, model, loss, x, y):
        self.model, self.loss, self.x, self.y = model, loss, x, y
        self.named = {k: p.detach() for k, p in model.named_parameters()}
        self.theta = torch.cat([p.flatten() for p in self.named.values()])

    def output(self, theta, x=None):
        sizes = [p.numel() for p in self.named.values()]
        parts = theta.split(sizes)
        values = {k: t.view_as(p) for t, (k, p) in zip(parts, self.named.items(), strict=True)}
        return torch.func.functional_call(self.model, values, (self.x if x is None else x,))

    def value(self, theta):
        return self.loss(self.output(theta), self.y)

    def rows(self):
        """Gradients of the losses of single samples, ``[n, P]``."""
        found = []
        for x, y in zip(self.x.split(1), self.y.split(1), strict=True):
            theta = self.theta.clone().requires_grad_()
            (g,) = torch.autograd.grad(self.loss(self.output(theta, x), y), theta)
            found.append(g)
        return torch.stack(found)

    def gradient(self):
        return self.rows().mean(0)

    def covariance(self):
        rows = self.rows() - self.gradient()
        return rows.T @ rows / len(rows)

    def second_moment(self):
        rows = self.rows()
        return rows.T @ rows / len(rows)

    def hessian(self):
        return torch.autograd.functional.hessian(self.value, self.theta)

    def ggn(self):
        """For cross-entropy: ``mean Jᵀ (diag p - p pᵀ) J``."""
        assert self.loss is F.cross_entropy
        jacobian = torch.autograd.functional.jacobian(self.output, self.theta)
        p = self.output(self.theta).softmax(1)
        curved = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        return torch.einsum("nip,nij,njq->pq", jacobian, curved, jacobian) / len(p)
