"""Accuracy on several processes, with the rate and the batch times their number (Pauloski 2022,
table 2)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.reproduce.rank_runs import on_processes
from natgrad.lab.reproduce.small_images import FASHION
from natgrad.lab.train.settings import Settings
from natgrad.tables import Column, Table

OPTIMIZERS = {"sgd": "SGD", "kfac": "K-FAC"}
COUNTS = (1, 2, 4)
BATCH, RATE, EPOCHS = 32, 0.02, 5  # of one process; epochs of K-FAC
POINT = 0.01 + 1e-9  # of accuracy: 10 of 1,000 test samples, also where they are rounded


class Processes(Item):
    """Processes of this machine, which torchrun starts and gloo connects."""

    name = "processes"
    title = "K-FAC and SGD on 1, 2 and 4 processes"
    papers = "Pauloski 2022, table 2 and sec. 6.3.1"
    printed = (
        "validation accuracy of ResNet-32 on CIFAR-10 on 1, 2, 4, 8 GPUs: SGD 92.76, 92.77, 92.58, "
        "92.69 after 200 epochs, K-FAC 92.93, 92.76, 92.90, 92.92 after 100."
    )
    cluster = (
        "torchrun --nproc-per-node 8 -m natgrad train --preset cifar10-resnet32-8-processes --out "
        "run (and -2-, -4-)"
    )
    remark = (
        "Here: 1,500 images of Fashion-MNIST at 14 × 14 pixels and 1,000 to judge by, a convnet "
        "with norm layers of 8 and 16 channels. The paper's scaling: on N processes batches of 32 "
        "N and a learning rate of 0.02 N for both, which rises over the first 5% of K-FAC's "
        "epochs; it falls to a tenth at 35, 75 and 90% of K-FAC's 5 epochs, and at 50 and 75% of "
        "SGD's 10; decompositions every 10 steps. Nothing is looked for, for either. A point "
        "is 10 test samples: where a finding is missed, it is on one seed, by 4 and by 12 samples. "
        "As epochs are so few (the paper: 100 and 200), both lose at 4 processes, SGD more."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        found: dict[str, dict[str, Any]] = {}
        for count in COUNTS[1:2] if smoke else COUNTS:
            runs = {key: scaled(key, count, seed, smoke) for key in OPTIMIZERS}
            found[str(count)] = on_processes(count, runs)
            said = ", ".join(
                f"{title} {_last(found[str(count)], key):.2%}" for key, title in OPTIMIZERS.items()
            )
            tell(f"{count} processes: {said}")
        return {"runs": found}

    def findings(self) -> tuple[Finding, ...]:
        def meets(result: Result) -> float:
            gaps = [_last(of, "kfac") - _last(of, "sgd") for of in result["runs"].values()]
            return min(gaps) + POINT

        def keeps(result: Result) -> float:
            ends = [_last(of, "kfac") for of in result["runs"].values()]
            return min(ends) - ends[0] + POINT

        def fewer(result: Result) -> float:
            steps = [[of[key]["steps"][-1] for key in OPTIMIZERS] for of in result["runs"].values()]
            return min(1 - float(ours / other) for other, ours in steps)

        return (
            Finding(
                "in half of the iterations K-FAC meets or exceeds SGD's accuracy at every number "
                "of processes (no more than a point below)",
                lambda result: min(meets(result), fewer(result)),
                "room of",
            ),
            Finding(
                "its accuracy stays at more processes (no more than a point below that of one)",
                keeps,
                "room of",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for count in results[0]["runs"]:
            cells = [count, f"{BATCH * int(count)}", f"{RATE * int(count):g}"]
            for key in OPTIMIZERS:
                ends = [_last(result["runs"][count], key) for result in results]
                steps = results[0]["runs"][count][key]["steps"][-1]
                cells.append(f"{middle(ends, '.2%')} in {steps:,}")
            rows.append(tuple(cells))
        columns = (
            *(Column(name) for name in ("processes", "batch", "learning rate")),
            *(Column(f"{title}, steps", "right") for title in OPTIMIZERS.values()),
        )
        footer = "test accuracy: median over seeds, with the least and the most; and steps"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, (key, title) in enumerate(OPTIMIZERS.items()):
            for count, style in zip(results[0]["runs"], ("-", "--", ":"), strict=False):
                for place, result in enumerate(results):
                    of = result["runs"][count][key]
                    whole = of["steps"][-1]
                    x = [step / whole * _epochs(key) for step in of["steps"]]
                    label = f"{title}, {count}" if place == 0 else None
                    axes.plot(x, of["accuracy"], style, color=f"C{index}", label=label, lw=1)
        axes.set_xlabel("epoch")
        axes.set_ylabel("test accuracy")
        axes.legend(frameon=False, fontsize=8, ncols=2)


def scaled(key: str, count: int, seed: int, smoke: bool = False) -> Settings:
    """The paper's settings for so many processes, made smaller.

    Arguments:
        key: "sgd" or "kfac".
        count: of processes.
        seed: of the run.
        smoke: whether a few steps must do.
    """
    epochs = _epochs(key)
    at = (0.35, 0.75, 0.9) if key == "kfac" else (0.5, 0.75)
    whole = Settings(
        data="digits" if smoke else FASHION,
        network="convnet-norm",
        width=4 if smoke else 8,
        batch_size=BATCH * count,
        epochs=epochs,
        seed=seed,
        train_samples=256 if smoke else 1500,
        test_samples=64 if smoke else 1000,
        lr=RATE * count,
        schedule="steps",
        warmup=0.05 * EPOCHS,
        decay_at=tuple(share * epochs for share in at),
        kfac=key == "kfac",
        update_every="every(steps=1)",
        refresh_every="every(steps=10)",
        checkpoint_every=1_000_000,
        log_every=1_000_000,
    )
    return replace(whole, epochs=0.0, steps=2 if key == "kfac" else 4) if smoke else whole


def _epochs(key: str) -> float:
    return float(EPOCHS if key == "kfac" else 2 * EPOCHS)


def _last(of: dict[str, Any], key: str) -> float:
    return float(of[key]["accuracy"][-1])
