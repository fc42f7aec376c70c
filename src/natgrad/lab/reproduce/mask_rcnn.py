"""K-FAC on the box and mask heads of Mask R-CNN (Pauloski 2022, table 6)."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from natgrad.lab import data
from natgrad.lab.models import MASK_RCNN_HEADS
from natgrad.lab.models.vision import torchvision
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.train.loop import train
from natgrad.lab.train.settings import Settings
from natgrad.tables import Column, Table

SGD, KFAC = "SGD", "K-FAC on the heads"
SHARES = (0.82, 1.0)  # of the steps: 21,000 of 25,640 in the paper, on 32 GPUs
RATES = (0.02, 0.08)  # for each of the two
STEPS, IMAGES, TESTS, SIDE = 60, 120, 20, 64
PRECISIONS = ("box_ap", "mask_ap")


class MaskRcnnHeads(Item):
    """A small Mask R-CNN on drawn circles, squares and triangles."""

    name = "mask-rcnn"
    title = "K-FAC on the heads of Mask R-CNN"
    papers = "Pauloski 2022, sec. 6.3.2, 6.4.2 and table 6"
    printed = (
        "iterations to a box AP of 0.377 and a mask AP of 0.342 on 32, 64 and 128 GPUs: K-FAC "
        "21,000, 12,000, 6,800; SGD 25,640, 15,000, 7,320."
    )
    cluster = "natgrad train --preset mask-rcnn"
    needs = "torchvision"
    remark = (
        "**K-FAC is behind SGD here, in test loss too.** And these runs are too short to decide "
        "anything about precision: after seconds of training nearly no object is found. The best "
        "rate is mostly the higher of two. `python examples/mask_rcnn.py` is a longer run on the "
        "same drawings. "
        "Here: the same heads and losses on a backbone of four convolutions of 8 channels, 120 "
        "drawn images of 64 pixels and 20 to test on, 4 in a step; 60 steps, or 82% of them, each "
        "a run whose rate falls to 0 at its end. Each of the two has the learning rates 0.02 and "
        "0.08 in the long run, of which the one with the lower test loss is shown, and keeps it in "
        "the short one; damping 0.3, and intervals of 5 and 50 instead of 50 and 500, as there are "
        "fewer steps. COCO and ResNet-50, as in the paper, were not run. CPU seconds are those of "
        "a whole run, with reading and testing."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        torchvision()  # or a sentence, before anything takes long
        images, tests, steps = (4, 2, 2) if smoke else (IMAGES, TESTS, STEPS)
        found: dict[str, dict[str, dict[str, float]]] = {}
        with TemporaryDirectory() as home:
            folder = data.draw_shapes(
                Path(home) / "shapes", train=images, test=tests, side=SIDE, seed=seed
            )
            for name in (SGD, KFAC):
                runs = {}
                for rate in RATES[:1] if smoke else RATES:
                    tell(f"{name}, learning rate {rate}")
                    runs[rate] = _run(folder, seed, steps, rate, name)
                best = min(runs, key=lambda rate: runs[rate]["loss"])
                tell(f"{name}, {SHARES[0]:.0%} of the steps")
                short = _run(folder, seed, round(SHARES[0] * steps), best, name)
                found[name] = {"short": short, "long": runs[best]}
        return {"runs": found}

    def findings(self) -> tuple[Finding, ...]:
        def over(metric: str, name: str, sign: int) -> Any:
            def margin(result: Result) -> float:
                runs = result["runs"]
                target = float(runs[SGD]["long"][metric])
                return sign * (float(runs[name]["short"][metric]) - target)

            return margin

        def lower(name: str, sign: int) -> Any:
            def margin(result: Result) -> float:
                runs = result["runs"]
                return sign * float(runs[SGD]["long"]["loss"] - runs[name]["short"]["loss"])

            return margin

        return (
            Finding(
                "with K-FAC on the heads 82% of the steps reach the test loss of all of SGD's",
                lower(KFAC, 1),
                "below it by",
            ),
            Finding("SGD itself does not", lower(SGD, -1), "above it by"),
            Finding(
                "with K-FAC on the heads 82% of the steps pass the box AP of all of SGD's",
                over("box_ap", KFAC, 1),
                "above it by",
            ),
            Finding("and the mask AP", over("mask_ap", KFAC, 1), "above it by"),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for name in (SGD, KFAC):
            for length in ("short", "long"):
                runs = [result["runs"][name][length] for result in results]
                forms = {"box_ap": ".3f", "mask_ap": ".3f", "loss": ".3f", "lr": "g", "cpu": ".0f"}
                cells = (middle([run[of] for run in runs], form) for of, form in forms.items())
                rows.append((f"{name}, {runs[0]['steps']} steps", *cells))
        names = ("box AP", "mask AP", "test loss", "learning rate", "CPU seconds")
        columns = (Column("training"), *(Column(name, "right") for name in names))
        footer = "of the better of two learning rates; median over seeds, with least and most"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, name in enumerate((SGD, KFAC)):
            for metric, mark in zip(PRECISIONS, "os", strict=True):
                points = [
                    (run["steps"], run[metric])
                    for result in results
                    for run in result["runs"][name].values()
                ]
                x, y = zip(*points, strict=True)
                label = f"{name}, {metric.replace('_ap', ' AP')}"
                axes.plot(x, y, mark, color=f"C{index}", label=label, alpha=0.7)
        axes.set_xlabel("steps, each a run of its own")
        axes.set_ylabel("average precision")
        axes.legend(frameon=False, fontsize=7)


def _run(folder: Path, seed: int, steps: int, rate: float, name: str) -> dict[str, float]:
    settings = Settings(
        data="coco",
        folder=str(folder),
        augment=True,
        network="mask-rcnn-small",
        image=SIDE,
        width=8,
        loss="instances",
        metric="box_ap",
        batch_size=4,
        steps=steps,
        seed=seed,
        lr=rate,
        weight_decay=1e-4,
        schedule="polynomial",
        warmup_share=0.1,
        kfac=name == KFAC,
        damping=0.3,
        update_every=5,
        refresh_every=50,
        include=tuple(MASK_RCNN_HEADS),
        evaluate_every=10_000,
        checkpoint_every=10_000,
        log_every=10_000,
    )
    begin = process_time()
    with TemporaryDirectory() as out:
        outcome = train(settings, out)
    found = {name: float(outcome.metrics[name]) for name in (*PRECISIONS, "loss")}
    return {**found, "steps": steps, "lr": rate, "cpu": round(process_time() - begin, 1)}
