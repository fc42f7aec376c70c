"""Losses are torch's means, sums of parts give the metrics of the whole."""

import math

import pytest
import torch
import torch.nn.functional as F

from natgrad.lab.schemes import one_hot
from natgrad.lab.train.task_losses import IGNORED, Classes, Pixels, Reconstruction, Tokens


def added(objective, output, target):
    """Metrics from two unequal parts."""
    total = {}
    for part in (slice(0, 2), slice(2, None)):
        for name, value in objective.sums(output[part], target[part]).items():
            total[name] = total.get(name, 0.0) + value
    return objective.metrics(total)


def test_classes():
    output, target = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 2, 2])
    objective = Classes(4, 0.1)
    smooth = F.cross_entropy(output, target, label_smoothing=0.1)
    torch.testing.assert_close(objective.loss(output, target), smooth)
    soft = objective.loss(output, one_hot(target, 4, torch.float64))
    torch.testing.assert_close(soft, smooth)
    found = added(objective, output, target)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(output, target)))
    assert found["accuracy"] == float((output.argmax(1) == target).float().mean())


def test_reconstruction():
    output, target = torch.randn(5, 6), torch.rand(5, 6)
    expected = F.binary_cross_entropy_with_logits(output, target) * 6
    torch.testing.assert_close(Reconstruction().loss(output, target), expected)
    assert added(Reconstruction(), output, target) == {"loss": pytest.approx(float(expected))}


def test_pixels():
    output = torch.tensor([[[[1.0, -1.0], [2.0, -3.0]]]] * 3)
    target = torch.tensor([[[[1.0, 1.0], [0.0, 0.0]]]] * 3)
    objective = Pixels(4)
    assert objective.terms == 4
    found = added(objective, output, target)
    assert found["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(output, target)))
    assert (found["dice"], found["accuracy"]) == (0.5, 0.5)  # 2 · 1 / (2 + 2)
    empty = torch.zeros(3, 1, 2, 2)
    assert added(objective, empty - 1, empty)["dice"] == 1.0


def test_tokens():
    output = torch.randn(4, 3, 5)
    target = torch.randint(5, (4, 3))
    target[0, 1] = target[3] = IGNORED
    objective = Tokens(3)
    expected = F.cross_entropy(output.flatten(0, 1), target.flatten())
    torch.testing.assert_close(objective.loss(output, target), expected)
    found = added(objective, output, target)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-6)
    counts = target != IGNORED
    right = ((output.argmax(-1) == target) & counts).sum() / counts.sum()
    assert found["accuracy"] == pytest.approx(float(right))
    exploded = objective.metrics({"loss": 1e9, "count": 1.0, "right": 0.0, "places": 1.0})
    assert math.isfinite(exploded["perplexity"])


def test_losses_are_in_float32_or_better():
    output = torch.randn(4, 3, dtype=torch.bfloat16)
    assert Classes(3).loss(output, torch.tensor([0, 1, 2, 0])).dtype == torch.float32
