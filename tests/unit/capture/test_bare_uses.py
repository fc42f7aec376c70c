"""Bare parameters: blocks of whole gradients, by stand-ins in the module's own forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bare_modules as bare
from natgrad import KFAC, Diagonal, Full

DAMPING = 0.1
N = 8


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def batch(n: int = N, seed: int = 4):
    torch.manual_seed(seed)
    return torch.randn(n, bare.TOKENS, bare.WIDTH, dtype=torch.float64), torch.randint(3, (n,))


def gradients_of_samples(model: nn.Module, name: str, x, y) -> torch.Tensor:
    """``[n, numel]``, sample by sample, on a copy that nobody watches."""
    twin = made(type(model))
    twin.load_state_dict(model.state_dict())
    p = twin.get_parameter(name)
    losses = [F.cross_entropy(twin(one[None]), t[None]) for one, t in zip(x, y, strict=True)]
    return torch.stack([torch.autograd.grad(loss, p)[0].flatten() for loss in losses])


def expected(model: nn.Module, name: str, x, y) -> torch.Tensor:
    """``(F + damping)^-1`` times the gradient, with ``F`` the diagonal of a dense Fisher matrix."""
    rows = gradients_of_samples(model, name, x, y)
    dense = rows.mT @ rows / len(rows)
    step = rows.mean(0) / (dense.diagonal() + DAMPING)
    return step.view(model.get_parameter(name).shape)


def kfac_of(model: nn.Module, **settings) -> KFAC:
    settings = {"damping": DAMPING, "kl_clip": None, **settings}
    return KFAC(model, update_every=1, refresh_every=1, **settings)


def bare_names(model: nn.Module) -> list[str]:
    return [n for n, _ in model.named_parameters() if n.rpartition(".")[2] in "pq"]


def step(kfac: KFAC, model: nn.Module, x, y) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    kfac.step()


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", bare.UNDERSTOOD, ids=lambda kind: kind.__name__)
def test_a_step_is_that_of_the_dense_fisher_matrix(kind):
    model, (x, y) = made(kind), batch()
    kfac = kfac_of(model)
    assert kfac.coverage().uncovered.keys() <= {"before.weight", "before.bias"}
    step(kfac, model, x, y)
    found = kfac.coverage().covered
    for name in bare_names(model):
        assert found[name] == "Diagonal()", kfac.coverage()
        close(model.get_parameter(name).grad, expected(model, name, x, y))


@pytest.mark.parametrize("kind", bare.UNDERSTOOD, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_the_model_alone(kind):
    """On steps that take statistics as on all others."""
    model, (x, y) = made(kind), batch()
    F.cross_entropy(model(x), y).backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    kfac = kfac_of(model)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for name, value in plain.items():
        close(model.get_parameter(name).grad, value)
    kfac.detach()
    assert not any(p._backward_hooks for p in model.parameters())
    assert not {"p", "q"} & {key for m in model.modules() for key in vars(m)}


@pytest.mark.parametrize(("kind", "why"), bare.REFUSED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_not_understood_keeps_its_plain_gradient_and_says_why(kind, why):
    model, (x, y) = made(kind), batch()
    F.cross_entropy(model(x), y).backward()
    (name,) = bare_names(model)
    plain = model.get_parameter(name).grad.clone()
    kfac = kfac_of(model)
    for _ in range(2):
        step(kfac, model, x, y)
        close(model.get_parameter(name).grad, plain)
    assert why in kfac.coverage().uncovered[name]
    assert "before.weight" in " ".join(kfac.coverage().covered)
