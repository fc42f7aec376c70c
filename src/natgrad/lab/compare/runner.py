"""The whole of a comparison: all runs one after the other, and results after each of them."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from natgrad.comm import Communicator
from natgrad.comm.agreement import raise_on_all_ranks
from natgrad.comm.torchrun import joined
from natgrad.errors import SettingError
from natgrad.lab.compare import environment as measured
from natgrad.lab.compare import setup as setup_file
from natgrad.lab.compare.next_run import (
    EndedRuns,
    PlannedRun,
    assembled,
    jobs,
    known,
    rate,
    wanted_trials,
)
from natgrad.lab.compare.progress_bar import (
    ComparisonProgress,
    NoComparisonProgress,
    RunWithinComparison,
    TimeLeft,
)
from natgrad.lab.compare.results import NAME, ComparedRun, Comparison, Status
from natgrad.lab.compare.setup import ComparisonSetup
from natgrad.lab.compare.trial import remove_checkpoints, run_trial
from natgrad.lab.train import optimizers
from natgrad.lab.train.interruption import Interruption
from natgrad.lab.train.state import writable, write_text
from natgrad.lab.train.tasks import task

WARM = ".warm-up"
T = TypeVar("T")


def compare(
    setup: ComparisonSetup,
    folder: Path | str,
    progress: ComparisonProgress | None = None,
    *,
    resume: bool = False,
) -> Comparison:
    """All runs that ``setup`` asks for. Under torchrun all processes train together, and the first
    one writes.

    Arguments:
        setup: who is compared on what, and how often.
        folder: for the results; each run has a folder below it.
        progress: is told how far it is, on the first rank alone; ``None`` tells nobody.
        resume: whether to go on with a comparison in ``folder``; otherwise one there raises.
    """
    with joined() as (comm, device), _threads(setup.threads), Interruption() as interruption:
        shown = progress if comm.rank == 0 and progress is not None else NoComparisonProgress()
        try:
            runner = ComparisonRunner(setup, Path(folder), comm, device, shown, resume=resume)
            return runner.run(interruption)
        finally:
            shown.end()


class ComparisonRunner:
    """``found`` has the runs that have ended, by contender; the same on all ranks."""

    def __init__(
        self,
        setup: ComparisonSetup,
        folder: Path,
        comm: Communicator,
        device: torch.device,
        progress: ComparisonProgress,
        *,
        resume: bool,
    ) -> None:
        self.folder, self.comm, self.progress = folder, comm, progress
        # Data may be missing on one of the machines.
        samples = raise_on_all_ranks(comm, lambda: _samples(setup))
        shared, notes = setup_file.fair(setup.task, samples)
        self.setup = replace(setup, task=shared)
        self.tuning_task = setup_file.shortened(shared, setup.tuning_steps, samples)
        whole = shared.steps or shared.epochs * samples / shared.batch_size
        self.trial_share = (setup.tuning_steps or whole) / whole
        self.facts = measured.facts(comm.size, device)

        def prepared() -> tuple[dict[str, EndedRuns], dict[str, str]]:
            before = self._before(resume=resume)
            had = {} if before is None else dict(before.facts)
            found = known(self.setup, before)
            if not found:
                raise SettingError(" ".join(one.missing() for one in self.setup.contenders))
            for one in found.values():
                for run in (*one.trials, *one.runs):  # who was killed may have left some
                    remove_checkpoints(self.folder / run.folder)
            return found, measured.joined(had, self.facts)

        self.found, self.facts = self._first(prepared)
        for note in (*notes, *self._missing()):
            progress.note(note)

    def run(self, interruption: Interruption) -> Comparison:
        estimate = TimeLeft()
        signal = self._warmed(interruption)
        while not signal and (left := list(jobs(self.setup, self.found))):
            job, lr = left[0], rate(self.setup, left[0], self.found)
            self._announce(left, lr, estimate)
            self._write((job, lr))
            start = perf_counter()
            run, signal = self._run_job(job, lr, interruption)
            if run.status is Status.DONE:
                seconds = perf_counter() - start
                estimate.add(job.contender.key, seconds / self._share(job))
            if run.status is not Status.RUNNING:
                had = self.found[job.contender.key]
                (had.trials if job.number else had.runs).append(run)
                self._write(None)
                if self.comm.rank == 0:
                    remove_checkpoints(self.folder / job.folder)
        return assembled(self.setup, self.found, self.facts, signal=signal)

    def _run_job(
        self, job: PlannedRun, lr: float, interruption: Interruption
    ) -> tuple[ComparedRun, int]:
        task = self.tuning_task if job.number else self.setup.task
        settings = job.contender.settings_for(task, lr, job.seed)
        inside = RunWithinComparison(self.progress)
        return run_trial(settings, self.folder, job.folder, self.comm, inside, interruption)

    def _share(self, job: PlannedRun) -> float:
        """Of a whole run."""
        return self.trial_share if job.number else 1.0

    def _warmed(self, interruption: Interruption) -> int:
        """Two steps of everybody, so that nobody's first run pays for what is loaded once."""
        left = {job.contender.key: job.contender for job in jobs(self.setup, self.found)}
        few: dict[str, Any] = {"steps": 2, "epochs": 0.0, "fit_samples": 1, "test_samples": 1}
        signal = 0
        for one in left.values():
            if not signal:
                self._cleared()
                settings = one.settings_for(self.setup.task, one.lr, self.setup.tuning_seed)
                brief = replace(settings, **few)
                quiet = RunWithinComparison(NoComparisonProgress())
                _, signal = run_trial(brief, self.folder, WARM, self.comm, quiet, interruption)
        self._cleared()
        return signal

    def _cleared(self) -> None:
        if self.comm.rank == 0:
            shutil.rmtree(self.folder / WARM, ignore_errors=True)
        self.comm.gather(None)  # nobody looks into it before it is gone

    def _announce(self, left: list[PlannedRun], lr: float, estimate: TimeLeft) -> None:
        job = left[0]
        done = sum(len(had.trials) + len(had.runs) for had in self.found.values())
        what = f"seed {job.seed}"
        if job.number:
            what = f"trial {job.number} of {wanted_trials(self.setup, self.found)}"
        rest = estimate.left((one.contender.key, self._share(one)) for one in left)
        text = f"{job.contender.name}: {what}, learning rate {lr:g}{rest}"
        self.progress.run(done + 1, done + len(left), text)

    def _before(self, *, resume: bool) -> Comparison | None:
        """What there is in the folder; on the first rank alone."""
        file, results = self.folder / setup_file.NAME, self.folder / NAME
        there = file.exists() or results.exists()
        if there and not resume:
            raise SettingError(
                f"The folder {self.folder} has a comparison already: pass --resume to go on with "
                "it, or another folder."
            )
        if file.exists():
            setup_file.check_same(setup_file.read(file), self.setup, self.folder)
        writable(self.folder)
        write_text(file, setup_file.written(self.setup))
        return Comparison.read(results) if results.exists() else None

    def _missing(self) -> list[str]:
        return [one.missing() for one in self.setup.contenders if one.key not in self.found]

    def _write(self, running: tuple[PlannedRun, float] | None) -> None:
        now = assembled(self.setup, self.found, self.facts, running)
        raise_on_all_ranks(
            self.comm, (lambda: now.write(self.folder)) if self.comm.rank == 0 else lambda: None
        )

    def _first(self, call: Callable[[], T]) -> T:
        """What ``call`` returns on the first rank, on all."""
        value = raise_on_all_ranks(self.comm, call if self.comm.rank == 0 else lambda: None)
        found: T = self.comm.gather(value)[0]
        return found


def _samples(setup: ComparisonSetup) -> int:
    """Of the training data. What does not fit together is refused here, before anything is run."""
    found = task(setup.task)
    model = found.network()
    for one in setup.contenders:
        if not one.missing():
            optimizers.check(one.settings_for(setup.task, one.lr, setup.tuning_seed), model)
    return len(found.train)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
