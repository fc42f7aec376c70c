"""How often decompositions are refreshed, against accuracy and time (Pauloski 2022, table 5;
Yokota's slides on stale statistics)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from natgrad.lab.reproduce.courses import Course, course, last, settings_of, share_less
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.reproduce.small_images import FASHION
from natgrad.lab.train.settings import Settings
from natgrad.tables import Column, Table

INTERVALS = (1, 5, 10, 20, 40)
STALE = 10  # the interval that stands for stale statistics
DRIFTS = (0.1, 0.3)
STEPS, SGD_LONGER = 80, 90 / 55  # the epochs of SGD over those of K-FAC
POINT = 0.01 + 1e-9  # of accuracy: 10 of 1,000 test samples, also where they are rounded


class IntervalItem(Item):
    """K-FAC in front of SGD at fixed intervals and by measured drift, and SGD alone, all with one
    learning rate, as the paper has it. Factors are updated ten times as often as they are
    decomposed (Pauloski 2022, sec. 5.1); with `Drift` at every fifth step."""

    name = "intervals"
    title = "Interval between refreshes, against accuracy and time"
    papers = "Pauloski 2022, table 5; Yokota's slides (stale A and G)"
    printed = (
        "of ResNet-50 with intervals of 100, 500, 1,000: 76.2, 76.1, 75.5% in 152, 128, 124 "
        "minutes, and SGD 76.2% in 178; with stale statistics 21.5 instead of 38.6 minutes (75.7 "
        "instead of 76.1%), 9.4 instead of 19.8 (75.5, 76.0%), 5.5 instead of 10.5 (74.9, 76.0%)."
    )
    cluster = "natgrad train --preset imagenet-resnet50 --refresh-every 'every(steps=500)'"
    remark = (
        "Here: 6,000 images of 14 × 14 pixels and 1,000 to judge by, a convnet of 16 and 32 "
        "channels, 80 steps of 128, learning rate 0.03, which falls linearly to 0; SGD 90/55 times "
        "as many, as in the paper. CPU seconds are those of the steps, by one thread; runs of one "
        "setting differ by a tenth and more, as some intervals do. Less time is saved than in the "
        "paper because there is less to save: factors have at most 289 rows, against 4,608 of "
        "ResNet-50, so that decompositions at every step are not half of it. And K-FAC is not "
        "faster than SGD at short intervals because a step of so small a network is cheap; at the "
        "longest it is."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        steps = 8 if smoke else STEPS
        task = Settings(
            data="digits" if smoke else FASHION,
            network="convnet-norm",
            width=4 if smoke else 16,
            batch_size=128,
            steps=steps,
            seed=seed,
            schedule="polynomial",
            train_samples=0 if smoke else 6000,
            test_samples=0 if smoke else 1000,
        )
        found: dict[str, Course] = {}
        for name, settings in _settings(task).items():
            found[name] = course(settings, range(0, settings.steps + 1, max(1, steps // 10)))
            tell(f"{name}: {last(found[name], 'test_accuracy'):.2%}")
        return {"runs": found}

    def findings(self) -> tuple[Finding, ...]:
        def alike(result: Result) -> float:
            fresh = _accuracy(result, 1)
            return POINT - max(fresh - _accuracy(result, n) for n in INTERVALS[1:-1])

        def worse(result: Result) -> float:
            others = [_accuracy(result, n) for n in INTERVALS[:-1]]
            return min(others) - _accuracy(result, INTERVALS[-1])

        def cheaper(result: Result) -> float:
            seconds = [_seconds(result, _fixed(n)) for n in INTERVALS]
            return min(share_less(longer, shorter) for shorter, longer in pairwise(seconds))

        def half(result: Result) -> float:
            fresh, stale = (_seconds(result, _fixed(n)) for n in (1, STALE))
            return share_less(stale, fresh) - 0.4

        def faster(result: Result) -> float:
            sgd = _seconds(result, "SGD")
            return min(share_less(_seconds(result, _fixed(n)), sgd) for n in INTERVALS[1:])

        def rarer(result: Result) -> float:
            drift, fixed = (_decomposed(result, name) for name in (_drift(DRIFTS[0]), _fixed(5)))
            return share_less(drift, fixed)

        def as_good(result: Result) -> float:
            return POINT + _last(result, _drift(DRIFTS[0])) - _accuracy(result, 5)

        return (
            Finding(
                "a longer interval costs no accuracy (within a point of every step), but for the "
                "longest",
                alike,
                "room of",
            ),
            Finding("the longest interval is the least accurate", worse, "by"),
            Finding(
                "the longer the interval, the less time", cheaper, "CPU seconds less by at least"
            ),
            Finding(
                f"stale statistics (every {STALE} steps) save about half of the time (at least "
                "40%)",
                half,
                "room of",
            ),
            Finding(
                "K-FAC takes less time than SGD, which needs 90 epochs for its 55, at every longer "
                "interval",
                faster,
                "CPU seconds less by at least",
            ),
            Finding(
                f"(not of a paper) Drift({DRIFTS[0]}) decomposes less than every 5 steps",
                rarer,
                "fewer by a share of",
            ),
            Finding("and is as accurate (within a point)", as_good, "room of"),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for name in results[0]["runs"]:
            of = [result["runs"][name] for result in results]
            rows.append(
                (
                    name,
                    middle([last(one, "test_accuracy") for one in of], ".2%"),
                    middle([one["seconds"][-1] for one in of], ".1f"),
                    middle([float(one.get("decompositions", 0)) for one in of], ".0f"),
                )
            )
        names = ("test accuracy", "CPU seconds", "decompositions")
        columns = (Column("new decompositions"), *(Column(name, "right") for name in names))
        footer = "decompositions of single factors; median over seeds, with the least and the most"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, name in enumerate(results[0]["runs"]):
            of = [result["runs"][name] for result in results]
            seconds = [one["seconds"][-1] for one in of]
            axes.plot(
                seconds,
                [last(one, "test_accuracy") for one in of],
                "s" if name == "SGD" else "^" if name.startswith("Drift") else "o",
                color=f"C{index}",
                label=name,
            )
        axes.set_xscale("log")
        axes.set_xlabel("CPU seconds of all steps")
        axes.set_ylabel("test accuracy")
        axes.legend(frameon=False, fontsize=7)


def _settings(task: Settings) -> dict[str, Settings]:
    found = {}
    for interval in INTERVALS:
        found[_fixed(interval)] = _kfac(task, max(1, interval // 10), f"every(steps={interval})")
    for tolerance in DRIFTS:
        found[_drift(tolerance)] = _kfac(task, 5, f"drift(tolerance={tolerance})")
    sgd = settings_of("sgd", task)
    found["SGD"] = replace(sgd, lr=0.03, steps=round(SGD_LONGER * task.steps))
    return found


def _kfac(task: Settings, update: int, refresh: str) -> Settings:
    every = f"every(steps={update})"
    return settings_of("kfac", task, lr=0.03, update_every=every, refresh_every=refresh)


def _fixed(interval: int) -> str:
    return "at every step" if interval == 1 else f"every {interval} steps"


def _drift(tolerance: float) -> str:
    return f"Drift({tolerance})"


def _last(result: Result, name: str) -> float:
    return last(result["runs"][name], "test_accuracy")


def _accuracy(result: Result, interval: int) -> float:
    return _last(result, _fixed(interval))


def _seconds(result: Result, name: str) -> float:
    return float(result["runs"][name]["seconds"][-1])


def _decomposed(result: Result, name: str) -> float:
    return float(result["runs"][name]["decompositions"])
