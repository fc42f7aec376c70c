"""Runs of seconds on digits, for items that compare settings by what they learn."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from natgrad.lab.train.logs import read
from natgrad.lab.train.loop import train
from natgrad.lab.train.settings import Settings

# A convnet with norm layers; every run of an item has these, and differs in what it compares.
TASK: dict[str, Any] = {
    "network": "convnet-norm",
    "width": 8,
    "lr": 0.03,
    "schedule": "polynomial",
    "evaluate_every": 10_000,
    "checkpoint_every": 10_000,
    "log_every": 10_000,
}


def trained(**settings: Any) -> dict[str, float]:
    """What a run ends with: test loss and accuracy, those of training data as ``fit_loss`` and
    ``fit_accuracy`` where ``fit_samples`` are asked for, and the seconds of its steps.

    Arguments:
        settings: fields of `Settings` beside those of `TASK`.
    """
    with TemporaryDirectory() as folder:
        outcome = train(Settings(**{**TASK, **settings}), folder)
        lines = read(Path(folder))
    seconds = [line["elapsed"] for line in lines if line["kind"] == "train"]
    fits = [line for line in lines if line["kind"] == "fit"]
    fit = {f"fit_{name}": line[name] for line in fits for name in ("loss", "accuracy")}
    return {**outcome.metrics, **fit, "seconds": max(seconds, default=0.0)}
