"""Weights of the terms of a loss are read from its gradient, and nothing is read into others."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.curvature.loss_weights import numbers_of, seen, tolerance

N, C = 32, 10
GENERATOR = torch.Generator().manual_seed(0)
Y = torch.randint(C, (N,), generator=GENERATOR)
HARD = F.one_hot(Y, C).float()
MIXED = 0.3 * HARD + 0.7 * HARD.roll(1, 0)
GRAY = (torch.rand(N, C, generator=GENERATOR) - 0.5).clamp(min=0)
TOKENS = torch.randint(65, (8, 64), generator=GENERATOR)
PADDED = TOKENS.masked_fill(torch.arange(64) >= torch.arange(8).mul(7).add(9)[:, None], -100)
TERMS = int((PADDED != -100).sum())
PIXELS = torch.randint(5, (4, 8, 8), generator=GENERATOR)


def outputs(*shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def read(z, loss, readings=None):
    z = z.clone().requires_grad_()
    loss(z).backward()
    names, numbers = numbers_of(z.detach(), z.grad, *([readings] if readings else []))
    limit = tolerance(z.dtype, z.grad.dtype)
    return seen(names, numbers.double().tolist(), z.shape, limit)


def tokens(z, y, **more):
    return F.cross_entropy(z.flatten(0, -2), y.flatten(), **more)


def per_sample_means(z):
    each = tokens(z, PADDED, reduction="none").view(8, 64)
    return (each.sum(1) / (PADDED != -100).sum(1)).mean()


UNIFORM = {
    "mean": (outputs(N, C), lambda z: F.cross_entropy(z, Y), N, 1 / N),
    "very sure": (outputs(N, C, scale=30), lambda z: F.cross_entropy(z, Y), N, 1 / N),
    "sum": (outputs(N, C), lambda z: F.cross_entropy(z, Y, reduction="sum"), N, 1),
    "times three": (outputs(N, C), lambda z: 3 * F.cross_entropy(z, Y), N, 3 / N),
    "two classes": (outputs(N, 2), lambda z: F.cross_entropy(z, Y % 2), N, 1 / N),
    "three classes": (outputs(N, 3), lambda z: F.cross_entropy(z, Y % 3), N, 1 / N),
    "smoothed": (outputs(N, C), lambda z: F.cross_entropy(z, Y, label_smoothing=0.1), N, 1 / N),
    "mixed": (outputs(N, C), lambda z: F.cross_entropy(z, MIXED), N, 1 / N),
    "mixed and smoothed": (
        outputs(N, C),
        lambda z: F.cross_entropy(z, MIXED, label_smoothing=0.1),
        N,
        1 / N,
    ),
    "tokens": (outputs(8, 64, 65), lambda z: tokens(z, TOKENS), 512, 1 / 512),
    "padding": (outputs(8, 64, 65), lambda z: tokens(z, PADDED), TERMS, 1 / TERMS),
    "pixels": (outputs(4, 5, 8, 8), lambda z: F.cross_entropy(z, PIXELS), 256, 1 / 256),
    "bfloat16": (outputs(N, C).bfloat16(), lambda z: F.cross_entropy(z, Y), N, 1 / N),
    "float16": (outputs(N, C).half(), lambda z: F.cross_entropy(z.float(), Y), N, 1 / N),
    "log softmax": (outputs(N, C).log_softmax(1), lambda z: F.nll_loss(z, Y), N, 1 / N),
    "log softmax of pixels": (
        outputs(4, 5, 8, 8).log_softmax(1),
        lambda z: F.nll_loss(z, PIXELS, reduction="sum"),
        256,
        1,
    ),
    "yes or no": (
        outputs(N, 1),
        lambda z: F.binary_cross_entropy_with_logits(z[:, 0], (Y > 4).float()),
        N,
        1 / N,
    ),
    "labels": (
        outputs(N, C),
        lambda z: F.binary_cross_entropy_with_logits(z, HARD),
        N * C,
        1 / N / C,
    ),
    "gray": (
        outputs(N, C),
        lambda z: F.binary_cross_entropy_with_logits(z, GRAY, reduction="sum"),
        N * C,
        1,
    ),
    "probabilities": (
        outputs(N, C).sigmoid(),
        lambda z: F.binary_cross_entropy(z, GRAY),
        N * C,
        1 / N / C,
    ),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_terms_of_one_weight(name):
    z, loss, count, weight = UNIFORM[name]
    found = read(z, loss)
    assert found.reading
    assert found.uniform
    assert found.count == count
    assert found.weight == pytest.approx(weight, rel=10 * found.tolerance)


def test_terms_of_many_weights():
    by_class = torch.arange(1.0, C + 1)
    found = read(outputs(N, C), lambda z: F.cross_entropy(z, Y, weight=by_class))
    own = by_class[Y] / by_class[Y].sum()
    assert not found.uniform
    assert found.count * found.mean == pytest.approx(1.0, rel=1e-4)
    assert found.count * found.square == pytest.approx(float(own.square().sum()), rel=1e-4)
    found = read(outputs(8, 64, 65), per_sample_means)
    each = 1 / (8 * (PADDED != -100).sum(1))
    assert not found.uniform
    # Some rows stand for all.
    assert found.count * found.mean == pytest.approx(1.0, rel=0.05)
    assert found.count * found.square == pytest.approx(float(each.sum() / 8), rel=0.1)
    weight = torch.tensor(5.0)
    found = read(
        outputs(N, C), lambda z: F.binary_cross_entropy_with_logits(z, HARD, pos_weight=weight)
    )
    assert found.count * found.mean == pytest.approx((0.1 * 5 + 0.9), rel=1e-4)


@pytest.mark.parametrize("entries", [1, 2, 3, C])
@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.mse_loss(z, outputs(*z.shape).flip(0)),
        lambda z: F.mse_loss(z.sigmoid(), HARD[:, : z.shape[1]]),
        lambda z: F.l1_loss(z, outputs(*z.shape).flip(0)),
        lambda z: z.square().mean(),
        lambda z: F.softplus(-z).square().mean(),
    ],
    ids=["squares", "squares of sigmoids", "l1", "z^2", "softplus^2"],
)
def test_what_fits_no_reading(loss, entries):
    assert not read(outputs(N, entries), loss).reading


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.multi_margin_loss(z, Y),
        lambda z: F.cross_entropy(z / 2, Y),
        lambda z: F.cross_entropy(z.tanh(), Y),
        lambda z: F.mse_loss(z.softmax(1), HARD),
        lambda z: F.kl_div(z.log_softmax(1), outputs(N, C).softmax(1), reduction="batchmean"),
    ],
    ids=["margin", "temperature", "capped", "Brier", "distillation"],
)
def test_other_losses_of_classes_fit_no_reading(loss):
    assert not read(outputs(N, C, scale=2.0), loss).reading


def test_too_little_to_tell():
    one = read(outputs(1, 2), lambda z: F.cross_entropy(z, Y[:1] % 2))
    assert (one.reading, one.count) == ("", -1)
    assert read(outputs(1, 3), lambda z: F.cross_entropy(z, Y[:1] % 3)).weight == pytest.approx(1)
    assert read(outputs(N, C), lambda z: 0 * z.sum()).reading == "nothing"
    assert read(outputs(0, C), lambda z: z.sum()).reading == "nothing"


def test_many_positions_are_sampled_and_all_are_counted():
    torch.manual_seed(0)
    y = torch.randint(3, (30_000,)).masked_fill(torch.arange(30_000) % 7 == 0, -100)
    state = torch.get_rng_state()
    found = read(outputs(30_000, 3), lambda z: F.cross_entropy(z, y))
    assert found.count == int((y != -100).sum())
    assert found.weight == pytest.approx(1 / found.count, rel=1e-4)
    assert torch.equal(state, torch.get_rng_state())  # no generator was advanced


def test_only_the_readings_that_are_asked_for():
    z, loss, *_ = UNIFORM["mean"]
    assert not read(z, loss, ("logit", "probability")).reading
    assert read(z, loss, ("softmax",)).reading == "softmax"
