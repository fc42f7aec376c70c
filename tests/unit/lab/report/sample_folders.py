"""Folders of runs and of comparisons as natgrad writes them, from formulas instead of training."""

import json
import math
from dataclasses import replace
from pathlib import Path

from natgrad.lab.compare import Comparison
from natgrad.lab.compare.results import ComparedCurve, ComparedRun, ContenderResult, Status
from natgrad.lab.compare.setup import Measure
from natgrad.lab.train import Settings
from natgrad.lab.train.kfac_record import NAME as KFAC
from natgrad.lab.train.logs import NAME as LOG
from natgrad.lab.train.loop import SETTINGS
from natgrad.lab.train.toml import written

STAGES = ("A", "G", "fold", "refresh", "apply")
TASK = Settings(steps=40, batch_size=64, fit_samples=100, evaluate_every=4, lr=0.05)


def loss(step, speed=1.0):
    return 2.3 * math.exp(-0.08 * speed * step) + 0.01


def log(steps=40, *, kfac=True, every=4, pace=0.01, speed=1.0, start=0, before=0.0):
    """Lines of a process that begins at the step ``start`` after ``before`` seconds; a step takes
    ``pace`` seconds, of which every stage of K-FAC takes a twentieth."""
    lines = []

    def tell(kind, step, **values):
        elapsed = before + pace * (step - start)
        lines.append({"kind": kind, "step": step, "elapsed": elapsed, **values})

    for step in range(start + 1, steps + 1):
        shared = {"share": 0.25} if kfac else {}
        rate = 0.05 * (1 - step / steps)
        tell("train", step, loss=1.1 * loss(step, speed), lr=rate, seconds=pace, **shared)
        if kfac:
            change = 1.0 / step
            spread = [change * factor for factor in (0.2, 0.5, 1.0, 2.0, 4.0)]
            tell("drift", step, A=spread, G=[2 * value for value in spread])
        if step % every == 0:
            tell("test", step, loss=1.2 * loss(step, speed), accuracy=1 - loss(step, speed) / 4)
            tell("fit", step, loss=loss(step, speed), accuracy=1 - loss(step, speed) / 5)
            if kfac:
                spent = dict.fromkeys(STAGES, pace / 20 * (step - start))
                tell("stages", step, seconds=spent, calls=dict.fromkeys(STAGES, step - start))
    return lines


def placement(ranks, count, workers):
    """Blocks in turn, each on ``workers`` ranks in a row, of which one decomposes a factor."""
    blocks = []
    for i in range(count):
        first = i * workers % ranks
        group = [(first + k) % ranks for k in range(workers)]
        factors = [
            {
                "name": name,
                "size": 10 + 7 * i,
                "decomposers": [group[(i + k) % workers]],
                "keepers": [group[(i + k) % workers]],
            }
            for k, name in enumerate("AG")
        ]
        blocks.append({"name": f"layer{i}.conv", "workers": sorted(group), "factors": factors})
    return {"strategy": f"Hybrid({workers / ranks:g})", "ranks": ranks, "blocks": blocks}


def table(title, names, rows, footer=""):
    columns = [{"name": name, "align": "left" if i == 0 else "right"} for i, name in names]
    return {"title": title, "columns": columns, "rows": rows, "footer": footer}


def record(ranks=1, blocks=3, workers=1):
    numbered = list(enumerate(["block", "all"]))
    spectra = [
        {
            "block": f"layer{i}.conv",
            "factor": name,
            "size": 20,
            "values": [(i + 1) * 10.0 ** (-k / 4) for k in range(20)],
        }
        for i in range(blocks)
        for name in "AG"
    ]
    return {
        "format": 1,
        "step": 40,
        "coverage": table(
            "Coverage",
            list(enumerate(["parameter", "state"])),
            [["layer0.conv.weight", "preconditioned"], ["<b>", "left to the optimizer: odd"]],
            "900 of 1,000 trained parameters preconditioned (90.0%)",
        ),
        "memory": table("Memory", numbered, [["layer0.conv", "1.50 KiB"]], "1.50 KiB in all"),
        "timings": table("Timings", numbered, [["apply", "1.00 s"]]),
        "drift": table("Drift", numbered, [["layer0.conv", "0.1"]]),
        "traffic": table("Traffic", numbered, []),
        "spectra": spectra,
        "placement": placement(ranks, blocks, workers),
    }


