"""Every sentence that a loss refuses something with."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.curvature.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    OwnLoss,
    SquareLoss,
    as_loss,
)
from natgrad.errors import SettingError


def refuses(sentence):
    return pytest.raises(SettingError, match=f"^{re.escape(sentence)}$")


def mean(output, target):
    return (output - target).square().mean()


class TestSettings:
    @pytest.mark.parametrize("field", ["class_axis", "ignore_index", "ahead"])
    @pytest.mark.parametrize("value", [1.0, True, None])
    def test_whole_numbers(self, field, value):
        with refuses(f"CrossEntropy.{field} is {value!r} but must be a whole number: pass an int."):
            CrossEntropy(**{field: value})

    def test_axis_of_the_samples(self):
        with refuses(
            "CrossEntropy.class_axis is 0, which is the axis of the samples, but must be another: "
            "pass 1 for outputs [n, C, ...] or -1 for [n, ..., C]."
        ):
            CrossEntropy(class_axis=0)

    @pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.1", True])
    def test_label_smoothing(self, value):
        with refuses(
            f"CrossEntropy.label_smoothing is {value!r} but must be a number from 0 to 1: pass the "
            "share that is spread over all classes."
        ):
            CrossEntropy(label_smoothing=value)

    def test_ahead(self):
        with refuses(
            "CrossEntropy.ahead is -1 but must not be below 0: pass how many positions later the "
            "target of an output stands."
        ):
            CrossEntropy(class_axis=-1, ahead=-1)
        with refuses(
            "CrossEntropy.ahead is 1, which shifts positions on axis 1, but class_axis is 1 too: "
            "pass class_axis=-1 for outputs [n, T, C]."
        ):
            CrossEntropy(ahead=1)

    @pytest.mark.parametrize(
        ("given", "kind"),
        [([1.0, 2.0], "list"), (torch.ones(2, dtype=torch.bool), "torch.bool")],
    )
    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (lambda w: CrossEntropy(class_weights=w), "CrossEntropy.class_weights"),
            (lambda w: BinaryCrossEntropy(weight=w), "BinaryCrossEntropy's weight"),
            (lambda w: BinaryCrossEntropy(pos_weight=w), "BinaryCrossEntropy's pos_weight"),
        ],
    )
    def test_weights(self, make, name, given, kind):
        with refuses(f"{name} is of type {kind} but must be a tensor of real numbers."):
            make(given)
        for value in (-1.0, float("inf"), float("nan")):
            with refuses(f"{name} holds {value}, but weights must be finite and not below 0."):
                make(torch.tensor([1.0, value]))

    def test_one_weight_a_class(self):
        with refuses(
            "CrossEntropy.class_weights has the shape [2, 3] but must have the shape [C]: pass one "
            "weight a class."
        ):
            CrossEntropy(class_weights=torch.ones(2, 3))
        with refuses(
            "CrossEntropy.class_weights has 3 weights, but the output of shape [5, 4] has 4 "
            "classes on axis 1: pass one weight a class, or set class_axis."
        ):
            CrossEntropy(class_weights=torch.ones(3)).total(
                torch.zeros(5, 4), torch.zeros(5).long()
            )

    def test_own_loss(self):
        with refuses(
            "OwnLoss.function is 'mean' but must be callable: pass a function of (output, target)."
        ):
            OwnLoss("mean")
        with refuses(
            "OwnLoss.output_hessian is 2 but must be callable or None: pass a function of "
            "(output, target)."
        ):
            OwnLoss(mean, 2)


def uses(loss, output, target):
    """Every way to use a loss, as functions without arguments."""
    return (
        lambda: loss.total(output, target),
        lambda: loss.weight(output, target),
        lambda: loss.sample_totals(output, target),
        lambda: loss.roots(output, target),
        lambda: loss.stacked_roots(output, target),
        lambda: loss.draw(output, target, torch.Generator()),
        lambda: loss.curve(output, target, output),
    )


class TestOutputs:
    @pytest.mark.parametrize(
        "loss", [CrossEntropy(), SquareLoss(), BinaryCrossEntropy()], ids=lambda x: type(x).__name__
    )
    def test_not_real_or_not_samples(self, loss):
        target = torch.zeros(2, 3)
        for use in uses(loss, torch.zeros(2, 3).long(), target):
            with refuses(
                "A loss needs real floating-point outputs, but got torch.int64: pass the network's "
                "output before any argmax or rounding."
            ):
                use()
        for use in uses(loss, torch.tensor(1.0), target):
            with refuses(
                "A loss needs an output [n, ...] of n samples, but got a single number: pass the "
                "network's output and not the loss."
            ):
                use()

    def test_without_samples(self):
        sentence = (
            "CrossEntropy needs an output [n, C, ...] or [n, ..., C] of n samples, but got the "
            "shape [4]: add the axis of the samples, output.unsqueeze(0)."
        )
        with refuses(sentence):
            CrossEntropy().total(torch.zeros(4), torch.tensor(1))
        with refuses(sentence):
            CrossEntropy().passes(torch.zeros(4))

    @pytest.mark.parametrize("axis", [3, -3])
    def test_class_axis(self, axis):
        with refuses(
            f"CrossEntropy.class_axis is {axis}, but an output of shape [2, 3, 4] has its classes "
            "on an axis from 1 to 2: pass that axis."
        ):
            CrossEntropy(class_axis=axis).total(torch.zeros(2, 3, 4), torch.zeros(2, 4).long())

    def test_nothing_to_shift(self):
        with refuses(
            "CrossEntropy.ahead is 1, which needs an output [n, T, ..., C] with positions on axis "
            "1, but got the shape [2, 3]: leave out ahead."
        ):
            CrossEntropy(class_axis=-1, ahead=1).total(torch.zeros(2, 3), torch.zeros(2).long())

    @pytest.mark.parametrize(
        "loss",
        [
            CrossEntropy(),
            SquareLoss(),
            BinaryCrossEntropy(),
            OwnLoss(mean, lambda f, y: torch.eye(3).expand(2, 3, 3)),
        ],
        ids=lambda x: type(x).__name__,
    )
    @pytest.mark.parametrize("shape", [[3, 2], [2, 3, 1], [3]])
    def test_vector_to_curve(self, loss, shape):
        target = torch.full((2, 3), 0.3)
        with refuses(
            f"The vector to curve has the shape {shape}, which must end with that of the output, "
            "[2, 3]: put all other axes in front."
        ):
            loss.curve(torch.zeros(2, 3), target, torch.zeros(shape))


class TestTargets:
    @pytest.mark.parametrize(
        "target",
        [torch.zeros(2, 4).long(), torch.zeros(2).long(), torch.zeros(2, 3), torch.zeros(2, 3, 4)],
        ids=["last axis", "no positions", "real indices", "shape of the output, transposed"],
    )
    def test_classes_of_the_wrong_shape(self, target):
        for use in uses(CrossEntropy(class_axis=-1), torch.zeros(2, 3, 5), target):
            with refuses(
                f"CrossEntropy got {target.dtype} targets of shape {list(target.shape)} for an "
                "output with its classes on axis 2: pass class indices of shape [2, 3], or class "
                "probabilities of the output's shape [2, 3, 5]."
            ):
                use()

    @pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
    def test_classes_of_the_wrong_type(self, dtype):
        for use in uses(CrossEntropy(), torch.zeros(2, 3), torch.zeros(2, dtype=dtype)):
            with refuses(
                f"CrossEntropy got {dtype} targets: pass class indices of shape [2], or class "
                "probabilities of the output's shape [2, 3]."
            ):
                use()

    @pytest.mark.parametrize("index", [3, -1, -100])
    def test_classes_out_of_range(self, index):
        target = torch.tensor([0, index, -7])
        sentence = (
            f"CrossEntropy got the class index {index}, but the output has 3 classes on axis 1: "
            "pass indices from 0 to 2, or -7 where a target does not count."
        )
        weighted = CrossEntropy(ignore_index=-7, class_weights=torch.ones(3))
        for use in uses(weighted, torch.zeros(3, 3), target):
            with refuses(sentence):
                use()
        # Without weights only these look at the values of the targets.
        for use in uses(CrossEntropy(ignore_index=-7), torch.zeros(3, 3), target)[:3]:
            with refuses(sentence):
                use()

    def test_probabilities_have_no_index(self):
        for use in uses(CrossEntropy(ignore_index=1), torch.zeros(2, 2), torch.zeros(2, 2)):
            with refuses(
                "CrossEntropy.ignore_index is 1, but class probabilities have no index to ignore: "
                "pass class indices, or leave out ignore_index."
            ):
                use()

    @pytest.mark.parametrize("value", [-0.5, float("nan")])
    def test_negative_probabilities(self, value):
        target = torch.tensor([[0.5, 0.5], [1.5, value]])
        for use in uses(CrossEntropy(), torch.zeros(2, 2), target):
            with refuses(
                f"CrossEntropy got the class probability {value}, but none may be below 0: pass "
                "probabilities, not logits or their logarithms."
            ):
                use()

    @pytest.mark.parametrize("loss", [SquareLoss(), BinaryCrossEntropy()], ids=repr)
    def test_one_target_an_entry(self, loss):
        name = type(loss).__name__
        for use in uses(loss, torch.zeros(4, 1), torch.zeros(4)):
            with refuses(
                f"{name} got targets of shape [4] for an output of shape [4, 1]: both must be "
                "equal, so reshape one of them."
            ):
                use()
        for use in uses(loss, torch.zeros(4), torch.zeros(4, dtype=torch.complex64)):
            with refuses(
                f"{name} got torch.complex64 targets but needs real numbers: pass real and "
                "imaginary parts as two outputs."
            ):
                use()

    @pytest.mark.parametrize("value", [-0.5, 2.0, float("nan")])
    def test_answers_out_of_range(self, value):
        for use in uses(BinaryCrossEntropy(), torch.zeros(2), torch.tensor([0.5, value])):
            with refuses(
                f"BinaryCrossEntropy got the target {value}, but targets must lie from 0 to 1: "
                "pass the probability of a positive answer."
            ):
                use()

    @pytest.mark.parametrize("shape", [[2], [5, 1, 3]])
    @pytest.mark.parametrize("name", ["weight", "pos_weight"])
    def test_weights_that_do_not_broadcast(self, name, shape):
        loss = BinaryCrossEntropy(**{name: torch.ones(shape)})
        for use in uses(loss, torch.zeros(4, 3), torch.zeros(4, 3)):
            with refuses(
                f"BinaryCrossEntropy's {name} has the shape {shape}, which does not broadcast to "
                "the output's [4, 3]: pass one that does."
            ):
                use()


class TestOwnLoss:
    def test_without_hessian(self):
        output = torch.zeros(2, 3)
        loss = OwnLoss(mean)
        for use in (*uses(loss, output, output)[3:], lambda: loss.passes(output)):
            with refuses(
                "The loss mean has no output_hessian, which Gauss-Newton and Fisher matrices need: "
                "pass OwnLoss(function, output_hessian), or use the Hessian."
            ):
                use()
        with pytest.raises(SettingError, match=r"^The loss L1Loss has no output_hessian"):
            as_loss(nn.L1Loss()).curve(output, output, output)

    @pytest.mark.parametrize(
        ("function", "given"),
        [(lambda f, y: (f - y).mean(0), "[3]"), (lambda f, y: 1.0, "float")],
    )
    def test_not_one_number(self, function, given):
        for use in uses(OwnLoss(function), torch.zeros(2, 3), torch.zeros(2, 3))[::2][:2]:
            with refuses(
                f"OwnLoss.function returned {given} but must return a tensor "
                "with one number: take the mean over the samples."
            ):
                use()

    @pytest.mark.parametrize(
        ("target", "given"),
        [(torch.zeros(3, 3), "[3, 3]"), (torch.tensor(0.0), "[]"), ((1, 2), "tuple")],
    )
    def test_targets_that_cannot_be_taken_apart(self, target, given):
        with refuses(
            "OwnLoss needs targets that are one tensor with a row for each of the 2 samples to "
            f"take these apart, but got {given}: put the samples on axis 0."
        ):
            OwnLoss(mean).sample_totals(torch.zeros(2, 3), target)

    @pytest.mark.parametrize(
        ("hessian", "given"), [(torch.zeros(2, 3), "[2, 3]"), (None, "NoneType")]
    )
    def test_shape_of_the_hessian(self, hessian, given):
        output = torch.zeros(2, 3)
        for use in uses(OwnLoss(mean, lambda f, y: hessian), output, output)[3:]:
            with refuses(
                f"OwnLoss.output_hessian returned {given} for an output of shape [2, 3] but must "
                "return the shape [2, 3, 3]: one matrix a sample."
            ):
                use()

    def test_hessian_that_is_not_symmetric(self):
        output = torch.zeros(2, 2)
        matrix = torch.tensor([[2.0, 0.5], [0.0, 2.0]]).expand(2, 2, 2)
        for use in uses(OwnLoss(mean, lambda f, y: matrix), output, output)[3:]:
            with refuses(
                "OwnLoss.output_hessian has entries that differ from their mirror image by 0.5, "
                "but second derivatives are symmetric: return such a matrix."
            ):
                use()

    def test_hessian_that_is_not_finite(self):
        output = torch.zeros(2, 2)
        matrix = torch.tensor([[2.0, 0.5], [0.5, torch.nan]]).expand(2, 2, 2)
        for use in uses(OwnLoss(mean, lambda f, y: matrix), output, output)[3:]:
            with refuses(
                "OwnLoss.output_hessian returned entries that are infinite or not a number, but "
                "all must be finite: check the outputs of the network for these."
            ):
                use()

    def test_indefinite_hessian(self):
        output = torch.zeros(2, 2)
        matrix = torch.tensor([[4.0, 0.0], [0.0, -0.5]]).expand(2, 2, 2)
        loss = OwnLoss(mean, lambda f, y: matrix)
        for use in uses(loss, output, output)[3:6]:
            with refuses(
                "OwnLoss.output_hessian has the eigenvalue -0.5 beside a largest of 4, but only a "
                "matrix without negative ones is a sum of squares: use the Hessian of the network "
                "instead, or a positive part of output_hessian."
            ):
                use()
        # A product needs no roots.
        assert torch.equal(loss.curve(output, output, torch.ones(2, 2))[0], matrix[0].diagonal())


class TestAsLoss:
    @pytest.mark.parametrize(
        "given",
        [
            nn.CrossEntropyLoss(reduction="sum"),
            nn.MSELoss(reduction="sum"),
            nn.BCEWithLogitsLoss(reduction="sum"),
            nn.L1Loss(reduction="sum"),
            functools.partial(F.cross_entropy, reduction="sum"),
            functools.partial(F.huber_loss, reduction="sum"),
        ],
    )
    def test_reduction(self, given):
        with refuses("The loss has reduction='sum' but must be a mean: pass reduction=\"mean\"."):
            as_loss(given)

    def test_class(self):
        with refuses(
            "The loss is the class CrossEntropyLoss but must be one of its objects: pass "
            "CrossEntropyLoss()."
        ):
            as_loss(nn.CrossEntropyLoss)

    @pytest.mark.parametrize("given", ["cross_entropy", None])
    def test_not_callable(self, given):
        with refuses(
            f"The loss is {given!r} but must be a Loss, one of torch's losses, or a function of "
            "(output, target): pass for example natgrad.curvature.CrossEntropy()."
        ):
            as_loss(given)
