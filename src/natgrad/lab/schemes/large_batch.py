"""The six settings with which ResNet-50 was trained on ImageNet by batches of 4,096 to 131,072."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from natgrad.checks import POSITIVE, check_numbers, check_whole
from natgrad.errors import SettingError
from natgrad.inverses import Cholesky
from natgrad.lab.schemes.erasing import RandomErasing
from natgrad.lab.schemes.mixup import RunningMixup
from natgrad.schedules import (
    CoupledMomentum,
    GrowingInterval,
    PolynomialDecay,
    WarmupDamping,
)
from natgrad.tables import Column, Table

IMAGENET = 1_281_167  # training images


@dataclass(frozen=True)
class LargeBatch:
    """One row of table 3 of Osawa 2019, with the epochs of its table 1.

    Its methods make the schemes of these numbers. Where the text of the paper has the damping start
    below its target, the table, which is followed here, has it 100 times above.

    Arguments:
        batch: samples in a step (BS).
        mixup_alpha: ``α`` of running mixup, ``λ ~ Beta(α, α)``.
        damping: ``γ⁰``, at the start.
        target_damping: ``γ_target``, what it falls towards.
        norm_damping: ``ρ_BN``, times that damping for norm layers.
        warm_steps: ``t_warmup``, which sets the speed between the two.
        power: ``p_decay`` of the learning rate.
        begin: ``e_start``, epoch at which the rate begins to fall.
        end: ``e_end``, epoch at which it would reach 0.
        lr: ``η⁰``, learning rate at the start.
        momentum: ``m⁰`` at the start, in a fixed ratio to the rate.
        epochs: of training.
    """

    batch: int
    mixup_alpha: float
    damping: float
    target_damping: float
    norm_damping: float
    warm_steps: int
    power: float
    begin: float
    end: float
    lr: float
    momentum: float
    epochs: int

    def __post_init__(self) -> None:
        check_whole(self.batch, "LargeBatch.batch", low=1)
        check_whole(self.epochs, "LargeBatch.epochs", low=1)
        check_numbers(self, mixup_alpha=POSITIVE, norm_damping=POSITIVE)
        self.damping_schedule(), self.momentum_schedule()  # which check the rest

    def steps_per_epoch(self, images: int = IMAGENET) -> float:
        """Steps of an epoch, not rounded.

        Arguments:
            images: number of training images.
        """
        return images / self.batch

    def steps(self, images: int = IMAGENET) -> int:
        """In ``epochs``. The paper prints 5,434 for batches of 8,192, which are 5,474.

        Arguments:
            images: number of training images.
        """
        return math.ceil(self.epochs * images / self.batch)

    def damping_schedule(self) -> WarmupDamping:
        """Eqs. 13 and 14."""
        return WarmupDamping(self.damping, self.target_damping, self.warm_steps)

    def lr_schedule(self, images: int = IMAGENET) -> PolynomialDecay:
        """Eq. 15; ends after training does, so that the rate is not yet zero.

        Arguments:
            images: number of training images.
        """
        rate = self.steps_per_epoch(images)
        return PolynomialDecay(self.lr, self.begin, self.end, self.power, rate)

    def momentum_schedule(self, images: int = IMAGENET) -> CoupledMomentum:
        """Eq. 16, for `DisplacementMomentum`.

        Arguments:
            images: number of training images.
        """
        return CoupledMomentum(self.momentum, self.lr_schedule(images))

    def interval(self, images: int = IMAGENET) -> GrowingInterval:
        """Eq. 20, for ``update_every`` and ``refresh_every`` if every step is too often.

        Arguments:
            images: number of training images.
        """
        return GrowingInterval(self.steps_per_epoch(images))

    def mixup(self, classes: int = 1000, generator: torch.Generator | None = None) -> RunningMixup:
        """Running mixup, eqs. 9 to 11.

        Arguments:
            classes: that labels may be of.
            generator: of the random numbers, on the CPU; ``None`` is torch's own.
        """
        return RunningMixup(self.mixup_alpha, classes, generator)

    def erasing(self, generator: torch.Generator | None = None) -> RandomErasing:
        """Random erasing, the same for all batches.

        Arguments:
            generator: of the random numbers, on the CPU; ``None`` is torch's own.
        """
        return RandomErasing(generator=generator)

    def kfac(self) -> dict[str, Any]:
        """Arguments of `natgrad.KFAC`: damping by eqs. 12 to 14, with ρ_BN times as much for norm
        layers; factors of every batch, and of no other one; no clipping."""
        return {
            "damping": self.damping_schedule(),
            "norm_damping": self.norm_damping,
            "inverse": Cholesky(),
            "factor_decay": 0.0,
            "update_every": 1,
            "refresh_every": 1,
            "kl_clip": None,
        }

    def describe(self) -> Table:
        """Every number with its symbol in the paper."""
        columns = (Column("symbol"), Column("meaning"), Column("value", "right"))
        rows = ((*_NAMES[name], text) for name, text in self.texts().items())
        return Table(f"ResNet-50 on ImageNet, batches of {self.batch:,}", columns, tuple(rows))

    def texts(self) -> dict[str, str]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["steps"] = self.steps()
        return {
            name: f"{value:,}" if isinstance(value, int) else f"{value:g}"
            for name, value in values.items()
        }


_NAMES = {
    "batch": ("BS", "samples in a batch"),
    "mixup_alpha": ("α_mixup", "running mixup, λ ~ Beta(α, α)"),
    "damping": ("γ⁰", "damping at the start"),
    "target_damping": ("γ_target", "damping in the end"),
    "norm_damping": ("ρ_BN", "times that damping for norm layers"),
    "warm_steps": ("t_warmup", "steps that set the speed between the two"),
    "power": ("p_decay", "power of the decay of the learning rate"),
    "begin": ("e_start", "epoch in which it begins"),
    "end": ("e_end", "epoch in which it would reach zero"),
    "lr": ("η⁰", "learning rate at the start"),
    "momentum": ("m⁰", "momentum at the start, in a fixed ratio to η"),
    "epochs": ("epochs", "of training"),
    "steps": ("steps", "of training"),
}

# Columns as in LargeBatch.
_ROWS = (
    (4_096, 0.4, 2.5e-2, 2.5e-4, 16.0, 313, 11.0, 1, 53, 8.18e-3, 0.997, 35),
    (8_192, 0.4, 2.5e-2, 2.5e-4, 16.0, 157, 8.0, 1, 53.5, 1.25e-2, 0.993, 35),
    (16_384, 0.4, 2.5e-2, 2.5e-4, 32.0, 79, 8.0, 1, 53.5, 2.5e-2, 0.985, 35),
    (32_768, 0.6, 2.0e-2, 2.0e-4, 16.0, 59, 3.5, 1.5, 49.5, 3.0e-2, 0.97, 45),
    (65_536, 0.6, 1.5e-2, 1.5e-4, 16.0, 40, 2.9, 2, 64.5, 4.0e-2, 0.95, 60),
    (131_072, 1.0, 1.0e-2, 1.0e-4, 8.0, 30, 2.9, 3, 107.6, 7.0e-2, 0.93, 100),
)
LARGE_BATCH = tuple(LargeBatch(*row) for row in _ROWS)


def large_batch(batch: int) -> LargeBatch:
    """The setting for batches of this size.

    Arguments:
        batch: 4,096, 8,192, 16,384, 32,768, 65,536 or 131,072; others raise.
    """
    for setting in LARGE_BATCH:
        if setting.batch == batch:
            return setting
    sizes = ", ".join(str(setting.batch) for setting in LARGE_BATCH)
    raise SettingError(
        f"batch is {batch!r} but there are settings for {sizes} only: pass one of these, or change "
        "one with dataclasses.replace()."
    )


def large_batch_table() -> Table:
    """All six, a row each."""
    columns = tuple(Column(symbol, "right") for symbol, _ in _NAMES.values())
    rows = tuple(tuple(row.texts().values()) for row in LARGE_BATCH)
    return Table("ResNet-50 on ImageNet by large batches", columns, rows)
