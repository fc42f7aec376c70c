"""What the likelihoods say to settings, outputs, targets and generators that do not fit."""

import pytest
import torch

from natgrad.curvature.likelihoods import Bernoulli, Categorical, Gaussian
from natgrad.errors import SettingError

LIKELIHOODS = [Categorical(), Gaussian(), Bernoulli()]


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Categorical(class_axis=0),
            "Categorical.class_axis is 0, which is the axis of the samples, but must be "
            "another: pass 1 for outputs [n, C, ...] or -1 for [n, ..., C].",
        ),
        (
            lambda: Categorical(class_axis="last"),
            "Categorical.class_axis is 'last' but must be a whole number: pass an int.",
        ),
        (
            lambda: Categorical(ignore_index=None),
            "Categorical.ignore_index is None but must be a whole number: pass an int.",
        ),
        (
            lambda: Gaussian(variance=0.0),
            "Gaussian.variance is 0.0 but must be finite and above 0: pass such a number.",
        ),
        (
            lambda: Gaussian(variance=float("nan")),
            "Gaussian.variance is nan but must be finite and above 0: pass such a number.",
        ),
        (
            lambda: Gaussian(variance="1"),
            "Gaussian.variance is '1' but must be finite and above 0: pass such a number.",
        ),
        (
            lambda: Categorical().exact(torch.zeros(5)),
            "Categorical needs an output [n, C, ...] or [n, ..., C] of n samples, but got the "
            "shape [5]: add the axis of the samples, output.unsqueeze(0).",
        ),
        (
            lambda: Categorical(class_axis=2).passes(torch.zeros(2, 5)),
            "Categorical.class_axis is 2, but an output of shape [2, 5] has its classes on an "
            "axis from 1 to 1: pass that axis.",
        ),
        (
            lambda: Categorical(class_axis=-2).passes(torch.zeros(2, 5)),
            "Categorical.class_axis is -2, but an output of shape [2, 5] has its classes on an "
            "axis from 1 to 1: pass that axis.",
        ),
        (
            lambda: Categorical().exact(torch.zeros(2, 3, 5), torch.zeros(2, 3).long()),
            "Categorical got torch.int64 targets of shape [2, 3] for an output of shape "
            "[2, 3, 5] with its classes on axis 1: pass class indices of shape [2, 5], or set "
            "class_axis.",
        ),
        (
            lambda: Categorical().sample(torch.zeros(2, 5), generator(), torch.zeros(2)),
            "Categorical got torch.float32 targets of shape [2] for an output of shape [2, 5] "
            "with its classes on axis 1: pass class indices of shape [2], or set class_axis.",
        ),
        (
            lambda: Bernoulli().exact(torch.zeros(2, 5).long()),
            "A likelihood needs real floating-point outputs, but got torch.int64: pass the "
            "network's output before any argmax or rounding.",
        ),
        (
            lambda: Gaussian().sample(torch.zeros(()), generator()),
            "A likelihood needs an output [n, ...] of n samples, but got a single number: "
            "pass the network's output and not the loss.",
        ),
    ],
)
def test_message(make, message):
    with pytest.raises(SettingError) as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda x: type(x).__name__)
def test_generator_of_another_device(likelihood):
    with pytest.raises(SettingError) as error:
        likelihood.sample(torch.zeros(2, 5, device="meta"), generator())
    assert str(error.value) == (
        "The output is on meta but the generator on cpu: "
        'make the generator with torch.Generator("meta").'
    )
