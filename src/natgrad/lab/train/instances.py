"""Mask R-CNN's losses, and how well it finds objects (Pauloski 2022, sec. 6.3.2)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.lab.data import average_precision, box_matches, mask_matches
from natgrad.lab.models import MASK_RCNN_HEADS
from natgrad.lab.train.task_losses import TaskObjective, exact

Target = dict[str, Tensor]


class InstanceObjective(TaskObjective):
    """The sum of five losses, each a mean over what the network has looked at: anchors, regions,
    pixels of masks. Metrics are COCO's average precisions of boxes and of masks."""

    regions = MASK_RCNN_HEADS

    def output(self, model: nn.Module, inputs: list[Tensor], targets: list[Target]) -> Any:
        """In training the losses by name, otherwise with them what was found in each image."""
        if model.training:
            return model(inputs, targets)
        with _asked_for_losses(model, inputs[0].device):
            losses = model(inputs, [_single(target) for target in targets])
        return losses, model(inputs)

    def loss(self, output: Mapping[str, Tensor], target: Any) -> Tensor:
        return torch.stack([exact(one) for one in output.values()]).sum()

    def sums(
        self, output: tuple[Mapping[str, Tensor], Sequence[Target]], target: list[Target]
    ) -> dict[str, Any]:
        losses, found = output
        pairs = list(zip(found, target, strict=True))
        return {
            "loss": float(self.loss(losses, target)) * len(target),
            "count": len(target),
            "boxes": [box_matches(*pair) for pair in pairs],
            "masks": [mask_matches(*pair) for pair in pairs],
        }

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        boxes, masks = (average_precision(sums[name]) for name in ("boxes", "masks"))
        return super().metrics(sums) | {
            "box_ap": boxes.mean,
            "box_ap50": boxes.half,
            "mask_ap": masks.mean,
            "mask_ap50": masks.half,
        }


@contextmanager
def _asked_for_losses(model: Any, device: torch.device) -> Iterator[None]:
    """As in training, but for the backbone's norms; what is drawn at random (regions to look at)
    is the same every time."""
    parts = (model, model.transform, model.rpn, model.roi_heads)
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(0)
        for part in parts:
            part.training = True  # train() would ask all modules below
        try:
            yield
        finally:
            for part in parts:
                part.training = False


def _single(target: Target) -> Target:
    """Without crowds, which are there to be judged by and not to be found."""
    kept = target["iscrowd"] == 0
    each = ("boxes", "labels", "masks", "area", "iscrowd")
    return target | {name: target[name][kept] for name in each}
