"""The loop: step, log, test, save, and stop when it is time."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from natgrad.comm import Communicator
from natgrad.comm.agreement import raise_on_all_ranks
from natgrad.comm.torchrun import joined
from natgrad.errors import CheckpointError, NatgradError, SettingError, first_line
from natgrad.lab.train import toml
from natgrad.lab.train.initial_weights import load_start, start_file
from natgrad.lab.train.interruption import Interruption
from natgrad.lab.train.logs import Log, NoLog
from natgrad.lab.train.progress_line import NoRunProgress, Progress
from natgrad.lab.train.run_lock import RunLock
from natgrad.lab.train.settings import FREE, Settings
from natgrad.lab.train.state import Checkpoints, writable, write_text
from natgrad.lab.train.training import Training

SETTINGS = "settings.toml"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Arguments:
        step: steps that have been done.
        steps: of the whole run.
        metrics: of the last test, by name.
        reached: whether they met the target.
        signal: number of the signal that ended the run, or 0.
        diverged: whether the test loss was not finite; such a run ends, and is not saved.
    """

    step: int
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    reached: bool = False
    signal: int = 0
    diverged: bool = False


def train(
    settings: Settings,
    folder: Path | str,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    interruption: Interruption | None = None,
) -> Outcome:
    """A training run. Under torchrun all processes train together.

    Arguments:
        settings: all that the run is told.
        folder: for logs, checkpoints and the settings; made if it is not there.
        progress: is told of steps and tests, on the first rank alone; ``None`` tells nobody.
        resume: whether to go on where the last checkpoint in ``folder`` was written; otherwise a
            run there raises.
        interruption: one around several runs, whose signal ends this one as well; ``None`` makes
            one for this run.
    """
    with joined() as (comm, device):
        shown = progress if comm.rank == 0 and progress is not None else NoRunProgress()
        watch = Interruption() if interruption is None else nullcontext(interruption)
        lock = RunLock(Path(folder))
        try:
            return _train(settings, Path(folder), comm, device, shown, watch, lock, resume=resume)
        finally:
            lock.release()


def _train(
    settings: Settings,
    folder: Path,
    comm: Communicator,
    device: torch.device,
    progress: Progress,
    watch: AbstractContextManager[Interruption],
    lock: RunLock,
    *,
    resume: bool,
) -> Outcome:
    first = comm.rank == 0
    checkpoints = _prepared(settings, folder, comm, lock, resume=resume)
    run = Training(settings, comm, device)
    start, metrics, elapsed = _resumed(run, checkpoints, folder)
    if first:
        write_text(folder / SETTINGS, toml.written(settings))
    log = Log(folder, start) if first else NoLog()
    every = Every(settings, run.steps_per_epoch, run.steps)
    clock = TrainingClock(run, start, elapsed)
    done, stop, reached, diverged = start, 0, _reached(settings, metrics), False

    def tell(kind: str, step: int, values: Mapping[str, Any]) -> None:
        if values:
            log(kind, step, {"elapsed": round(clock.elapsed, 6), **values})

    progress.start(start, run.steps)
    try:
        with watch as interruption:
            for step, batches in run.batches(run.steps if reached else start):
                loss, done, lost = run.step(step, batches), step + 1, False
                if every.logs(done):
                    values = {"loss": run.mean(loss), "lr": run.lr(step), **clock.read(done)}
                    progress.step(done, values | {k: v for k, v in metrics.items() if k != "loss"})
                    with clock.paused():
                        tell("train", done, values)
                        tell("drift", done, run.drift())
                    lost = not isfinite(values["loss"])  # maybe of this batch alone
                if every.tests(done) or lost:
                    with clock.paused(), run.tested():
                        metrics = run.evaluate(run.task.test)
                        tell("test", done, metrics)
                        tell("fit", done, run.fit())
                        tell("stages", done, run.stages())
                    reached, diverged = _reached(settings, metrics), not isfinite(metrics["loss"])
                    progress.tested(done, metrics)
                    if diverged:
                        break
                stop = run.any(interruption.signal)
                if every.saves(done) or stop or reached:
                    with clock.paused():
                        share = run.mixing.state_dict() or None
                        known = {"metrics": metrics, "elapsed": clock.elapsed}
                        checkpoints.save(done, {**run.state(), **known}, share)
                        run.write_record(folder)
                if stop or reached:
                    break
    finally:
        progress.end()
        log.close()
    return Outcome(done, run.steps, metrics, reached, stop, diverged)


