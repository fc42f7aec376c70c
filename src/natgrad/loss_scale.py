"""How a loss adds up the samples of a step, so that one damping means the same for all losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from natgrad.checks import POSITIVE, check_positive_fields, check_whole, number
from natgrad.errors import SettingError


@dataclass(frozen=True)
class MeanLoss:
    """The loss between two steps is a mean over its samples, as that of most training loops.

    Arguments:
        terms_per_sample: how many terms of each sample the loss is a mean over as well: tokens of a
            sequence, labelled pixels of an image. Curvature and damping are then those of one term.
        regions: for modules that see regions of samples instead of samples, such as the heads of a
            detector: patterns of module names, each with the number of terms of one region.
        batch_axis: the axis of the model's first input that counts samples.
    """

    terms_per_sample: float = 1
    regions: Mapping[str, float] | None = None
    batch_axis: int = 0

    reduction: ClassVar[Literal["mean", "sum"]] = "mean"

    def __post_init__(self) -> None:
        check_positive_fields(self, "terms_per_sample")
        given = self.regions or {}
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise SettingError(
                f"MeanLoss.regions is {given!r} but must map patterns of modules to numbers: pass "
                "one such as {'roi_heads.*': 1}."
            )
        for name, terms in given.items():
            number(terms, f"MeanLoss.regions[{name!r}]", POSITIVE)
        check_whole(self.batch_axis, "MeanLoss.batch_axis", low=0)


@dataclass(frozen=True)
class SumLoss:
    """The loss between two steps is a sum over its samples, as with torch's ``reduction="sum"``.

    Arguments:
        terms_per_sample: how many terms of each sample the loss is a sum over as well: tokens of a
            sequence, labelled pixels of an image. Curvature and damping are then those of one term.
        batch_axis: the axis of the model's first input that counts samples.
    """

    terms_per_sample: float = 1
    batch_axis: int = 0

    reduction: ClassVar[Literal["mean", "sum"]] = "sum"

    def __post_init__(self) -> None:
        check_positive_fields(self, "terms_per_sample")
        check_whole(self.batch_axis, "SumLoss.batch_axis", low=0)
