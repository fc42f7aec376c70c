"""What has come out so far, as a file: ``results.json``, written anew after every run."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from natgrad.errors import CheckpointError, SettingError
from natgrad.lab.compare.setup import Measure
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.state import write_text

NAME = "results.json"
FORMAT = 1


class Status(StrEnum):
    DONE = "done"
    DIVERGED = "diverged"
    FAILED = "failed"
    RUNNING = "running"


@dataclass(frozen=True)
class ComparedCurve:
    """``values`` by the name of what was measured, such as "test_accuracy", each after ``steps``
    steps and ``seconds`` of training."""

    steps: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reached:
    """When a target was met."""

    step: int
    seconds: float


@dataclass(frozen=True)
class ComparedRun:
    """One training; ``folder`` is relative to that of the comparison. ``final`` is None if it did
    not get to its end, ``reached`` if it did not meet the target."""

    lr: float
    seed: int
    folder: str
    status: Status = Status.RUNNING
    said: str = ""
    steps: int = 0
    seconds: float = 0.0
    final: float | None = None
    reached: Reached | None = None
    curve: ComparedCurve = field(default_factory=ComparedCurve)
    kfac_share: float | None = None

    def judged(self, measure: Measure, target: float | None) -> "ComparedRun":
        """With what follows from its curve."""
        values = self.curve.values.get(measure.key, ())
        final = values[-1] if values and self.status is Status.DONE else None
        met = (i for i, v in enumerate(values) if target is not None and measure.met(v, target))
        first = next(met, None)
        reached = None
        if first is not None and self.status is not Status.FAILED:
            reached = Reached(self.curve.steps[first], self.curve.seconds[first])
        return replace(self, final=final, reached=reached)


@dataclass(frozen=True)
class ContenderResult:
    """A contender: its ``trials``, the learning rate that was ``chosen`` from them, which is on the
    ``edge`` if it is the highest (1) or the lowest (-1) that was tried, and its ``runs``. What is
    ``missing`` to run it is a sentence."""

    key: str
    name: str
    about: str
    settings: Mapping[str, Any]
    chosen: float | None = None
    edge: int = 0
    missing: str = ""
    trials: tuple[ComparedRun, ...] = ()
    runs: tuple[ComparedRun, ...] = ()

    @property
    def preconditioned(self) -> bool:
        return bool(self.settings.get("kfac"))

    @property
    def is_natgrads(self) -> bool:
        """Whether it is of this library, and not one that it is compared with."""
        return self.preconditioned or self.settings.get("optimizer") == "naturalmuon"

    @property
    def untuned(self) -> bool:
        """Whether its learning rate was given, and not chosen from trials."""
        return self.chosen is not None and not self.trials


@dataclass(frozen=True)
class Comparison:
    """All results of a comparison.

    Arguments:
        name: of the comparison.
        task: as all of them got it.
        measure: the number by which runs are judged.
        target: value of the measure, to which steps and seconds are counted; ``None`` as long as
            there is none.
        target_from: where the target comes from, in words, such as ``"what SGD ends with"``.
        tuning_seed: of the trials.
        seeds: of the runs.
        trials: learning rates that were tried of each.
        facts: about the machine and the versions, by name.
        entries: what came out, one for each contender.
        tuning_steps: length of the trials, or ``None`` if they were as long as the runs.
        signal: number of the signal that ended the command before its end, or 0.
    """

    name: str
    task: Settings
    measure: Measure
    target: float | None
    target_from: str
    tuning_seed: int
    seeds: tuple[int, ...]
    trials: int
    facts: Mapping[str, str]
    entries: tuple[ContenderResult, ...]
    tuning_steps: int | None = None
    signal: int = field(default=0, compare=False)

    def write(self, folder: Path) -> None:
        """Write ``results.json``; a file that is there is replaced when the new one is complete.

        Arguments:
            folder: of the comparison, which must be there.
        """
        write_text(folder / NAME, json.dumps(_plain(self), allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> "Comparison":
        """Read ``results.json``.

        Arguments:
            path: of a comparison's folder, or of the file itself.
        """
        file = Path(path) / NAME if Path(path).is_dir() else Path(path)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingError(
                f"The results {file} cannot be read ({error.strerror}): name the folder of a "
                "comparison."
            ) from error
        except ValueError as error:  # of JSON as of UTF-8
            raise CheckpointError(
                f"The results {file} are cut off or spoilt: compare anew in another folder."
            ) from error
        known = found.get("format") if isinstance(found, dict) else None
        if known != FORMAT:
            raise CheckpointError(
                f"The results {file} have format {known} but this version of natgrad reads "
                f"{FORMAT}: read them with the version that wrote them."
            )
        try:
            return _comparison(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"The results {file} lack something or have it in another form "
                f"({type(error).__name__}: {error}): compare anew in another folder."
            ) from error


def _plain(found: Comparison) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": found.name,
        "task": asdict(found.task),
        "metric": found.measure.metric,
        "on": found.measure.on,
        "higher": found.measure.higher,
        "target": found.target,
        "target_from": found.target_from,
        "tuning_seed": found.tuning_seed,
        "seeds": list(found.seeds),
        "trials": found.trials,
        "tuning_steps": found.tuning_steps,
        "facts": dict(found.facts),
        "contenders": [_plain_entry(one) for one in found.entries],
    }


def _plain_entry(one: ContenderResult) -> dict[str, Any]:
    return {
        "name": one.name,
        "key": one.key,
        "about": one.about,
        "settings": dict(one.settings),
        "chosen": one.chosen,
        "edge": bool(one.edge),
        "missing": one.missing,
        "trials": [_plain_run(run) for run in one.trials],
        "runs": [_plain_run(run) for run in one.runs],
    }


def _plain_run(run: ComparedRun) -> dict[str, Any]:
    values = asdict(run)
    curve = values["curve"]
    values["curve"] = {"steps": curve["steps"], "seconds": curve["seconds"], **curve["values"]}
    return values


def _comparison(found: dict[str, Any]) -> Comparison:
    return Comparison(
        str(found["name"]),
        Settings(**found["task"]),
        Measure(str(found["metric"]), str(found["on"])),
        _number(found["target"]),
        str(found["target_from"]),
        int(found["tuning_seed"]),
        tuple(map(int, found["seeds"])),
        int(found["trials"]),
        {str(k): str(v) for k, v in found["facts"].items()},
        tuple(map(_entry, found["contenders"])),
        None if (steps := found.get("tuning_steps")) is None else int(steps),
    )


def _entry(found: dict[str, Any]) -> ContenderResult:
    trials = tuple(map(_run, found["trials"]))
    chosen = _number(found["chosen"])
    tried = [run.lr for run in trials]
    edge = 0
    if found["edge"] and chosen is not None:
        edge = 1 if chosen == max(tried) else -1
    return ContenderResult(
        str(found["key"]),
        str(found["name"]),
        str(found["about"]),
        dict(found["settings"]),
        chosen,
        edge,
        str(found["missing"]),
        trials,
        tuple(map(_run, found["runs"])),
    )


def _run(found: dict[str, Any]) -> ComparedRun:
    curve = {name: tuple(values) for name, values in found["curve"].items()}
    steps, seconds = curve.pop("steps"), curve.pop("seconds")
    if len({len(steps), len(seconds), *map(len, curve.values())}) > 1:
        raise ValueError("a curve has columns of unlike lengths")
    reached = found["reached"]
    return ComparedRun(
        float(found["lr"]),
        int(found["seed"]),
        str(found["folder"]),
        Status(found["status"]),
        str(found["said"]),
        int(found["steps"]),
        float(found["seconds"]),
        _number(found["final"]),
        None if reached is None else Reached(int(reached["step"]), float(reached["seconds"])),
        ComparedCurve(steps, seconds, curve),
        _number(found["kfac_share"]),
    )


def _number(value: Any) -> float | None:
    if value is None:
        return None
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is no finite number")
    return found
