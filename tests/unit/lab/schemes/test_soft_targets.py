"""Distributions over classes, and their cross-entropy, by hand and beside torch's."""

import math

import pytest
import torch
import torch.nn.functional as F

from natgrad.errors import SettingError
from natgrad.lab.schemes import one_hot, smooth, soft_cross_entropy


def test_one_hot():
    labels = torch.tensor([2, 0])
    assert one_hot(labels, 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert one_hot(labels, 3).dtype == torch.float32
    assert one_hot(labels.to(torch.uint8), 3, torch.float64).dtype == torch.float64
    assert one_hot(torch.tensor(1), 3).tolist() == [0, 1, 0]


def test_one_hot_of_positions_has_classes_second():
    labels = torch.randint(4, (2, 3, 5))
    found = one_hot(labels, 4)
    assert found.shape == (2, 4, 3, 5)
    assert torch.equal(found.argmax(1), labels)
    assert torch.equal(found.sum(1), torch.ones(2, 3, 5))


def test_smoothing_by_hand():
    # 0.9 · 1 + 0.1 / 4 and 0.1 / 4.
    expected = torch.tensor([[0.025, 0.925, 0.025, 0.025]])
    torch.testing.assert_close(smooth(torch.tensor([1]), 0.1, classes=4), expected)
    torch.testing.assert_close(smooth(torch.tensor([[0.0, 1.0, 0.0, 0.0]])), expected)
    mixed = smooth(torch.tensor([[0.5, 0.5]]), 0.2)
    torch.testing.assert_close(mixed, torch.tensor([[0.5, 0.5]]))
    assert torch.equal(smooth(torch.tensor([[0.3, 0.7]]), 0.0), torch.tensor([[0.3, 0.7]]))


def test_cross_entropy_by_hand():
    # log softmax of [0, log 3] is [log 1/4, log 3/4].
    output = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64)
    target = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    expected = -0.5 * (math.log(0.25) + math.log(0.75))
    assert float(soft_cross_entropy(output, target)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2)])
def test_cross_entropy_of_one_hot_and_of_smoothed_labels_is_that_of_torch(shape):
    output = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, (shape[0], *shape[2:]))
    one, other = one_hot(labels, 3), F.cross_entropy(output, labels)
    torch.testing.assert_close(soft_cross_entropy(output, one), other)
    smoothed = soft_cross_entropy(output, smooth(labels, 0.1, classes=3))
    # To float32, in which one_hot() makes distributions unless told otherwise.
    torch.testing.assert_close(
        smoothed, F.cross_entropy(output, labels, label_smoothing=0.1), rtol=1e-6, atol=0
    )


def test_cross_entropy_of_half_precision_is_in_float32():
    output = torch.randn(8, 1000).bfloat16()
    target = torch.randn(8, 1000).softmax(1)
    found = soft_cross_entropy(output, target)
    assert found.dtype == torch.float32
    expected = -(target * output.float().log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(found, expected)


def test_errors():
    with pytest.raises(SettingError) as error:
        one_hot(torch.tensor([0.0, 1.0]), 2)
    assert str(error.value) == (
        "labels are of dtype torch.float32 but must be whole numbers from 0 to 1: pass indices of "
        "classes."
    )
    for labels in ([0, 3], [-100, 3]):
        with pytest.raises(SettingError) as error:
            one_hot(torch.tensor(labels), 3)
        assert str(error.value) == (
            f"labels reach from {labels[0]} to 3 but must be from 0 to 2: pass classes=4, or leave "
            "out what has no class."
        )
    with pytest.raises(SettingError, match="classes is 0 but must be a whole number of at least 1"):
        one_hot(torch.tensor([0]), 0)
    with pytest.raises(SettingError) as error:
        smooth(torch.tensor([0, 1]))
    assert str(error.value) == (
        "targets of dtype torch.int64 are labels, which do not say how many classes there are: "
        "pass smooth(labels, amount, classes)."
    )
    with pytest.raises(SettingError, match=r"amount is 1 but must be in \[0, 1\): pass such a"):
        smooth(torch.tensor([[0.0, 1.0]]), 1)
    with pytest.raises(SettingError) as error:
        smooth(torch.tensor([[0.0, 1.0]]), classes=3)
    assert str(error.value) == (
        "Distributions over classes are of shape [1, 2] but must be [n, 3, …]: pass those, or "
        "labels as whole numbers."
    )
    with pytest.raises(SettingError, match=r"of shape \[2\] but must be \[n, classes, …\]"):
        smooth(torch.tensor([0.0, 1.0]))
    with pytest.raises(SettingError) as error:
        soft_cross_entropy(torch.zeros(4, 3), torch.zeros(4))
    assert str(error.value) == (
        "output is of shape [4, 3] and target of shape [4], but both must be [n, classes, …]: "
        "make labels distributions with one_hot()."
    )
