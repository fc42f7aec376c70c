"""Losses with their metrics: ``loss = total / count`` of a batch, and what else is counted."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.curvature.likelihoods import Bernoulli, Categorical, Likelihood
from natgrad.errors import SettingError
from natgrad.lab.data.dataset import IGNORED
from natgrad.lab.schemes import smooth, soft_cross_entropy


class TaskObjective(ABC):
    """``terms``: how many terms of a sample the loss is a mean over, and ``regions``, as
    `natgrad.MeanLoss` takes them."""

    terms: float = 1
    regions: Mapping[str, float] = MappingProxyType({})
    likelihood: Likelihood = Categorical()

    def output(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """What the loss and the sums are of."""
        return model(inputs)

    @abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """The mean over samples."""

    @abstractmethod
    def sums(self, output: Any, target: Any) -> dict[str, Any]:
        """Numbers, or lists, that add up over batches."""

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Of all batches whose sums these are."""
        found = {"loss": sums["loss"] / sums["count"]}
        if "right" in sums:
            found["accuracy"] = sums["right"] / sums["places"]
        return found


class Classes(TaskObjective):
    """Cross-entropy over classes; targets are labels ``[n]``, or distributions ``[n, classes]``."""

    def __init__(self, classes: int, label_smoothing: float = 0.0) -> None:
        self.classes, self.label_smoothing = classes, label_smoothing

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            if self.label_smoothing:
                target = smooth(target, self.label_smoothing, self.classes)
            return soft_cross_entropy(output, target)
        return F.cross_entropy(exact(output), target, label_smoothing=self.label_smoothing)

    def sums(self, output: Tensor, target: Tensor) -> dict[str, float]:
        total = F.cross_entropy(exact(output), target, reduction="sum")
        n = float(len(target))
        right = float((output.argmax(1) == target).sum())
        return {"loss": float(total), "count": n, "right": right, "places": n}


class Reconstruction(TaskObjective):
    """Binary cross-entropy of pixels from 0 to 1, summed over those of a sample."""

    likelihood = Bernoulli()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._total(output, target) / len(output)

    def sums(self, output: Tensor, target: Tensor) -> dict[str, float]:
        return {"loss": float(self._total(output, target)), "count": float(len(output))}

    def _total(self, output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(exact(output), target, reduction="sum")


class Pixels(TaskObjective):
    """Binary cross-entropy, the mean over pixels; ``dice = 2 |A ∩ B| / (|A| + |B|)``."""

    likelihood = Bernoulli()

    def __init__(self, pixels: int) -> None:
        self.terms = pixels

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(exact(output), target.to(exact(output)))

    def sums(self, output: Tensor, target: Tensor) -> dict[str, float]:
        guess, truth = output > 0, target > 0.5
        numbers = {
            "loss": self.loss(output, target) * target.numel(),
            "right": (guess == truth).sum(),
            "both": (guess & truth).sum(),
            "either": guess.sum() + truth.sum(),
        }
        count = float(target.numel())
        return {name: float(n) for name, n in numbers.items()} | {"count": count, "places": count}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = super().metrics(sums)
        # Of two empty sets nothing is missing.
        dice = 2 * sums["both"] / sums["either"] if sums["either"] else 1.0
        return found | {"dice": dice}


class Tokens(TaskObjective):
    """Cross-entropy, the mean over those positions ``[n, tokens]`` whose target counts."""

    likelihood = Categorical(class_axis=-1, ignore_index=IGNORED)

    def __init__(self, terms: float) -> None:
        self.terms = terms

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(exact(output).flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    def sums(self, output: Tensor, target: Tensor) -> dict[str, float]:
        counts = target != IGNORED
        n = float(counts.sum())
        right = float(((output.argmax(-1) == target) & counts).sum())
        total = float(self.loss(output, target)) * n if n else 0.0
        return {"loss": total, "count": n, "right": right, "places": n}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = super().metrics(sums)
        # A loss that has exploded would overflow.
        return found | {"perplexity": math.exp(min(found["loss"], 700.0))}


class OwnObjective(TaskObjective):
    """A function ``(output, target)`` of the user's, the mean over samples."""

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        self.function, self.name = function, name

    def loss(self, output: Any, target: Any) -> Tensor:
        found = self.function(output, target)
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = (
                f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            )
            raise SettingError(
                f"The loss {self.name} gives {what} but must give one number, the mean over "
                "samples, as a tensor: return that."
            )
        return found.reshape(())

    def sums(self, output: Any, target: Any) -> dict[str, float]:
        n = float(len(target))
        return {"loss": float(self.loss(output, target)) * n, "count": n}


def exact(output: Tensor) -> Tensor:
    """In float32 or better."""
    return output.to(torch.promote_types(output.dtype, torch.float32))
