"""The loop: step, log, test, save, and stop when it is time."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter

import torch

from natgrad.comm import Communicator
from natgrad.comm.torchrun import joined
from natgrad.errors import CheckpointError, SettingError
from natgrad.train import toml
from natgrad.train.interruption import Interruption
from natgrad.train.logs import Log
from natgrad.train.progress import Progress, Silent
from natgrad.train.settings import FREE, Settings
from natgrad.train.state import Checkpoints, writable, write_text
from natgrad.train.together import together
from natgrad.train.training import Training

SETTINGS = "settings.toml"


@dataclass(frozen=True)
class Outcome:
    """``metrics`` of the last test; ``reached`` says whether they met the target; ``signal`` is the
    number of the one that ended the run, or 0."""

    step: int
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    reached: bool = False
    signal: int = 0


def train(
    settings: Settings,
    folder: Path | str,
    progress: Progress | None = None,
    *,
    resume: bool = False,
) -> Outcome:
    """Train as ``settings`` say; logs, checkpoints and the settings go to ``folder``.

    ``resume`` goes on where the last checkpoint there was written. Under torchrun all processes
    train together; ``progress`` is told only on the first of them.
    """
    with joined() as (comm, device):
        shown = progress if comm.rank == 0 and progress is not None else Silent()
        return _train(settings, Path(folder), comm, device, shown, resume=resume)


def _train(
    settings: Settings,
    folder: Path,
    comm: Communicator,
    device: torch.device,
    progress: Progress,
    *,
    resume: bool,
) -> Outcome:
    first = comm.rank == 0
    checkpoints = _prepared(settings, folder, comm, resume=resume)
    run = Training(settings, comm, device)
    start, metrics = _resumed(run, checkpoints, folder)
    if first:
        write_text(folder / SETTINGS, toml.written(settings))
    log = Log(folder, start) if first else None
    every = Every(settings, run.steps_per_epoch, run.steps)
    clock = Clock(run, start)
    done, stop, reached = start, 0, _reached(settings, metrics)
    progress.start(start, run.steps)
    try:
        with Interruption() as interruption:
            for step, batches in run.batches(run.steps if reached else start):
                loss, done = run.step(step, batches), step + 1
                if every.logs(done):
                    values = {"loss": run.mean(loss), "lr": run.lr(step), **clock.read(done)}
                    progress.step(done, values | {k: v for k, v in metrics.items() if k != "loss"})
                    if log is not None:
                        log("train", done, values)
                if every.tests(done):
                    with clock.paused():
                        metrics = run.evaluate()
                    reached = _reached(settings, metrics)
                    progress.tested(done, metrics)
                    if log is not None:
                        log("test", done, metrics)
                stop = run.any(interruption.signal)
                if every.saves(done) or stop or reached:
                    with clock.paused():
                        share = run.mixing.state_dict() or None
                        checkpoints.save(done, {**run.state(), "metrics": metrics}, share)
                if stop or reached:
                    break
    finally:
        progress.end()
        if log is not None:
            log.close()
    return Outcome(done, run.steps, metrics, reached, stop)


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


class Clock:
    """Seconds of a step since it was last read, and K-FAC's share of them; ``step`` is the one from
    which the run goes on."""

    def __init__(self, run: Training, step: int) -> None:
        self.run, self.step = run, step
        self.left_out = 0.0
        self.start, self.spent = perf_counter(), self._kfac()

    def read(self, step: int) -> dict[str, float]:
        now, spent = perf_counter(), self._kfac()
        seconds = now - self.start - self.left_out
        found = {"seconds": seconds / (step - self.step)}
        if self.run.kfac is not None:
            found["share"] = min(1.0, (spent - self.spent) / max(seconds, 1e-9))
        self.step, self.start, self.spent, self.left_out = step, now, spent, 0.0
        return found

    def paused(self) -> "Clock":
        return self

    def __enter__(self) -> None:
        self.pause = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.left_out += perf_counter() - self.pause

    def _kfac(self) -> float:
        return 0.0 if self.run.kfac is None else sum(self.run.kfac.watch.seconds.values())


def _prepared(settings: Settings, folder: Path, comm: Communicator, *, resume: bool) -> Checkpoints:
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
        writable(folder)

    together(comm, check if comm.rank == 0 else lambda: None)
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


def _resumed(run: Training, checkpoints: Checkpoints, folder: Path) -> tuple[int, dict[str, float]]:
    """The step from which all ranks go on, and the metrics of the last test before it."""
    found = together(run.comm, checkpoints.load)
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
        return 0, {}
    state, shares = found
    run.load(state, shares)
    return step, dict(state["metrics"])


def _reached(settings: Settings, metrics: dict[str, float]) -> bool:
    if not settings.target or settings.metric not in metrics:
        return False
    value = metrics[settings.metric]
    low = settings.metric in ("loss", "perplexity")
    return value <= settings.target if low else value >= settings.target
