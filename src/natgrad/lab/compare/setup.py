"""What a comparison is asked: a task, who takes part, and how much is tried."""

from dataclasses import dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from natgrad.checks import Range, check_whole, number
from natgrad.errors import SettingError
from natgrad.lab.compare.contender import CONTENDERS, KFAC_SETTINGS, Contender, neutral
from natgrad.lab.train import optimizers, toml
from natgrad.lab.train.contradictions import metrics_of
from natgrad.lab.train.settings import Settings

NAME = "comparison.toml"
ON = ("fit", "test")
LOW = ("loss", "perplexity")  # of metrics, those that should fall

FIT = 2048  # training samples that are tested
TESTS, SAVES = 30, 4  # in a run, about
DECAYED = 0.1  # of the highest learning rate may be left at the end


@dataclass(frozen=True)
class Measure:
    """The number by which runs are judged: a ``metric`` ``on`` "test" data, or on "fit", training
    data."""

    metric: str
    on: str

    @property
    def higher(self) -> bool:
        return self.metric not in LOW

    @property
    def key(self) -> str:
        """Its name in a curve."""
        return f"{self.on}_{self.metric}"

    @property
    def name(self) -> str:
        return f"{'test' if self.on == 'test' else 'training'} {self.metric}"

    def met(self, value: float, target: float) -> bool:
        return value >= target if self.higher else value <= target

    def low(self, value: float) -> float:
        """The lower the better."""
        return -value if self.higher else value


@dataclass(frozen=True)
class ComparisonSetup:
    """A comparison: the same number of trials for everybody, then runs with the best learning rate
    on several seeds.

    Arguments:
        task: what is learnt, and how long; what it says of an optimizer is not used.
        contenders: who takes part, each with a key of its own.
        trials: learning rates that are tried of each, on the task's own seed, at least 1.
        most_trials: so many at most, again the same number for everybody, as long as the best rate
            of one of them does not lie between two others a factor of 2 away; ``None`` is
            ``trials``.
        tuning_steps: length of the trials, where they should be shorter than the runs; ``None`` is
            as long. Schedules are as much shorter.
        seeds: further seeds, with a run of the best rate on each, at least 1.
        metric: by which runs are judged: one that the task's loss has.
        on: whether on ``"test"`` data or on ``"fit"``, training data.
        target: value of the metric, for the steps and seconds to it; ``None`` is the median of what
            the runs of the best contender end with that is not natgrad's.
        threads: of torch; ``None`` leaves them as they are.
        name: of the comparison, for reports.
    """

    task: Settings
    contenders: tuple[Contender, ...] = field(default=tuple(CONTENDERS.values()))
    trials: int = 5
    most_trials: int | None = None
    tuning_steps: int | None = None
    seeds: int = 3
    metric: str = "loss"
    on: str = "fit"
    target: float | None = None
    threads: int | None = None
    name: str = "comparison"

    def __post_init__(self) -> None:
        check_whole(self.trials, "trials", 1)
        check_whole(self.seeds, "seeds", 1)
        if self.most_trials is not None:
            check_whole(self.most_trials, "most_trials", self.trials)
        if self.tuning_steps is not None:
            check_whole(self.tuning_steps, "tuning_steps", 1)
        if self.threads is not None:
            check_whole(self.threads, "threads", 1)
        if self.target is not None:
            number(self.target, "target", Range())
        _check_word("on", self.on, ON)
        _check_word("metric", self.metric, metrics_of(self.task.loss))
        keys = [one.key for one in self.contenders]
        if not keys:
            raise SettingError("A comparison has no optimizers: name at least one.")
        for key in keys:
            if keys.count(key) > 1:
                raise SettingError(f"The optimizer {key} is named twice: leave one of them out.")
        for one in self.contenders:
            try:
                one.settings_for(self.task, one.lr, self.task.seed)
            except SettingError as error:
                raise SettingError(f"{one.key}: {error}") from None

    @property
    def measure(self) -> Measure:
        return Measure(self.metric, self.on)

    @property
    def tuning_seed(self) -> int:
        return self.task.seed

    @property
    def test_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.task.seed + 1, self.task.seed + 1 + self.seeds))


