"""What is run next, and what follows from what has been run: pure functions of the runs so far."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from natgrad.errors import SettingError
from natgrad.lab.compare import rate_search as search
from natgrad.lab.compare.contender import Contender
from natgrad.lab.compare.rate_search import Score
from natgrad.lab.compare.results import ComparedRun, Comparison, ContenderResult, Status
from natgrad.lab.compare.setup import ComparisonSetup


@dataclass
class EndedRuns:
    """The runs of one contender that have ended, in their order."""

    trials: list[ComparedRun] = field(default_factory=list)
    runs: list[ComparedRun] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedRun:
    """A run to be made: the ``number``-th trial (from 1), or that of a further seed (0)."""

    contender: Contender
    seed: int
    number: int

    @property
    def folder(self) -> str:
        name = f"trial-{self.number}" if self.number else f"seed-{self.seed}"
        return f"runs/{self.contender.key}/{name}"


def jobs(setup: ComparisonSetup, found: Mapping[str, EndedRuns]) -> Iterator[PlannedRun]:
    """All that is left, in its order: a trial of each contender, then another of each, …, then a
    seed of each. So a machine that becomes slower does so for all of them alike.

    The learning rate of the first is known (`rate`); those of later ones depend on it.
    """
    taking_part = [one for one in setup.contenders if one.key in found]
    trials = wanted_trials(setup, found)
    for number in range(1, trials + 1):
        for one in taking_part:
            if one.tuned and len(found[one.key].trials) < number:
                yield PlannedRun(one, setup.tuning_seed, number)
    for seed in setup.test_seeds:
        for one in taking_part:
            had = found[one.key]
            tuned = len(had.trials) >= trials or not one.tuned
            if tuned and chosen(setup, one, had.trials)[0] is None:
                continue  # none of its trials came to an end
            if seed not in {run.seed for run in had.runs}:
                yield PlannedRun(one, seed, 0)


def wanted_trials(setup: ComparisonSetup, found: Mapping[str, EndedRuns]) -> int:
    """Of everybody: one more for all of them as long as one's best is not between two others. Not
    after the first run with a rate that was chosen: it would have been another one."""
    tuned = {one: found[one.key] for one in setup.contenders if one.tuned and one.key in found}
    counts = [len(had.trials) for had in tuned.values()]
    done = max(setup.trials, *counts, 0)
    if min(counts, default=done) < done or any(had.runs for had in found.values()):
        return done
    if done >= (setup.most_trials or setup.trials):
        return done
    enough = all(search.bracketed(_scores(setup, had.trials)) for had in tuned.values())
    return done if enough else done + 1


def _scores(setup: ComparisonSetup, trials: list[ComparedRun]) -> dict[float, Score]:
    return search.replayed([score(setup, run) for run in trials])


def rate(setup: ComparisonSetup, job: PlannedRun, found: Mapping[str, EndedRuns]) -> float:
    """The learning rate of the first of `jobs`."""
    had = found[job.contender.key].trials
    if job.number:
        return search.rate(job.contender.lr, search.following(_scores(setup, had)))
    best, _ = chosen(setup, job.contender, had)
    assert best is not None
    return best


def chosen(
    setup: ComparisonSetup, one: Contender, trials: list[ComparedRun]
) -> tuple[float | None, int]:
    """The best learning rate, if any run came to its end, and whether it is the outermost."""
    if not one.tuned:
        return one.lr, 0
    if not any(run.status is Status.DONE for run in trials):
        return None, 0
    scores = _scores(setup, trials)
    return search.rate(one.lr, search.best(scores)), search.outermost(scores)


def score(setup: ComparisonSetup, run: ComparedRun) -> Score:
    """The lower the better: with a given target the steps to it, then the final value, then the
    final loss on the same data; a run that did not come to its end is the worst."""
    measure = setup.measure
    run = run.judged(measure, setup.target)
    if run.status is not Status.DONE or run.final is None:
        return (math.inf, math.inf, math.inf, math.inf)
    steps = 0.0
    if setup.target is not None:
        steps = math.inf if run.reached is None else float(run.reached.step)
    losses = run.curve.values.get(f"{measure.on}_loss", (math.inf,))
    return (0.0, steps, measure.low(run.final), losses[-1])


def target(setup: ComparisonSetup, found: Mapping[str, EndedRuns]) -> tuple[float | None, str]:
    """And where it comes from. To be sooner where a weak optimizer ends says little, so it is where
    the best of those ends that are not natgrad's; where all are, the first one."""
    if setup.target is not None:
        return setup.target, "given"
    ends: dict[Contender, float] = {}
    for one in setup.contenders:
        runs = found[one.key].runs if one.key in found else []
        finals = [run.judged(setup.measure, None).final for run in runs]
        if there := [value for value in finals if value is not None]:
            ends[one] = median(there)
    if not ends:
        return None, "nothing has come to its end yet"
    others = [one for one in ends if not one.is_natgrads]
    best = min(others, key=lambda one: setup.measure.low(ends[one]), default=next(iter(ends)))
    return ends[best], f"what {best.name} ends with"


def assembled(
    setup: ComparisonSetup,
    found: Mapping[str, EndedRuns],
    facts: Mapping[str, str],
    running: tuple[PlannedRun, float] | None = None,
    signal: int = 0,
) -> Comparison:
    """All that is known, with a run that is under way and its learning rate."""
    goal, whose = target(setup, found)
    trials_of_each = wanted_trials(setup, found)
    entries = []
    for one in setup.contenders:
        had = found.get(one.key, EndedRuns())
        tuned = len(had.trials) >= trials_of_each or not one.tuned
        best, edge = chosen(setup, one, had.trials) if tuned else (None, 0)
        trials, runs = list(had.trials), list(had.runs)
        if running is not None and running[0].contender.key == one.key:
            job, lr = running
            (trials if job.number else runs).append(ComparedRun(lr, job.seed, job.folder))
        judged = [tuple(run.judged(setup.measure, goal) for run in some) for some in (trials, runs)]
        missing = "" if one.key in found else one.missing()
        entries.append(
            ContenderResult(
                one.key, one.name, one.about, one.settings, best, edge, missing, *judged
            )
        )
    return Comparison(
        setup.name,
        setup.task,
        setup.measure,
        goal,
        whose,
        setup.tuning_seed,
        setup.test_seeds,
        trials_of_each,
        facts,
        tuple(entries),
        setup.tuning_steps,
        signal,
    )


def known(setup: ComparisonSetup, before: Comparison | None) -> dict[str, EndedRuns]:
    """What ended runs of ``before`` are worth, for all contenders that can take part."""
    had = {one.key: one for one in before.entries} if before is not None else {}
    found = {}
    for one in setup.contenders:
        entry = had.get(one.key)
        if missing := one.missing():
            if entry is not None and entry.trials:  # its results would be lost
                raise SettingError(missing)
            continue
        ended = [
            [run for run in some if run.status is not Status.RUNNING]
            for some in ((entry.trials, entry.runs) if entry is not None else ((), ()))
        ]
        found[one.key] = EndedRuns(*ended)
    return found
