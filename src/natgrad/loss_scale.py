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
        batch_axis: the axis of the model's first input that counts samples; or patterns of module
            names, each with the axis of its input, where that cannot be seen from its size, and the
            model's own under ``""``.
    """

    terms_per_sample: float = 1
    regions: Mapping[str, float] | None = None
    batch_axis: int | Mapping[str, int] = 0

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
        _check_axes(self.batch_axis, "MeanLoss.batch_axis")

    @property
    def axis_of_model(self) -> int:
        return _axis_of_model(self.batch_axis)

    @property
    def axes_of_modules(self) -> dict[str, int]:
        return _axes_of_modules(self.batch_axis)


@dataclass(frozen=True)
class SumLoss:
    """The loss between two steps is a sum over its samples, as with torch's ``reduction="sum"``.

    Arguments:
        terms_per_sample: how many terms of each sample the loss is a sum over as well: tokens of a
            sequence, labelled pixels of an image. Curvature and damping are then those of one term.
        batch_axis: the axis of the model's first input that counts samples; or patterns of module
            names, each with the axis of its input, where that cannot be seen from its size, and the
            model's own under ``""``.
    """

    terms_per_sample: float = 1
    batch_axis: int | Mapping[str, int] = 0

    reduction: ClassVar[Literal["mean", "sum"]] = "sum"

    def __post_init__(self) -> None:
        check_positive_fields(self, "terms_per_sample")
        _check_axes(self.batch_axis, "SumLoss.batch_axis")

    @property
    def axis_of_model(self) -> int:
        return _axis_of_model(self.batch_axis)

    @property
    def axes_of_modules(self) -> dict[str, int]:
        return _axes_of_modules(self.batch_axis)


def _axis_of_model(given: int | Mapping[str, int]) -> int:
    return given.get("", 0) if isinstance(given, Mapping) else given


def _axes_of_modules(given: int | Mapping[str, int]) -> dict[str, int]:
    return {k: v for k, v in given.items() if k} if isinstance(given, Mapping) else {}


def _check_axes(given: int | Mapping[str, int], name: str) -> None:
    if not isinstance(given, Mapping):
        check_whole(given, name, low=0)
        return
    if not all(isinstance(pattern, str) for pattern in given):
        raise SettingError(
            f"{name} is {given!r} but must be an axis, or map patterns of modules to axes: pass "
            "one such as {'encoder.*': 1}."
        )
    for pattern, axis in given.items():
        check_whole(axis, f"{name}[{pattern!r}]", low=0)
