"""Steps where nothing says how long the natural gradient is: losses whose scale is not known."""

import pytest
import torch
from torch import nn

import natgrad.kfac.low_rank as low_rank
import natgrad.kfac.slices as slices
from natgrad import KFAC, Cholesky, Kronecker, MeanLoss, Relative
from natgrad.kfac.stacks import SlicedStack


def one_step(factor, **settings):
    """Gradients before and after, of ``factor`` times a mean of squares, and the preconditioner."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    optimizer = settings.pop("optimizer", lambda p: torch.optim.SGD(p, lr=1.0))(model.parameters())
    kfac = KFAC(model, optimizer, **settings)
    x, y = torch.randn(32, 8).double(), torch.randn(32, 5).double()
    (factor * (model(x) - y).square().mean()).backward()
    before = [p.grad.clone() for p in model.parameters()]
    kfac.step()
    return before, [p.grad for p in model.parameters()], kfac


def same(one, other, rtol=1e-9):
    return all(torch.allclose(a, b, rtol=rtol, atol=0) for a, b in zip(one, other, strict=True))


def layers(tensors):
    """One vector for each layer, weight and bias together."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [torch.cat([weight.flatten(), bias]) for weight, bias in pairs]


@pytest.mark.parametrize("written", [{"loss": MeanLoss()}, {"optimizer": torch.optim.Adam}])
def test_an_unknown_loss_is_clipped_alike_at_any_scale(written):
    """Where the user has said what it is, or no optimizer minds its scale."""
    clipped = []
    for factor in (1.0, 1e3, 1e-3):
        _, after, kfac = one_step(factor, kl_clip=1e-9, damping=Relative(0.1), **written)
        assert kfac.preconditioning.step_scale < 1
        clipped.append([g / factor for g in after])
    # The clip bounds <F^-1 g, g>, which no factor changes, so that g' = nu F^-1 g goes with 1/c.
    for other, factor in zip(clipped[1:], (1e3, 1e-3), strict=True):
        assert same([factor**2 * g for g in other], clipped[0], 1e-6)


@pytest.mark.parametrize("settings", [{}, {"inverse": Cholesky()}])
def test_steps_of_an_unknown_loss_are_as_long_as_gradients_make_them(settings):
    """They point where the natural gradient does, and their length is that which takes as much off
    the loss as the plain gradient, but at most twice the gradient's; the KL clip holds as well."""
    settings = {"damping": Relative(0.1), **settings}
    _, natural, _ = one_step(1.0, kl_clip=None, **settings)
    for factor in (1e-4, 1.0, 1e4):
        before, after, kfac = one_step(factor, kl_clip=1e30, **settings)
        assert kfac.preconditioning.step_scale == 1
        for g, d, direction in zip(*map(layers, (before, after, natural)), strict=True):
            assert torch.cosine_similarity(d, direction, dim=0) > 1 - 1e-9
            gain, length = (d @ g) / (g @ g), d.norm() / g.norm()
            # One of them holds exactly, and neither is more.
            assert float(torch.maximum(gain, length / 2)) == pytest.approx(1.0)
    before, after, kfac = one_step(1.0, kl_clip=1e-9, **settings)
    # s^2 <F^-1 g, g> = s <d, g> of the step d = s F^-1 g.
    total = 0.0
    for g, d, direction in zip(*map(layers, (before, after, natural)), strict=True):
        total += float((d.norm() / direction.norm()) * (d @ g))
    assert total == pytest.approx(1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rate", [1e-3, 0.1])
@pytest.mark.parametrize("damping", [None, Relative(0.1)])
def test_small_residuals_do_not_explode(rate, momentum, damping):
    """0.009 became 7,573 in the first step: natural gradients of squares grow as their residuals
    shrink."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum)
    kfac = KFAC(model, optimizer, damping=damping)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(128, 64)).square().mean()
        loss.backward()
        kfac.step()
        optimizer.step()
        losses.append(loss.item())
    assert kfac.settings.unknown
    assert max(losses) < 1.1 * losses[0]


@pytest.mark.parametrize("clip", [1e30, 1e-9])
def test_a_wide_layer_of_an_unknown_loss(clip, monkeypatch):
    """Slices and thin products make the step of the whole, also where it is clipped."""
    monkeypatch.setattr(slices, "WHOLE", 1 << 30)
    natural = {"damping": Relative(0.1), "kl_clip": clip}
    settings = {"structure": Kronecker(gradient_block=1), **natural}
    _, whole, _ = one_step(1.0, **settings)
    monkeypatch.setattr(slices, "WHOLE", 20)
    _, cut, kfac = one_step(1.0, **settings)
    assert any(isinstance(stack, SlicedStack) for stack in kfac.preconditioning.stacks)
    assert same(cut, whole)
    monkeypatch.setattr(low_rank, "_WIDE", 1)
    monkeypatch.setattr(low_rank, "_pays", lambda k, block: True)
    settings = {"inverse": Cholesky(), **natural}
    _, thin, kfac = one_step(1.0, **settings)
    assert kfac.low_rank._hooks
    monkeypatch.setattr(low_rank, "_WIDE", 1 << 30)
    _, whole, _ = one_step(1.0, **settings)
    assert same(thin, whole)
