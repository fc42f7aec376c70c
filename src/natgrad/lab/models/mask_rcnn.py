"""Mask R-CNN by torchvision: a class, a box and a mask for every object (He et al. 2017)."""

from importlib import import_module
from typing import Any

from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.models.vision import torchvision

# Where Pauloski 2022 (sec. 6.3.2) uses K-FAC:
# the box head, whose loss is a mean over regions, and the mask head,
# whose loss is one over the pixels of masks of 28 x 28 for some of them. `natgrad.KFAC` takes it
# twice, as ``include=MASK_RCNN_HEADS, loss=MeanLoss(regions=MASK_RCNN_HEADS)``.
MASK_RCNN_HEADS = {"roi_heads.box_*": 1, "roi_heads.mask_*": 28 * 28}


def mask_rcnn(classes: int, *, side: int = 800) -> nn.Module:
    """With a feature pyramid on ResNet-50, from random weights. Needs torchvision.

    In training ``model(images, targets)`` gives a dictionary of losses, otherwise ``model(images)``
    gives what is found in each, as torchvision's own; `natgrad.lab.data.Instances` has such
    batches.

    Arguments:
        classes: how many there are with the background, which is class 0; at least 2.
        side: pixels to which the shorter side of an image is resized, at least 32; the longer one
            becomes at most 1333/800 of it.
    """
    _check(classes, side)
    detection = _detection()
    model: nn.Module = detection.maskrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=classes,
        min_size=side,
        max_size=round(side * 1333 / 800),
    )
    return model


def small_mask_rcnn(classes: int, *, width: int = 16, side: int = 128) -> nn.Module:
    """The same heads and losses on four convolutions, for small images and a CPU: 64 regions of an
    image instead of 512. Norms are of single images, so that an image's features do not depend on
    those beside it.

    Arguments:
        classes: how many there are with the background, which is class 0; at least 2.
        width: channels of the features, instead of 256; a multiple of 4.
        side: pixels to which the shorter side of an image is resized, at least 32; the longer one
            becomes at most twice that.
    """
    _check(classes, side)
    if width < 4 or width % 4:
        raise SettingError(
            f"width is {width} but must be a multiple of 4, the groups of a norm: pass such a "
            "number."
        )
    detection, ops = _detection(), import_module("torchvision.ops")
    boxes, masks = (import_module(f"torchvision.models.detection.{n}_rcnn") for n in _KINDS)
    levels = ["0", "1", "2"]
    anchors = detection.anchor_utils.AnchorGenerator(
        sizes=tuple((side // n,) for n in (12, 6, 3, 2)), aspect_ratios=((0.5, 1.0, 2.0),) * 4
    )
    model: nn.Module = masks.MaskRCNN(
        _backbone(width),
        min_size=side,
        max_size=2 * side,
        rpn_anchor_generator=anchors,
        rpn_pre_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_train=100,
        rpn_post_nms_top_n_test=100,
        rpn_batch_size_per_image=64,
        box_roi_pool=ops.MultiScaleRoIAlign(levels, output_size=7, sampling_ratio=2),
        box_head=boxes.TwoMLPHead(49 * width, 4 * width),
        box_predictor=boxes.FastRCNNPredictor(4 * width, classes),
        box_batch_size_per_image=64,
        mask_roi_pool=ops.MultiScaleRoIAlign(levels, output_size=14, sampling_ratio=2),
        mask_head=masks.MaskRCNNHeads(width, (width, width), 1),
        mask_predictor=masks.MaskRCNNPredictor(width, width, classes),
    )
    return model


_KINDS = ("faster", "mask")


def _check(classes: int, side: int) -> None:
    if classes < 2:
        raise SettingError(
            f"classes is {classes} but there must be at least 2, of which the background is one: "
            "pass how many there are with it."
        )
    if side < 32:
        raise SettingError(
            f"side is {side} but must be at least 32 pixels, the step of the coarsest features: "
            "pass a larger one."
        )


def _backbone(width: int) -> Any:
    """Features at every 4th, 8th and 16th pixel, and a pyramid of ``width`` channels on them."""
    utils = import_module("torchvision.models.detection.backbone_utils")
    widths = [width, width, 2 * width, 4 * width]
    stages = [
        nn.Sequential(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, after),
            nn.ReLU(),
        )
        for before, after in zip([3, *widths], widths, strict=False)
    ]
    taken = {str(stage): str(stage - 1) for stage in (1, 2, 3)}
    return utils.BackboneWithFPN(nn.Sequential(*stages), taken, widths[1:], width)


def _detection() -> Any:
    torchvision()
    return import_module("torchvision.models.detection")
