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
from natgrad.comm.torchrun import joined
from natgrad.errors import SettingError
from natgrad.train.comparison import facts as measured
from natgrad.train.comparison import question as questions
from natgrad.train.comparison.attempt import attempt, tidied
from natgrad.train.comparison.plan import Found, Job, assembled, jobs, known, rate
from natgrad.train.comparison.question import Question
from natgrad.train.comparison.results import NAME, Comparison, Run, Status
from natgrad.train.comparison.telling import Estimate, Silent, Telling, Within
from natgrad.train.interruption import Interruption
from natgrad.train.state import writable, write_text
from natgrad.train.tasks import task
from natgrad.train.together import together

WARM = ".warm-up"
T = TypeVar("T")


def compare(
    question: Question,
    folder: Path | str,
    telling: Telling | None = None,
    *,
    resume: bool = False,
) -> Comparison:
    """All runs that ``question`` asks for; each has a folder below ``folder``.

    ``resume`` goes on with a comparison there. Under torchrun all processes train together, and the
    first one writes and tells.
    """
    with joined() as (comm, device), _threads(question.threads), Interruption() as interruption:
        shown = telling if comm.rank == 0 and telling is not None else Silent()
        try:
            course = Course(question, Path(folder), comm, device, shown, resume=resume)
            return course.run(interruption)
        finally:
            shown.end()


class Course:
    """``found`` has the runs that have ended, by contender; the same on all ranks."""

    def __init__(
        self,
        question: Question,
        folder: Path,
        comm: Communicator,
        device: torch.device,
        telling: Telling,
        *,
        resume: bool,
    ) -> None:
        self.folder, self.comm, self.telling = folder, comm, telling
        # Data may be missing on one of the machines.
        samples = together(comm, lambda: _samples(question))
        shared, notes = questions.fair(question.task, samples)
        self.question = replace(question, task=shared)
        self.facts = measured.facts(comm.size, device)

        def prepared() -> tuple[dict[str, Found], dict[str, str]]:
            before = self._before(resume=resume)
            had = {} if before is None else dict(before.facts)
            found = known(self.question, before)
            if not found:
                raise SettingError(" ".join(one.missing() for one in self.question.contenders))
            for one in found.values():
                for run in (*one.trials, *one.runs):  # who was killed may have left some
                    tidied(self.folder / run.folder)
            return found, measured.joined(had, self.facts)

        self.found, self.facts = self._first(prepared)
        for note in (*notes, *self._missing()):
            telling.note(note)

    def run(self, interruption: Interruption) -> Comparison:
        estimate = Estimate()
        signal = self._warmed(interruption)
        while not signal and (left := list(jobs(self.question, self.found))):
            job, lr = left[0], rate(self.question, left[0], self.found)
            self._announce(left, lr, estimate)
            self._write((job, lr))
            start = perf_counter()
            run, signal = self._attempt(job, lr, interruption)
            if run.status is Status.DONE:
                estimate.add(job.contender.key, perf_counter() - start)
            if run.status is not Status.RUNNING:
                had = self.found[job.contender.key]
                (had.trials if job.number else had.runs).append(run)
                self._write(None)
                if self.comm.rank == 0:
                    tidied(self.folder / job.folder)
        return assembled(self.question, self.found, self.facts, signal=signal)

    def _attempt(self, job: Job, lr: float, interruption: Interruption) -> tuple[Run, int]:
        settings = job.contender.told(self.question.task, lr, job.seed)
        inside = Within(self.telling)
        return attempt(settings, self.folder, job.folder, self.comm, inside, interruption)

    def _warmed(self, interruption: Interruption) -> int:
        """Two steps of everybody, so that nobody's first run pays for what is loaded once."""
        left = {job.contender.key: job.contender for job in jobs(self.question, self.found)}
        few: dict[str, Any] = {"steps": 2, "epochs": 0.0, "fit_samples": 1, "test_samples": 1}
        signal = 0
        for one in left.values():
            if not signal:
                self._cleared()
                settings = one.told(self.question.task, one.lr, self.question.tuning_seed)
                brief = replace(settings, **few)
                quiet = Within(Silent())
                _, signal = attempt(brief, self.folder, WARM, self.comm, quiet, interruption)
        self._cleared()
        return signal

    def _cleared(self) -> None:
        if self.comm.rank == 0:
            shutil.rmtree(self.folder / WARM, ignore_errors=True)
        self.comm.gather(None)  # nobody looks into it before it is gone

    def _announce(self, left: list[Job], lr: float, estimate: Estimate) -> None:
        job = left[0]
        done = sum(len(had.trials) + len(had.runs) for had in self.found.values())
        what = f"seed {job.seed}"
        if job.number:
            what = f"trial {job.number} of {self.question.trials}"
        rest = estimate.left(one.contender.key for one in left)
        text = f"{job.contender.name}: {what}, learning rate {lr:g}{rest}"
        self.telling.run(done + 1, done + len(left), text)

    def _before(self, *, resume: bool) -> Comparison | None:
        """What there is in the folder; on the first rank alone."""
        file, results = self.folder / questions.NAME, self.folder / NAME
        there = file.exists() or results.exists()
        if there and not resume:
            raise SettingError(
                f"The folder {self.folder} has a comparison already: pass --resume to go on with "
                "it, or another folder."
            )
        if file.exists():
            questions.check_same(questions.read(file), self.question, self.folder)
        writable(self.folder)
        write_text(file, questions.written(self.question))
        return Comparison.read(results) if results.exists() else None

    def _missing(self) -> list[str]:
        return [one.missing() for one in self.question.contenders if one.key not in self.found]

    def _write(self, running: tuple[Job, float] | None) -> None:
        now = assembled(self.question, self.found, self.facts, running)
        together(
            self.comm, (lambda: now.write(self.folder)) if self.comm.rank == 0 else lambda: None
        )

    def _first(self, call: Callable[[], T]) -> T:
        """What ``call`` returns on the first rank, on all."""
        value = together(self.comm, call if self.comm.rank == 0 else lambda: None)
        found: T = self.comm.gather(value)[0]
        return found


def _samples(question: Question) -> int:
    """Of the training data. What does not fit together is refused here, before anything is run."""
    found = task(question.task)
    found.network()
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
