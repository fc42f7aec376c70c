"""What is run next, and what follows from what has been run: pure functions of the runs so far."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from natgrad.errors import SettingError
from natgrad.train.comparison import search
from natgrad.train.comparison.contender import Contender
from natgrad.train.comparison.question import Question
from natgrad.train.comparison.results import Comparison, Entry, Run, Status
from natgrad.train.comparison.search import Score


@dataclass
class Found:
    """The runs of one contender that have ended, in their order."""

    trials: list[Run] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """A run to be made: the ``number``-th trial (from 1), or that of a further seed (0)."""

    contender: Contender
    seed: int
    number: int

    @property
    def folder(self) -> str:
        name = f"trial-{self.number}" if self.number else f"seed-{self.seed}"
        return f"runs/{self.contender.key}/{name}"


def jobs(question: Question, found: Mapping[str, Found]) -> Iterator[Job]:
    """All that is left, in its order: a trial of each contender, then another of each, …, then a
    seed of each. So a machine that becomes slower does so for all of them alike.

    The learning rate of the first is known (`rate`); those of later ones depend on it.
    """
    taking_part = [one for one in question.contenders if one.key in found]
    for number in range(1, question.trials + 1):
        for one in taking_part:
            if len(found[one.key].trials) < number:
                yield Job(one, question.tuning_seed, number)
    for seed in question.test_seeds:
        for one in taking_part:
            had = found[one.key]
            tuned = len(had.trials) >= question.trials
            if tuned and chosen(question, one, had.trials)[0] is None:
                continue  # none of its trials came to an end
            if seed not in {run.seed for run in had.runs}:
                yield Job(one, seed, 0)


def rate(question: Question, job: Job, found: Mapping[str, Found]) -> float:
    """The learning rate of the first of `jobs`."""
    had = found[job.contender.key].trials
    if job.number:
        scores = search.replayed([score(question, run) for run in had])
        return search.rate(job.contender.lr, search.following(scores))
    best, _ = chosen(question, job.contender, had)
    assert best is not None
    return best


def chosen(question: Question, one: Contender, trials: list[Run]) -> tuple[float | None, int]:
    """The best learning rate, if any run came to its end, and whether it is the outermost."""
    if not any(run.status is Status.DONE for run in trials):
        return None, 0
    scores = search.replayed([score(question, run) for run in trials])
    return search.rate(one.lr, search.best(scores)), search.outermost(scores)


def score(question: Question, run: Run) -> Score:
    """The lower the better: with a given target the steps to it, then the final value, then the
    final loss on the same data; a run that did not come to its end is the worst."""
    measure = question.measure
    run = run.judged(measure, question.target)
    if run.status is not Status.DONE or run.final is None:
        return (math.inf, math.inf, math.inf, math.inf)
    steps = 0.0
    if question.target is not None:
        steps = math.inf if run.reached is None else float(run.reached.step)
    losses = run.curve.values.get(f"{measure.on}_loss", (math.inf,))
    return (0.0, steps, measure.low(run.final), losses[-1])


def target(question: Question, found: Mapping[str, Found]) -> tuple[float | None, str]:
    """And where it comes from."""
    if question.target is not None:
        return question.target, "given"
    first = [one for one in question.contenders if one.key == "sgd"]
    for one in [*first, *question.contenders]:
        runs = found[one.key].runs if one.key in found else []
        finals = [run.judged(question.measure, None).final for run in runs]
        ends = [value for value in finals if value is not None]
        if ends:
            return median(ends), f"what {one.name} ends with"
    return None, "nothing has come to its end yet"


def assembled(
    question: Question,
    found: Mapping[str, Found],
    facts: Mapping[str, str],
    running: tuple[Job, float] | None = None,
    signal: int = 0,
) -> Comparison:
    """All that is known, with a run that is under way and its learning rate."""
    goal, whose = target(question, found)
    entries = []
    for one in question.contenders:
        had = found.get(one.key, Found())
        tuned = len(had.trials) >= question.trials
        best, edge = chosen(question, one, had.trials) if tuned else (None, 0)
        trials, runs = list(had.trials), list(had.runs)
        if running is not None and running[0].contender.key == one.key:
            job, lr = running
            (trials if job.number else runs).append(Run(lr, job.seed, job.folder))
        judged = [
            tuple(run.judged(question.measure, goal) for run in some) for some in (trials, runs)
        ]
        missing = "" if one.key in found else one.missing()
        entries.append(
            Entry(one.key, one.name, one.about, one.settings, best, edge, missing, *judged)
        )
    return Comparison(
        question.name,
        question.task,
        question.measure,
        goal,
        whose,
        question.tuning_seed,
        question.test_seeds,
        question.trials,
        facts,
        tuple(entries),
        signal,
    )


def known(question: Question, before: Comparison | None) -> dict[str, Found]:
    """What ended runs of ``before`` are worth, for all contenders that can take part."""
    had = {one.key: one for one in before.entries} if before is not None else {}
    found = {}
    for one in question.contenders:
        entry = had.get(one.key)
        if missing := one.missing():
            if entry is not None and entry.trials:  # its results would be lost
                raise SettingError(missing)
            continue
        ended = [
            [run for run in some if run.status is not Status.RUNNING]
            for some in ((entry.trials, entry.runs) if entry is not None else ((), ()))
        ]
        found[one.key] = Found(*ended)
    return found
