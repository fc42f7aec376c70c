"""Margins and mistakes of classifiers against a loop over samples and positions."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.curvature.losses import CrossEntropy, SquareLoss
from natgrad.measures import mistakes
from natgrad.measures.classes import margins
from unit.measures.brute_force import DTYPE, refuses


def test_classes():
    f, y = torch.randn(30, 4, dtype=DTYPE), torch.randint(4, (30,))
    found = mistakes(F.cross_entropy)(f, y)
    assert found.tolist() == (f.argmax(1) != y).double().tolist()
    probabilities = F.one_hot(y, 4).to(DTYPE) * 0.9 + 0.025
    assert mistakes(F.cross_entropy)(f, probabilities).tolist() == found.tolist()


@pytest.mark.parametrize("axis", [1, -1])
def test_positions_of_which_some_do_not_count(axis):
    f, y = torch.randn(5, 6, 3, dtype=DTYPE), torch.randint(3, (5, 6))
    y[0, :4] = y[1] = -100
    truth = []
    for logits, targets in zip(f, y, strict=True):
        counted = [(a, int(t)) for a, t in zip(logits, targets, strict=True) if t != -100]
        wrong = sum(int(a.argmax()) != t for a, t in counted)
        truth.append(wrong / max(1, len(counted)))
    loss = CrossEntropy(class_axis=axis)
    output = f if axis == -1 else f.transpose(1, 2)
    assert mistakes(loss)(output, y).tolist() == pytest.approx(truth)
    values, counted = margins(loss, output, y)
    assert torch.equal(counted, y != -100)
    for i, t in ((0, 4), (2, 0), (4, 5)):
        rest = [float(f[i, t, c]) for c in range(3) if c != y[i, t]]
        assert float(values[i, t]) == pytest.approx(float(f[i, t, y[i, t]]) - max(rest))


def test_of_positions_ahead():
    f, y = torch.randn(4, 6, 3, dtype=DTYPE), torch.randint(3, (4, 6))
    truth = (f[:, :-1].argmax(-1) != y[:, 1:]).double().mean(1)
    found = mistakes(CrossEntropy(class_axis=-1, ahead=1))(f, y)
    torch.testing.assert_close(found, truth)


def test_two_classes():
    f, y = torch.randn(8, 3, dtype=DTYPE), torch.randint(2, (8, 3)).to(DTYPE)
    found = mistakes(F.binary_cross_entropy_with_logits)(f, y)
    torch.testing.assert_close(found, ((f > 0) != (y > 0.5)).double().mean(1))


def test_a_tie_is_wrong():
    assert mistakes(F.cross_entropy)(torch.zeros(2, 3), torch.tensor([0, 2])).tolist() == [1, 1]


def test_refusals():
    f = torch.randn(3, 2)
    with refuses(
        "SquareLoss has no classes, so there are no margins and no mistakes: use a cross-entropy, "
        "or give an error of your own where one is asked for."
    ):
        mistakes(SquareLoss())(f, f)
