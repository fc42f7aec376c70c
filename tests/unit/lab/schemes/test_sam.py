"""SAM on a quadratic in closed form, and what a second pass does to weights and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from natgrad.errors import CaptureError, SettingError
from natgrad.lab.schemes import SAM, AdaptiveSAM, GradientNorm, frozen_statistics
from training_loops import NETS, assert_close, assert_equal, factors, gradients, often, weights

H = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
B = torch.tensor([1.0, -1.0], dtype=torch.float64)


def quadratic(w):
    return 0.5 * w @ H @ w - B @ w


def parameter(*values):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def two_passes(scheme, loss):
    loss().backward()
    with scheme.perturbed():
        loss().backward()


def test_a_quadratic():
    """The gradient at w + ρ g / ‖g‖ is g + ρ H g / ‖g‖."""
    w = parameter(3.0, 1.0)
    two_passes(SAM([w], rho=0.3), lambda: quadratic(w))
    g = H @ w.detach() - B
    torch.testing.assert_close(w.grad, g + 0.3 * H @ g / g.norm(), rtol=1e-13, atol=0)
    assert w.tolist() == [3.0, 1.0]


def test_the_norm_is_over_all_parameters():
    one, other = parameter(3.0), parameter(1.0)
    two_passes(SAM([one, other], rho=0.3), lambda: quadratic(torch.cat([one, other])))
    w = torch.tensor([3.0, 1.0], dtype=torch.float64)
    g = H @ w - B
    found = torch.cat([one.grad, other.grad])
    torch.testing.assert_close(found, g + 0.3 * H @ g / g.norm(), rtol=1e-13, atol=0)


def test_the_adaptive_one_on_a_quadratic():
    """ε = ρ T² g / ‖T g‖ with T = |w| + η."""
    w = parameter(3.0, -1.0)
    two_passes(AdaptiveSAM([w], rho=0.3, eta=0.1), lambda: quadratic(w))
    g, t = H @ w.detach() - B, torch.tensor([3.1, 1.1], dtype=torch.float64)
    moved = 0.3 * t * t * g / (t * g).norm()
    torch.testing.assert_close(w.grad, g + H @ moved, rtol=1e-13, atol=0)


def test_the_adaptive_one_does_not_see_the_scale_of_weights():
    """Halving a weight whose input is doubled halves its displacement as well."""
    rises = []
    for scale in (1.0, 2.0):
        w = parameter(1.0 / scale, 2.0)
        scales = torch.tensor([scale, 1.0], dtype=torch.float64)
        rise = []

        def loss(w=w, scales=scales, rise=rise):
            rise.append(quadratic(scales * w))
            return rise[-1]

        two_passes(AdaptiveSAM([w], rho=0.3, eta=0.0), loss)
        rises.append(float(rise[1].detach() - rise[0].detach()))
    assert rises[0] > 0
    assert rises[0] == pytest.approx(rises[1], rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [SAM, AdaptiveSAM, lambda params: GradientNorm(params, tau=0.1)],
    ids=["SAM", "AdaptiveSAM", "GradientNorm"],
)
class TestSecondPass:
    def test_a_gradient_of_zero(self, make):
        w = parameter(2.0)
        (w * 0).sum().backward()
        with make([w]).perturbed():
            assert w.item() == 2.0
            (w * 0).sum().backward()
        assert w.grad.tolist() == [0.0]

    def test_weights_come_back_to_the_bit(self, make):
        model = NETS["cnn"].model()
        x, y = NETS["cnn"].batch()
        before = weights(model)
        seen = []

        def loss():
            seen.append(weights(model))
            return F.cross_entropy(model(x), y)

        two_passes(make(model.parameters()), loss)
        assert_equal(weights(model), before)
        assert not all(torch.equal(a, b) for a, b in zip(seen[1], before, strict=True))

    def test_weights_come_back_after_an_error(self, make):
        w = parameter(2.0, 3.0)
        quadratic(w).backward()
        with pytest.raises(RuntimeError, match="size of tensor"), make([w]).perturbed():
            (w * torch.ones(3)).sum().backward()  # of a wrong shape
        assert w.tolist() == [2.0, 3.0]

    def test_a_gradient_that_is_not_finite(self, make):
        w = parameter(2.0, 3.0)
        w.grad = torch.tensor([torch.nan, 1.0], dtype=torch.float64)
        with make([w]).perturbed():
            quadratic(w).backward()
        assert w.tolist() == [2.0, 3.0]

    def test_parameters_without_a_gradient_stay(self, make):
        w, unused = parameter(2.0, 3.0), parameter(1.0)
        quadratic(w).backward()
        with make([w, unused]).perturbed():
            assert unused.item() == 1.0
            quadratic(w).backward()
        assert unused.grad is None

    def test_a_scaled_loss(self, make):
        """Its gradients are as many times as large, and nothing else is."""
        found = []
        for scale in (1.0, 1024.0):
            w = parameter(2.0, 3.0)
            (scale * quadratic(w)).backward()
            with make([w]).perturbed(loss_scale=scale):
                (scale * quadratic(w)).backward()
            found.append(w.grad / scale)
        torch.testing.assert_close(*found, rtol=1e-12, atol=0)

    def test_micro_batches(self, make):
        """Several passes before, and as many within, are one of all of them."""
        found = []
        for parts in (1, 3):
            w = parameter(2.0, 3.0)
            scheme = make([w])
            for _ in range(parts):
                (quadratic(w) / parts).backward()
            with scheme.perturbed():
                for _ in range(parts):
                    (quadratic(w) / parts).backward()
            found.append(w.grad)
        torch.testing.assert_close(*found)

    def test_kfac_sees_the_second_pass_alone(self, make):
        """Its factors are those of one pass at the displaced weights."""
        net = NETS["cnn"]
        x, y = net.batch()
        model = net.model()
        kfac = natgrad.KFAC(model, kl_clip=None, **often())
        F.cross_entropy(model(x), y).backward()
        kfac.discard()
        with make(model.parameters()).perturbed():
            displaced = weights(model)
            F.cross_entropy(model(x), y).backward()
        stepped = gradients(model)
        kfac.step()

        other = net.model()
        with torch.no_grad():
            for p, w in zip(other.parameters(), displaced, strict=True):
                p.copy_(w)
        expected = natgrad.KFAC(other, kl_clip=None, **often())
        F.cross_entropy(other(x), y).backward()
        for p, g in zip(other.parameters(), stepped, strict=True):
            p.grad.copy_(g)
        expected.step()
        assert_close(factors(kfac), factors(expected))
        assert_close(gradients(model), gradients(other))

    def test_errors(self, make):
        w = parameter(1.0)
        name = type(make([w])).__name__
        with pytest.raises(CaptureError) as error, make([w]).perturbed():
            pass
        assert str(error.value) == (
            f"{name} found no gradient to move the weights with: call loss.backward() once before "
            "perturbed()."
        )
        w.sum().backward()
        with pytest.raises(CaptureError) as error, make([w]).perturbed():
            pass
        assert str(error.value) == (
            f"{name} found no gradient of the second pass: call loss.backward(), of a loss "
            "computed anew, inside of perturbed()."
        )
        assert w.item() == 1.0
        for wrong, count in (([], 0), (["weight"], 1)):
            with pytest.raises(SettingError) as error:
                make(wrong)
            assert str(error.value) == (
                f"{name} was given {count} parameters, of which all must be tensors and one must "
                "be there: pass model.parameters()."
            )


@pytest.mark.parametrize("make", [SAM, AdaptiveSAM])
def test_half_precision(make):
    """Of which norms and factors are not: they are 5e6 and 2e-6."""
    found = []
    for dtype in (torch.float16, torch.float64):
        w = nn.Parameter(torch.ones(10_000, dtype=dtype))
        two_passes(make([w], rho=10.0), lambda w=w: 12_500 * (w.double() ** 3 + w.double()).sum())
        found.append(w.grad.double())
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


def test_one_tensor_is_one_parameter():
    w = parameter(3.0, 1.0)
    assert SAM(w).parameters == [w]


def test_numbers():
    w = parameter(1.0)
    with pytest.raises(SettingError, match=r"SAM.rho is 0 but must be finite and above 0: pass"):
        SAM([w], rho=0)
    with pytest.raises(SettingError, match=r"AdaptiveSAM.rho is -1 but must be finite and above 0"):
        AdaptiveSAM([w], rho=-1)
    with pytest.raises(
        SettingError, match=r"AdaptiveSAM.eta is -1 but must be finite and at least"
    ):
        AdaptiveSAM([w], eta=-1)


def test_frozen_statistics():
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, momentum=None),
        nn.BatchNorm1d(4, track_running_stats=False),
    )
    x = torch.randn(8, 3)
    model(x)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with frozen_statistics(model):
        out = model(x + 1)
        out.square().sum().backward()
    assert_equal(dict(model.named_buffers()), before)
    model(x + 1)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    # It is the batch that is normalised, as in training.
    torch.testing.assert_close(out.detach().mean(0), torch.zeros(4), rtol=0, atol=1e-5)
