"""Training curves of K-FAC and SGD (KAISA's slides, Fig. 1; Schmidt's slides)."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

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
from natgrad.lab.reproduce.small_images import FASHION
from natgrad.lab.train.settings import Settings
from natgrad.tables import Column, Table

OPTIMIZERS = {"sgd": "SGD", "kfac": "K-FAC"}
TRIALS, STEPS = 5, 200


class Curves(Item):
    """A convnet with norm layers on a share of Fashion-MNIST; learning rates fall linearly to 0."""

    name = "curves"
    title = "K-FAC against SGD: training curves"
    papers = "KAISA's slides (Pauloski 2021), Fig. 1; Schmidt's slides"
    printed = (
        "curves of ResNet-32 on CIFAR-10 (“K-FAC reduces iterations needed for convergence”), and "
        "of a convnet on CIFAR-10, for training and validation data."
    )
    cluster = "natgrad compare --preset cifar10-resnet32 --optimizers sgd,kfac --out compared"
    remark = (
        "Here: 6,000 images of 14 × 14 pixels and 1,000 to judge by, 200 steps of 128, momentum "
        "0.9. Five learning rates for each; the one with the lowest training loss at the end "
        "counts. On test data both end alike, K-FAC not higher: it fits the training images sooner "
        "and closer, which is worth nothing on others. In the seed in which it is behind there on "
        "average a low rate won, whose first steps are the slower ones. CPU seconds are those of "
        "the steps, by one thread, reading and testing left out; no source speaks of time."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        steps, trials = (8, 1) if smoke else (STEPS, TRIALS)
        task = Settings(
            data="digits" if smoke else FASHION,
            network="convnet-norm",
            width=8,
            batch_size=128,
            steps=steps,
            seed=seed,
            schedule="polynomial",
            train_samples=0 if smoke else 6000,
            test_samples=0 if smoke else 1000,
            fit_samples=128 if smoke else 1000,
        )
        tests = set(range(0, steps + 1, max(1, steps // 20)))
        found: dict[str, Course] = {}
        for key, title in OPTIMIZERS.items():
            usual = settings_of(key, task)

            def run(lr: float, usual: Settings = usual) -> Course:
                return course(replace(usual, lr=lr), tests)

            found[key] = best_course(run, usual.lr, trials, lambda c: (last(c, "fit_loss"),))
            tell(f"{title}: training loss {last(found[key], 'fit_loss'):.3f}")
        return {"runs": found}

    def findings(self) -> tuple[Finding, ...]:
        def fewer(result: Result) -> float:
            steps = _steps_to_sgds_end(result)
            return share_less(steps["kfac"], steps["sgd"])

        def above(name: str) -> Any:
            def margin(result: Result) -> float:
                ours, other = (result["runs"][key][name] for key in ("kfac", "sgd"))
                return float(mean(ours) - mean(other))

            return margin

        return (
            Finding(
                "K-FAC reduces the iterations needed for convergence (to SGD's last training loss)",
                fewer,
                "fewer by a share of",
            ),
            Finding(
                "its curve lies above SGD's on training data",
                above("fit_accuracy"),
                "accuracy, on average over the steps, more by",
            ),
            Finding(
                "and on validation data",
                above("test_accuracy"),
                "accuracy, on average over the steps, more by",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for key, title in OPTIMIZERS.items():
            of = [result["runs"][key] for result in results]
            to_end = [_steps_to_sgds_end(result)[key] for result in results]
            spent = [
                seconds_to(o, "fit_loss", _target(r)) for o, r in zip(of, results, strict=True)
            ]
            rows.append(
                (
                    title,
                    middle([one["lr"] for one in of], ".3g"),
                    middle([last(one, "fit_loss") for one in of], ".3f"),
                    middle([last(one, "test_accuracy") for one in of], ".1%"),
                    spread_text(to_end, count_text),
                    spread_text(spent, seconds_text),
                    middle([one["seconds"][-1] for one in of], ".1f"),
                )
            )
        names = (
            *("learning rate", "training loss", "test accuracy"),
            *("steps to SGD's last training loss", "CPU seconds to it", "CPU seconds in all"),
        )
        columns = (Column("optimizer"), *(Column(name, "right") for name in names))
        footer = "median over seeds, with the least and the most"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, (key, title) in enumerate(OPTIMIZERS.items()):
            for place, result in enumerate(results):
                of = result["runs"][key]
                for on, style, name in (("fit", "-", "training"), ("test", "--", "validation")):
                    label = f"{title}, {name}" if place == 0 else None
                    values = of[f"{on}_accuracy"]
                    axes.plot(of["steps"], values, style, color=f"C{index}", label=label, lw=1)
        axes.set_xlabel("step")
        axes.set_ylabel("accuracy")
        axes.set_ylim(bottom=0.6 if len(results) > 1 else None)
        axes.legend(frameon=False, ncols=2)


def _steps_to_sgds_end(result: Result) -> dict[str, float]:
    target = _target(result)
    return {key: steps_to(of, "fit_loss", target) for key, of in result["runs"].items()}


def _target(result: Result) -> float:
    return last(result["runs"]["sgd"], "fit_loss")