class Every:
    """Which steps, counted from 1, are logged, tested and saved; the last one always is."""

    def __init__(self, settings: Settings, steps_per_epoch: float, steps: int) -> None:
        epoch = max(1, round(steps_per_epoch))
        self.log, self.steps = settings.log_every, steps
        self.test = settings.evaluate_every or epoch
        self.save = settings.checkpoint_every or epoch

    def logs(self, step: int) -> bool:
        return step % self.log == 0 or step in (1, self.steps)

    def tests(self, step: int) -> bool:
        return step % self.test == 0 or step == self.steps

    def saves(self, step: int) -> bool:
        return step % self.save == 0 or step == self.steps


class TrainingClock:
    """Seconds of training: of all steps (``elapsed``, of which ``before`` those before the run was
    interrupted at ``step``), and of a step since the clock was last read with K-FAC's share."""

    def __init__(self, run: Training, step: int, before: float) -> None:
        self.run, self.step = run, step
        self.before = self.last = before
        self.start, self.spent = perf_counter(), self._kfac()
        self.pause: float | None = None

    @property
    def elapsed(self) -> float:
        now = perf_counter() if self.pause is None else self.pause
        return self.before + now - self.start

    def read(self, step: int) -> dict[str, float]:
        elapsed, spent = self.elapsed, self._kfac()
        seconds = elapsed - self.last
        found = {"seconds": seconds / (step - self.step)}
        if self.run.kfac is not None:
            found["share"] = min(1.0, (spent - self.spent) / max(seconds, 1e-9))
        self.step, self.last, self.spent = step, elapsed, spent
        return found

    def paused(self) -> "TrainingClock":
        return self

    def __enter__(self) -> None:
        self.pause = perf_counter()

    def __exit__(self, *error: object) -> None:
        assert self.pause is not None
        self.start += perf_counter() - self.pause
        self.pause = None

    def _kfac(self) -> float:
        return 0.0 if self.run.kfac is None else sum(self.run.kfac.watch.seconds.values())


def _prepared(
    settings: Settings, folder: Path, comm: Communicator, lock: RunLock, *, resume: bool
) -> Checkpoints:
    """Before anything takes long; what is wrong on the first rank is raised on all."""
    checkpoints = Checkpoints(folder / "checkpoints", settings.keep, comm)

    def check() -> None:
        if checkpoints.steps() and not resume:
            raise SettingError(
                f"The folder {folder} has a run of {checkpoints.steps()[-1]} steps already: pass "
                "--resume to go on with it, or another folder."
            )
        if resume and (folder / SETTINGS).exists():
            _check_unchanged(Settings(**toml.read(folder / SETTINGS)), settings, folder)
        if settings.start_from and not checkpoints.steps():
            start_file(settings.start_from)
        writable(folder)
        lock.take()

    raise_on_all_ranks(comm, check if comm.rank == 0 else lambda: None)
    return checkpoints


def _check_unchanged(before: Settings, now: Settings, folder: Path) -> None:
    """A run goes on only as it began."""
    for one in fields(Settings):
        known, value = getattr(before, one.name), getattr(now, one.name)
        if one.name not in FREE and value != known:
            raise SettingError(
                f"{one.name} is {value!r} but the run in {folder} has {known!r}, and would be "
                "another: leave it out to go on, or name another folder with --out."
            )


def _resumed(
    run: Training, checkpoints: Checkpoints, folder: Path
) -> tuple[int, dict[str, float], float]:
    """The step from which all ranks go on, the metrics of the last test before it, and the seconds
    that they have trained."""
    found = raise_on_all_ranks(run.comm, checkpoints.load)
    step = 0 if found is None else int(found[0]["step"])
    steps = run.comm.gather(step)
    if len(set(steps)) > 1:
        problem = CheckpointError(
            f"The ranks find checkpoints of different steps in {folder} "
            f"({', '.join(map(str, steps))}): name a folder that all of them reach."
        )
        problem.everywhere = True
        raise problem
    if step > run.steps:
        wrong = SettingError(
            f"The run lasts for {run.steps} steps but that in {folder} has {step} already: pass at "
            "least as many to go on."
        )
        wrong.everywhere = True
        raise wrong
    if found is None:
        if source := run.settings.start_from:
            raise_on_all_ranks(run.comm, lambda: load_start(run.network, source))
        return 0, {}, 0.0
    state, shares = found
    try:
        metrics, elapsed = dict(state["metrics"]), float(state["elapsed"])
        run.load(state, shares)
    except NatgradError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"The checkpoint of step {step} in {folder} is not a state of this run "
            f"({type(error).__name__}: {first_line(error)}): remove it, to go on from another one."
        ) from error
    return step, metrics, elapsed


def _reached(settings: Settings, metrics: dict[str, float]) -> bool:
    if not settings.target or settings.metric not in metrics:
        return False
    value = metrics[settings.metric]
    low = settings.metric in ("loss", "perplexity")
    return value <= settings.target if low else value >= settings.target
