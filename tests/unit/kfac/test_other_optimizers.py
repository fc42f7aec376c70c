"""Optimizers that are not torch's: NVIDIA Apex's fused ones, and whatever has ``param_groups``."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import KFAC
from natgrad.errors import SettingError

LR = 0.05


class FusedSGD(torch.optim.Optimizer):
    """As Apex's: a torch optimizer whose learning rate may be a tensor, whose ``step`` hands all
    gradients to one kernel, and which throws gradients away when it is told to zero them."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": torch.tensor(lr), "set_grad_none": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            having = [p for p in group["params"] if p.grad is not None]
            torch._foreach_add_(having, [p.grad for p in having], alpha=-float(group["lr"]))

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class NoTorchOptimizer:
    """Only what is asked of it."""

    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr)
        self.step, self.zero_grad = self.inner.step, self.inner.zero_grad

    @property
    def param_groups(self):
        return self.inner.param_groups


def trained(make, *, attach=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = make(model.parameters(), LR)
    kfac = KFAC(model, optimizer, kl_clip=1e-5)  # so that steps hang on the learning rate
    if attach:
        kfac.attach()
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
        if not attach:
            kfac.step()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("make", [FusedSGD, NoTorchOptimizer])
def test_weights_are_those_of_torch(make):
    expected = trained(torch.optim.SGD)
    torch.testing.assert_close(trained(make), expected, rtol=1e-6, atol=1e-7)
    if make is FusedSGD:
        found = trained(make, attach=True)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_what_has_no_hooks_cannot_be_attached_to():
    with pytest.raises(SettingError) as error:
        trained(NoTorchOptimizer, attach=True)
    assert str(error.value) == (
        "NoTorchOptimizer has no hooks of torch.optim.Optimizer that KFAC could hang on: call "
        "kfac.step() before its step() instead of attach()."
    )


def test_copies_of_the_weights_have_no_rate_for_these():
    """As Apex's FP16_Optimizer keeps them in float32."""
    model = nn.Linear(4, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    with pytest.raises(SettingError, match=r"\(FusedSGD\) has none of the parameters of Linear"):
        KFAC(model, FusedSGD(copies, LR))
