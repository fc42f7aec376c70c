"""U-Net with K-FAC and with Adam: steps and time to a target (KAISA's slides)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.lab import data
from natgrad.lab.reproduce.courses import (
    Course,
    best_course,
    count_text,
    course,
    last,
    seconds_text,
    seconds_to,
    settings_of,
    share_less,
    spread_text,
    steps_to,
)
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.train.presets import preset
from natgrad.lab.train.settings import Settings
from natgrad.tables import Column, Table

OPTIMIZERS = {"adam": "Adam", "kfac": "K-FAC"}
METRIC = "test_dice"
TRIALS, STEPS, EVERY = 3, 32, 4


class UNetItem(Item):
    """A narrow U-Net on the membranes of ISBI 2012; the target is what Adam ends with."""

    name = "unet"
    title = "U-Net: K-FAC against Adam"
    papers = "KAISA's slides (Pauloski 2021)"
    printed = "time to convergence of 10.9 minutes with K-FAC and 14.6 with Adam."
    cluster = "natgrad compare --preset unet --optimizers adam,kfac --out compared"
    remark = (
        "Here: squares of 64 pixels of the 24 training images, a U-Net of 4 to 64 channels, 32 "
        "steps of 4, K-FAC in front of SGD, learning rates that fall linearly to 0. Three learning "
        "rates, a factor of 4 apart, for each; the one with the best Dice score at the end counts. "
        "Three are few: of K-FAC it is the highest in every seed, of Adam in two. The scores at "
        "the end are a point apart, so that who is first there hangs on little. CPU seconds are "
        "those of the steps, reading and testing left out, by one thread. That K-FAC does not "
        "save time has a reason of its own: 32 steps, the first ones at doubling intervals, leave "
        "its decompositions (of factors of up to 576 rows) nothing to be spread over, beside steps "
        "of so narrow a network that are cheap; KAISA's runs take minutes on GPUs."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        steps, trials = (2, 1) if smoke else (STEPS, TRIALS)
        task = preset(
            "unet",
            data=f"{__name__}:outlines" if smoke else "membrane",
            image=0 if smoke else 64,
            width=1 if smoke else 4,
            steps=steps,
            seed=seed,
        )
        tests = range(0, steps + 1, EVERY)
        found: dict[str, Course] = {}
        for key, title in OPTIMIZERS.items():
            usual = settings_of(key, task)

            def run(lr: float, usual: Settings = usual) -> Course:
                return course(replace(usual, lr=lr), tests)

            found[key] = best_course(run, usual.lr, trials, lambda c: (-last(c, METRIC),))
            tell(f"{title}: Dice {last(found[key], METRIC):.3f}, rate {found[key]['lr']:g}")
        return {"runs": found}

    def findings(self) -> tuple[Finding, ...]:
        def less(key: str, to: Any) -> Any:
            def margin(result: Result) -> float:
                runs, target = result["runs"], last(result["runs"]["adam"], METRIC)
                return share_less(to(runs[key], METRIC, target), to(runs["adam"], METRIC, target))

            return margin

        return tuple(
            Finding(
                f"{title} reaches what Adam ends with in less time than Adam, in {what}",
                less(key, to),
                "less by a share of",
            )
            for key, title in OPTIMIZERS.items()
            if key != "adam"
            for to, what in ((steps_to, "steps"), (seconds_to, "CPU seconds"))
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for key, title in OPTIMIZERS.items():
            pairs = [
                (result["runs"][key], last(result["runs"]["adam"], METRIC)) for result in results
            ]
            rows.append(
                (
                    title,
                    middle([of["lr"] for of, _ in pairs], ".3g"),
                    middle([last(of, METRIC) for of, _ in pairs], ".3f"),
                    spread_text([steps_to(of, METRIC, t) for of, t in pairs], count_text),
                    spread_text([seconds_to(of, METRIC, t) for of, t in pairs], seconds_text),
                    middle([of["seconds"][-1] for of, _ in pairs], ".1f"),
                )
            )
        names = (
            *("learning rate", "Dice at the end", "steps to Adam's"),
            *("CPU seconds to Adam's", "CPU seconds in all"),
        )
        columns = (Column("optimizer"), *(Column(name, "right") for name in names))
        footer = "median over seeds, with the least and the most"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, (key, title) in enumerate(OPTIMIZERS.items()):
            for place, result in enumerate(results):
                of = result["runs"][key]
                label = title if place == 0 else None
                axes.plot(of["steps"], of[METRIC], "-", color=f"C{index}", label=label, lw=1)
        axes.set_xlabel("step")
        axes.set_ylabel("Dice score on test images")
        axes.legend(frameon=False)


def outlines() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Digits of 16 x 16 pixels and which of them are ink, for runs of seconds."""
    train, test = (_outlined(part.images[:16]) for part in data.digits())
    return train, test


def _outlined(images: Tensor) -> tuple[Tensor, Tensor]:
    larger = F.interpolate(images.float() / 16, scale_factor=2)
    return larger, (larger[:, 0] > 0.5).to(torch.int64)