def run(folder, lines=None, *, kfac=True, found=None, **settings):
    """A run's folder; ``found`` is what K-FAC had to tell."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    told = replace(TASK, kfac=kfac, **settings)
    (folder / SETTINGS).write_text(written(told), encoding="utf-8")
    lines = log(kfac=kfac) if lines is None else lines
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / LOG).write_text(text, encoding="utf-8")
    if kfac:
        (folder / KFAC).write_text(json.dumps(found or record()), encoding="utf-8")
    return folder


def trained(key, lr, seed, name, *, speed, pace=0.01, steps=40, status=Status.DONE, said=""):
    """One of a comparison's runs, by the formulas above."""
    at = tuple(range(4, steps + 1, 4))
    values = {
        "fit_loss": tuple(loss(step, speed) * (1 + 0.02 * seed) for step in at),
        "test_loss": tuple(1.2 * loss(step, speed) * (1 + 0.02 * seed) for step in at),
        "test_accuracy": tuple(1 - loss(step, speed) / 4 for step in at),
    }
    curve = ComparedCurve(at, tuple(pace * step for step in at), values)
    made = ComparedRun(
        lr, seed, f"runs/{key}/{name}", status, said, steps, pace * steps, curve=curve
    )
    return made.judged(Measure("loss", "fit"), 0.12)


def entry(key, name, settings, speed, pace, rates=(0.01, 0.1, 1.0)):
    """The middle rate is the best, and the largest diverges."""
    trials = []
    for lr in rates:
        status = Status.DIVERGED if lr == rates[-1] else Status.DONE
        slow = speed if lr == rates[1] else speed / 2
        trials.append(trained(key, lr, 0, f"lr-{lr:g}", speed=slow, pace=pace, status=status))
    seeds = (
        trained(key, rates[1], s, f"seed-{s}", speed=speed - 0.1 * s, pace=pace) for s in (1, 2, 3)
    )
    about = f"{name} as it comes"
    return ContenderResult(key, name, about, settings, rates[1], 0, "", tuple(trials), tuple(seeds))


def slim(one):
    """With the compared metric alone, and no trials: fewer pictures."""
    runs = []
    for made in one.runs:
        curve = replace(made.curve, values={"fit_loss": made.curve.values["fit_loss"]})
        runs.append(replace(made, curve=curve))
    return replace(one, trials=(), runs=tuple(runs))


MISSING = "Shampoo comes with pytorch_optimizer, which is not installed: install it."


def entries():
    adamw = entry("adamw", "AdamW <3", {"optimizer": "adamw"}, 0.9, 0.011, (1e-4, 1e-3, 1e-2))
    lost = trained(
        "adamw", 1e-3, 4, "seed-4", speed=0.9, steps=12, status=Status.FAILED, said="No."
    )
    return (
        entry("sgd", "SGD", {}, 1.0, 0.01),
        replace(adamw, runs=(*adamw.runs, lost)),
        entry("kfac", "K-FAC, SGD", {"kfac": True}, 2.0, 0.02),
        ContenderResult(
            "shampoo", "Shampoo", "not here", {"optimizer": "shampoo"}, missing=MISSING
        ),
    )


def comparison(folder, some=None, *, name="digits-cnn", target=0.12):
    """A comparison's folder, and what is in its file; K-FAC's runs have logs."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = Comparison(
        name,
        replace(TASK, kfac=False),
        Measure("loss", "fit"),
        target,
        "what SGD ends with",
        0,
        (1, 2, 3),
        3,
        {"command": "natgrad compare", "torch": "2"},
        entries() if some is None else tuple(some),
    )
    found.write(folder)
    for one in found.entries:
        if one.preconditioned:
            for made in one.runs:
                run(folder / made.folder, log(pace=0.02, speed=2.0))
    return folder, found
