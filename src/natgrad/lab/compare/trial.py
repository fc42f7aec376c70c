"""One training, whatever comes of it."""

import gc
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from natgrad.comm import Communicator
from natgrad.errors import CheckpointError, NatgradError
from natgrad.lab.compare.results import ComparedCurve, ComparedRun, Status
from natgrad.lab.train import logs
from natgrad.lab.train.interruption import Interruption
from natgrad.lab.train.loop import train
from natgrad.lab.train.progress_line import Progress
from natgrad.lab.train.settings import Settings

NOT_METRICS = ("kind", "step", "elapsed")


def run_trial(
    settings: Settings,
    base: Path,
    folder: str,
    comm: Communicator,
    progress: Progress,
    interruption: Interruption,
) -> tuple[ComparedRun, int]:
    """A run in ``base / folder``, and the number of the signal that ended it, or 0. It goes on
    where it was interrupted. Collective; the same on all ranks."""
    signal, said = 0, ""
    try:
        outcome = train(settings, base / folder, progress, resume=True, interruption=interruption)
    except CheckpointError:  # no fault of the optimizer's: others would run into it as well
        raise
    except Exception as error:
        # What not all ranks are known to raise leaves the others waiting somewhere.
        if comm.size > 1 and not getattr(error, "everywhere", False):
            raise
        status, said = Status.FAILED, sentence(error)
    else:
        signal = outcome.signal
        status = Status.DIVERGED if outcome.diverged else Status.DONE
        if signal and outcome.step < outcome.steps:
            status = Status.RUNNING
    gc.collect()  # hooks and modules know each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = None
    if comm.rank == 0:
        found = recorded(logs.read(base / folder), settings, folder, status, said)
    shared = comm.gather(found)[0]
    assert shared is not None
    return shared, signal


def recorded(
    lines: list[dict[str, Any]], settings: Settings, folder: str, status: Status, said: str
) -> ComparedRun:
    """A run by its log."""
    timed = [line for line in lines if "elapsed" in line]
    return ComparedRun(
        settings.lr,
        settings.seed,
        folder,
        status,
        said,
        steps=max((line["step"] for line in timed), default=0),
        seconds=max((line["elapsed"] for line in timed), default=0.0),
        curve=curve(lines),
        kfac_share=logs.kfac_share(lines),
    )


def curve(lines: list[dict[str, Any]]) -> ComparedCurve:
    """All tests that are complete, and in which all numbers are finite."""
    moments: dict[int, dict[str, float]] = {}
    for line in lines:
        if line["kind"] in ("test", "fit"):
            values = {f"{line['kind']}_{k}": v for k, v in line.items() if k not in NOT_METRICS}
            moments.setdefault(line["step"], {"elapsed": line["elapsed"]}).update(values)
    names = {name for values in moments.values() for name in values}
    kept = {
        step: values
        for step, values in sorted(moments.items())
        if values.keys() == names and all(map(math.isfinite, values.values()))
    }
    columns = {name: tuple(values[name] for values in kept.values()) for name in sorted(names)}
    return ComparedCurve(tuple(kept), columns.pop("elapsed", ()), columns)


def sentence(error: BaseException) -> str:
    """Of errors of others, the first line with their name."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    if isinstance(error, NatgradError):
        return first
    name = type(error).__name__.lstrip("_")
    return f"{name}: {first}" if first else name


def remove_checkpoints(folder: Path) -> None:
    """Of a run that has ended, checkpoints are not needed."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
