"""What wide layers cost at the defaults, by the plan's own counts: no weight is ever made."""

import pytest
import torch
from torch import nn

from natgrad import KFAC
from natgrad.placement.cost import Flops
from natgrad.schedules import Doubling

MIB = 1 << 20


def example_of_mnist():
    """pytorch/examples: 1.2 million parameters, of which Linear(9216, 128) has nearly all."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def operations(plan):
    """Of all decompositions, and of preconditioning all gradients once."""
    costs = Flops()
    refresh = sum(costs.decompose(b.factor(name)) for b in plan.blocks for name in b.decomposed)
    return refresh, sum(map(costs.precondition, plan.blocks))


def refreshes(steps):
    """How often the default decomposes in the first steps of a training."""
    last, count = None, 0
    for step in range(steps):
        if last is None or step - last >= Doubling(100)(step):
            last, count = step, count + 1
    return count


def test_the_example_of_mnist():
    """At most twice the operations of a training step of 64 images, on average over the first
    hundred; 1.8 GiB, and 19,600 gigaflop for a refresh, where all of A is kept."""
    plan = KFAC(example_of_mnist(), kl_clip=None).plan
    refresh, apply = operations(plan)
    pixels = 26 * 26 * (9 * 1 * 32) + 24 * 24 * (9 * 32 * 64)
    training = 6 * 64 * (pixels + 9216 * 128 + 128 * 10)
    assert refreshes(100) == 8
    assert refresh * 8 / 100 + apply <= 2 * training
    assert plan.memory(0).total <= 100 * MIB
    whole = KFAC(example_of_mnist(), kl_clip=None, max_dim=None).plan
    assert operations(whole)[0] > 1000 * refresh
    assert whole.memory(0).total > 500 * MIB


@pytest.mark.parametrize("words", [32_000, 128_256])
def test_a_head_of_many_words(words):
    """Its memory is that of its input factor and of a slice of its gradient, whatever the number of
    words, and a step with it takes at most 1.3 times one without, for a GPT of that width with 24
    layers and 8,192 tokens a step."""
    width = 2048
    plan = KFAC(nn.Linear(width, words, bias=False, device="meta"), kl_clip=None).plan
    assert plan.memory(0).total <= 300 * MIB
    refresh, apply = operations(plan)
    training = 6 * 8192 * (12 * 24 * width**2 + words * width)
    update = 2 * 8192 * (width**2 + words)
    assert refresh / 100 + update / 10 + apply <= 0.3 * training


def test_layers_below_the_limit_are_planned_as_ever():
    model = nn.Linear(4608, 512, bias=False, device="meta")
    plans = [KFAC(model, kl_clip=None, max_dim=limit).plan for limit in (5000, None)]
    assert plans[0].fingerprint() == plans[1].fingerprint()
