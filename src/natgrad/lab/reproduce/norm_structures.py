"""BatchNorm's Fisher kept full, in blocks of a unit, or as a diagonal (Osawa 2019, sec. 5.4)."""

from collections.abc import Sequence
from typing import Any

from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.reproduce.short_runs import trained
from natgrad.tables import Column, Table

KINDS = {"block": "full", "unitwise": "unit-wise", "diagonal": "diagonal"}
ALIKE = 0.02  # of test accuracy: what seeds of one setting differ by on these data


class NormStructures(Item):
    """Accuracy and seconds with each, fresh and with stale factors, on digits."""

    name = "norm-structures"
    title = "BatchNorm's Fisher: full, unit-wise, diagonal"
    papers = "Osawa 2019, sec. 5.4 and Fig. 5"
    printed = (
        "training curves of ResNet-50 with full and diagonal Fisher, with and without stale "
        "factors, which lie on each other; BN is 42.3% of the memory."
    )
    cluster = "natgrad train --preset imagenet-resnet50-diagonal-norms"

    remark = (
        "Here: digits, 150 steps of 256; 360 test samples. Seconds are those of runs one after the "
        "other, on a machine that was not idle. [Sizes](#measured-again) has the memory."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        steps = 8 if smoke else 150
        found: dict[str, dict[str, float]] = {}
        for stale, every in (("fresh", 1), ("stale", 20)):
            for kind in KINDS:
                tell(f"norm layers {KINDS[kind]}, {stale}, {steps} steps")
                every_steps = f"every(steps={every})"
                found[f"{KINDS[kind]}, {stale}"] = trained(
                    steps=steps,
                    seed=seed,
                    norm_structure=kind,
                    update_every=every_steps,
                    refresh_every=every_steps,
                )
        return {"runs": found}

    def findings(self) -> tuple[Finding, ...]:
        def alike(stale: str) -> Finding:
            def margin(result: Result) -> float:
                runs = result["runs"]
                full, diagonal = (runs[f"{kind}, {stale}"] for kind in ("full", "diagonal"))
                return ALIKE - abs(float(full["accuracy"] - diagonal["accuracy"]))

            return Finding(
                f"with {stale} factors a diagonal trains as well as the full Fisher (test accuracy "
                f"within {ALIKE:.0%})",
                margin,
                "room of",
            )

        return alike("fresh"), alike("stale")

    def table(self, results: Sequence[Result]) -> Table:
        rows = [
            (
                name,
                middle([r["runs"][name]["accuracy"] for r in results], ".2%"),
                middle([r["runs"][name]["loss"] for r in results], ".3f"),
                middle([r["runs"][name]["seconds"] for r in results], ".2f"),
            )
            for name in results[0]["runs"]
        ]
        names = ("test accuracy", "test loss", "seconds")
        columns = (Column("norm layers, factors"), *(Column(name, "right") for name in names))
        footer = "median over seeds, with the least and the most; stale: new factors every 20 steps"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        names = list(results[0]["runs"])
        for index, name in enumerate(names):
            values = [r["runs"][name]["accuracy"] for r in results]
            axes.plot([index] * len(values), values, "o", color="C0")
        axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=7)
        axes.set_ylabel("test accuracy")