def _check_word(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise SettingError(
            f"{name} is {given!r} but must be one of {', '.join(allowed)}: name one of them."
        )


def fair(task: Settings, samples: int) -> tuple[Settings, tuple[str, ...]]:
    """The task as all of them get it, and sentences about what was changed for that; ``samples``
    are those of its training data."""
    steps_per_epoch = samples / task.batch_size
    steps = task.steps or ceil(task.epochs * steps_per_epoch - 1e-9)
    shared, said = neutral(replace(task, target=0.0)), []
    if task.target:
        said.append(
            f"All runs go to their end: the target {task.target:g} of the settings stops none."
        )
    left = optimizers.rate(shared, steps_per_epoch, steps)(steps)
    if left > DECAYED * shared.lr * (1 + 1e-9):
        linear: dict[str, Any] = {"decay_begin": 0.0, "decay_end": 0.0, "decay_power": 1.0}
        shared = replace(shared, schedule="polynomial", decay_at=(), **linear)
        said.append(
            f"Learning rates fall linearly to 0 by the last step: schedule {task.schedule} would "
            f"leave {left / shared.lr:.0%} of them."
        )
    shared = replace(
        shared,
        fit_samples=task.fit_samples or min(FIT, samples),
        evaluate_every=task.evaluate_every or max(1, round(steps / TESTS)),
        checkpoint_every=task.checkpoint_every or max(1, round(steps / SAVES)),
        keep=1,
    )
    return shared, tuple(said)


def shortened(task: Settings, steps: int | None, samples: int) -> Settings:
    """The task of the trials: ``steps`` long, with all that is told in epochs as much shorter."""
    if steps is None:
        return task
    whole = task.steps or ceil(task.epochs * samples / task.batch_size - 1e-9)
    if steps > whole:
        raise SettingError(
            f"tuning_steps is {steps} but the runs have {whole} steps: pass at most as many."
        )
    share = steps / whole
    return replace(
        task,
        steps=steps,
        epochs=0.0,
        warmup=share * task.warmup,
        decay_begin=share * task.decay_begin,
        decay_end=share * task.decay_end,
        decay_at=tuple(share * epoch for epoch in task.decay_at),
        evaluate_every=min(steps, task.evaluate_every),
    )


def written(setup: ComparisonSetup) -> str:
    """As a file, which reads back as the same setup."""
    values = {
        one.name: getattr(setup, one.name)
        for one in fields(setup)
        if one.name not in ("task", "contenders")
    }
    lines = ["[comparison]", *_entries(values)]
    for one in setup.contenders:
        known: dict[str, Any] = {"name": one.name, "about": one.about, "lr": one.lr}
        known |= {} if one.tuned else {"tuned": False}
        lines += ["", f"[contenders.{one.key}]", *_entries(known)]
        lines += [f"[contenders.{one.key}.settings]", *_entries(one.settings)]
    return "\n".join(lines) + "\n\n" + toml.written(setup.task)


def _entries(values: Any) -> list[str]:
    return [f"{k} = {toml.literal(v)}" for k, v in values.items() if v is not None]


def read(path: Path) -> ComparisonSetup:
    found = toml.parsed(path)
    own, others = found.pop("comparison", None), found.pop("contenders", None)
    try:
        contenders = tuple(Contender(key=key, **values) for key, values in others.items())
        return ComparisonSetup(Settings(**toml.values(found, path)), contenders, **own)
    except (TypeError, AttributeError):
        raise SettingError(
            f"The file {path} does not say what was compared: begin anew in another folder."
        ) from None


def check_same(before: ComparisonSetup, now: ComparisonSetup, folder: Path) -> None:
    """A comparison goes on as it began; only seeds and optimizers may come to it."""
    pairs = [(one.name, getattr(before, one.name), getattr(now, one.name)) for one in fields(now)]
    others = [pair for pair in pairs if pair[0] not in ("task", "contenders", "seeds", "name")]
    # Defaults of K-FAC may be others than they were, which is nothing to those without it.
    unused = {"folder", "workers"}
    if not any(one.preconditioned for one in now.contenders):
        unused.update(KFAC_SETTINGS)
    for one in fields(Settings):
        known, value = getattr(before.task, one.name), getattr(now.task, one.name)
        if one.name not in unused:
            others.append((one.name, known, value))
    had = {contender.key: contender for contender in before.contenders}
    for contender in now.contenders:
        known = had.get(contender.key, contender)
        others += [
            (f"{name} of {contender.key}", getattr(known, name), getattr(contender, name))
            for name in ("settings", "lr", "tuned")
        ]
    for name, known, value in others:
        if value != known:
            raise SettingError(
                f"{name} is {value!r} but the comparison in {folder} has {known!r}, and would be "
                "another: leave it out to go on, or name another folder with --out."
            )
    gone = sorted(had.keys() - {contender.key for contender in now.contenders})
    if gone:
        raise SettingError(
            f"The comparison in {folder} has {', '.join(gone)} as well: name all of its optimizers "
            "and others, or none to go on with the same."
        )
    if now.seeds < before.seeds:
        raise SettingError(
            f"seeds is {now.seeds} but the comparison in {folder} has {before.seeds}: pass at "
            "least as many to go on."
        )
