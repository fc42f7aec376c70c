"""What each training scheme of the large batches is worth: all of them, and each left out once
(Osawa 2019, sec. 4)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from natgrad.lab.reproduce.courses import Course, course, last
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.reproduce.small_images import FASHION
from natgrad.lab.schemes import large_batch
from natgrad.lab.train.presets import preset
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.training import Training
from natgrad.tables import Column, Table

ROW = 32_768  # of table 3
BATCH, SAMPLES, PARTS, EVERY = 128, 256, 3, 4
ALL, NONE = "all schemes", "none of them"

# What takes the place of a scheme. Without warm-up the damping has its target from the first step.
WITHOUT: dict[str, dict[str, Any]] = {
    "running mixup": {"mixup": 0.0},
    "random erasing": {"erasing": 0.0},
    "damping warm-up": {"damping_target": 0.0, "damping_steps": 0},
    "more damping of norm layers": {"norm_damping": 1.0},
    "polynomial decay": {"schedule": "constant"},
    "momentum coupling": {"coupled": False},
    "displacement momentum": {"displacement": False},
    "weight rescaling": {"rescaling": False},
    "HeNormal weights": {"he_normal": False},
}


class Schemes(Item):
    """Table 3's row for batches of 32,768 with nothing but the data, the network and the batch
    changed: as many epochs, and a warm-up of the damping that lasts for as many of them."""

    name = "schemes"
    title = "The training schemes, each left out once"
    papers = "Osawa 2019, sec. 4 and table 3"
    printed = (
        "no numbers: the schemes were explored “to achieve higher accuracy”; mixup regularises, "
        "damping warm-up keeps training stable, rescaling keeps weights from growing."
    )
    cluster = "natgrad train --preset imagenet-resnet50-bs32768 --no-rescaling (or without another)"
    remark = (
        "Here: 256 images of Fashion-MNIST at 14 × 14 pixels and 1,000 to judge by, a convnet with "
        "norm layers of 4 and 8 channels, 45 epochs (90 steps) of batches of 128 with the numbers "
        "of the paper's row for 32,768, none of them looked for anew; new factors and "
        "decompositions every 4 steps (the paper: every step). What is worth something to "
        "ResNet-50 on 1.3 million images in 1,760 steps need not be here, and three seeds say "
        "little about differences of one or two points. K-FAC itself warns in these runs that the "
        "row's damping is far too low for this network. A setting tried before, of 500 images and "
        "176 steps, was given up in its first seed, as it took too long."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        found: dict[str, Course] = {}
        for name, settings in ablated(_task(seed, smoke)).items():
            norms: list[float] = []

            def look(step: int, run: Training, norms: list[float] = norms) -> None:
                norms.append(_norm(run))

            tests = range(0, settings.steps + 1, max(1, settings.steps // PARTS))
            found[name] = {**course(settings, tests, look=look), "norms": norms}
            tell(f"{name}: {last(found[name], 'test_accuracy'):.2%}")
        return {"runs": found}

    def findings(self) -> tuple[Finding, ...]:
        def worth(name: str) -> Finding:
            def margin(result: Result) -> float:
                return _accuracy(result, ALL) - _accuracy(result, f"without {name}")

            return Finding(f"{name}: a higher accuracy with it", margin, "test accuracy more by")

        def together(result: Result) -> float:
            return _accuracy(result, ALL) - _accuracy(result, NONE)

        def regularises(result: Result) -> float:
            return _gap(result, "without running mixup") - _gap(result, ALL)

        def grows(result: Result) -> float:
            kept, free = (result["runs"][name]["norms"] for name in (ALL, _WITHOUT_RESCALING))
            return float(max(free) / max(kept) - 1)

        return (
            Finding("all schemes together: a higher accuracy", together, "test accuracy more by"),
            *(worth(name) for name in WITHOUT),
            Finding(
                "running mixup regularises: accuracy on training and test data lie nearer to each "
                "other",
                regularises,
                "nearer by",
            ),
            Finding(
                "rescaling keeps the scale of weights from becoming too large",
                grows,
                "largest norm without it over that with it, less 1:",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for name in results[0]["runs"]:
            of = [result["runs"][name] for result in results]
            rows.append(
                (
                    name,
                    middle([last(one, "test_accuracy") for one in of], ".2%"),
                    middle([last(one, "fit_accuracy") for one in of], ".2%"),
                    middle([last(one, "test_loss") for one in of], ".3g"),
                    middle([max(one["norms"], default=float("inf")) for one in of], ".1f"),
                )
            )
        names = ("test accuracy", "training accuracy", "test loss", "largest norm of weights")
        columns = (Column("schemes"), *(Column(name, "right") for name in names))
        footer = (
            "norm of the weights before norm layers; median over seeds, with the least and the most"
        )
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        names = list(results[0]["runs"])
        for index, name in enumerate(names):
            values = [last(result["runs"][name], "test_accuracy") for result in results]
            axes.plot(values, [index] * len(values), "o", color="C0" if index else "C1")
        axes.axvline(
            sorted(_accuracy(result, ALL) for result in results)[len(results) // 2],
            color="0.7",
            linestyle="--",
        )
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("test accuracy")


_WITHOUT_RESCALING = "without weight rescaling"


def ablated(task: Settings) -> dict[str, Settings]:
    """By name: with all schemes, with each left out, and with none.

    Arguments:
        task: has all of them.
    """
    found = {ALL: task}
    target: dict[str, Any] = {"damping": task.damping_target}
    for name, others in WITHOUT.items():
        own: dict[str, Any] = target if name == "damping warm-up" else {}
        found[f"without {name}"] = replace(task, **others, **own)
    every = {name: value for others in WITHOUT.values() for name, value in others.items()}
    return {**found, NONE: replace(task, **every, **target)}


def _task(seed: int, smoke: bool) -> Settings:
    row = large_batch(ROW)
    samples = 256 if smoke else SAMPLES
    steps_per_epoch = samples / BATCH
    return preset(
        f"imagenet-resnet50-bs{ROW}",
        data="digits" if smoke else FASHION,
        network="convnet-norm",
        width=4,
        mean_image=False,
        micro_batch=0,
        workers=0,
        batch_size=BATCH,
        update_every=f"every(steps={EVERY})",
        refresh_every=f"every(steps={EVERY})",
        epochs=0.0,
        steps=4 if smoke else round(row.epochs * steps_per_epoch),
        damping_steps=max(4, round(row.warm_steps / row.steps_per_epoch() * steps_per_epoch)),
        seed=seed,
        train_samples=samples,
        test_samples=0 if smoke else 1000,
        fit_samples=samples,
    )


@torch.no_grad()
def _norm(run: Training) -> float:
    """Of the convolutions' weights, all of which have a norm layer behind them."""
    weights = [p for p in run.network.parameters() if p.ndim == 4]
    return round(float(torch.stack([w.norm() for w in weights]).norm()), 4)


def _accuracy(result: Result, name: str) -> float:
    return last(result["runs"][name], "test_accuracy")


def _gap(result: Result, name: str) -> float:
    of = result["runs"][name]
    return last(of, "fit_accuracy") - last(of, "test_accuracy")
