"""Questions and runs that are made up: what comes of them is known."""

from natgrad.lab.compare import CONTENDERS, ComparisonSetup
from natgrad.lab.compare.results import ComparedCurve, ComparedRun, Status
from natgrad.lab.train import Settings

TINY = {"width": 2, "batch_size": 32, "log_every": 1, "checkpoint_every": 2}
TINY |= {"test_samples": 40, "fit_samples": 40}


def task(**others) -> Settings:
    """A run of some hundredths of a second."""
    return Settings(**{"steps": 4, "schedule": "polynomial", **TINY, **others})


def setup(*keys: str, **others) -> ComparisonSetup:
    settings = others.pop("task", None) or task()
    chosen = tuple(CONTENDERS[key] for key in keys or ("sgd", "kfac"))
    return ComparisonSetup(settings, chosen, **others)


def run(
    *losses: float, lr: float = 0.1, seed: int = 0, status=Status.DONE, **others
) -> ComparedRun:
    """With these training losses after 10, 20, … steps of half a second each."""
    count = range(1, len(losses) + 1)
    values = {"fit_loss": tuple(losses), "test_accuracy": tuple(0.5 for _ in count)}
    values |= others.pop("values", {})
    curve = ComparedCurve(tuple(10 * i for i in count), tuple(5.0 * i for i in count), values)
    steps, seconds = 10 * len(losses), 5.0 * len(losses)
    return ComparedRun(
        lr, seed, "folder", status, steps=steps, seconds=seconds, curve=curve, **others
    )


def diverged(**others) -> ComparedRun:
    return run(9.0, status=Status.DIVERGED, **others)
