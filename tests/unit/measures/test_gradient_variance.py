"""Variances of gradients against a loop over samples."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.measures import gradient_variance
from natgrad.operators import Problem
from unit.measures.brute_force import Brute, batches, classified, network


def test_of_all_parameters_and_of_each():
    x, y = classified(20, 4, 3)
    model = network(4, 5, 3)
    brute = Brute(model, F.cross_entropy, x, y)
    found = gradient_variance(model, F.cross_entropy, batches(x, y, 3, 11, 6))
    assert found.total == pytest.approx(float(brute.covariance().trace()), rel=1e-10)
    assert found.gradient == pytest.approx(float(brute.gradient().square().sum()), rel=1e-10)
    assert (found.samples, found.parameters) == (20, len(brute.theta))
    assert found.mean == pytest.approx(found.total / len(brute.theta))
    assert found.unbiased == pytest.approx(float(brute.rows().var(0).sum()), rel=1e-10)
    assert list(found.parts) == list(brute.named)
    last = brute.rows()[:, -3:]  # the bias of the last layer
    variance, square = found.parts["2.bias"]
    assert variance == pytest.approx(float(last.var(0, correction=0).sum()), rel=1e-10)
    assert square == pytest.approx(float(last.mean(0).square().sum()), rel=1e-10)


def test_of_some_parameters():
    x, y = classified(10, 4, 3)
    model = network(4, 3)
    whole = gradient_variance(model, F.cross_entropy, (x, y))
    some = gradient_variance(model, F.cross_entropy, (x, y), parameters="*bias")
    assert some.parts == {"0.bias": pytest.approx(whole.parts["0.bias"])}
    problem = Problem(model, F.cross_entropy, (x, y), parameters="*bias")
    assert gradient_variance(problem) == some


def test_is_none_of_equal_samples():
    model = network(4, 3)
    x, y = torch.randn(1, 4, dtype=torch.float64).expand(5, -1), torch.zeros(5, dtype=torch.int64)
    assert gradient_variance(model, F.cross_entropy, (x, y)).total == pytest.approx(0, abs=1e-14)
    one = gradient_variance(model, F.cross_entropy, (x[:1], y[:1]))
    assert one.unbiased != one.unbiased  # of one sample there is none


def test_prints_a_table():
    x, y = classified(10, 4, 3)
    found = gradient_variance(network(4, 3), F.cross_entropy, (x, y))
    assert found.table().column("parameter") == ("0.weight", "0.bias")
    assert "Gradients of 10 samples" in str(found)
    assert f"all: variance {found.total:.4g}" in str(found)


def far_off(n=200):
    """A mean gradient that is a thousand times as large as its deviation."""
    x = 1 + 1e-3 * torch.randn(n, 3, dtype=torch.float64)
    return x, 100 + 1e-1 * torch.randn(n, 2, dtype=torch.float64)


class Bare(nn.Module):
    """A parameter in no layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight.T


@pytest.mark.parametrize("model", [network(3, 2), Bare()], ids=["layers", "bare"])
def test_a_large_mean_costs_no_digits(model):
    model.float()
    x, y = (t.float() for t in far_off())
    found = gradient_variance(model, F.mse_loss, batches(x, y, 70, 130))
    exact = Brute(model.double(), F.mse_loss, x.double(), y.double())
    truth = float(exact.covariance().trace())
    assert float(exact.gradient().square().sum()) > 1e5 * truth
    assert found.total == pytest.approx(truth, rel=1e-3)


class Sometimes(nn.Module):
    """A layer that batches of negative numbers do not reach, and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(3, 3, dtype=torch.float64)
        self.rare = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        h = self.twice(self.twice(x).tanh())
        return self.rare(h) if bool((x > 0).all()) else h


def test_layers_that_are_used_seldom_or_often():
    x, y = torch.randn(9, 3, dtype=torch.float64).abs(), torch.randn(9, 3, dtype=torch.float64)
    x[5:] *= -1
    model = Sometimes()
    brute = Brute(model, F.mse_loss, x, y)
    found = gradient_variance(model, F.mse_loss, batches(x, y, 5, 4))
    rows = torch.zeros(9, len(brute.theta), dtype=torch.float64)
    for n in range(9):
        model.zero_grad()
        F.mse_loss(model(x[n : n + 1]), y[n : n + 1]).backward()
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        rows[n] = torch.cat([g.flatten() for g in own])
    assert found.total == pytest.approx(float(rows.var(0, correction=0).sum()), rel=1e-10)
