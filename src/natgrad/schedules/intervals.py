"""How many steps lie between two updates or two refreshes.

Curvature changes fast at the start of training and slowly later, and a decomposition is expensive:
an interval trades stale factors against time. `Drift` and `Staggered` are no functions of the step:
the first looks at how far a factor has moved, the second spreads the layers over the steps.

The defaults double from 1 up to 10 and 100 (`Doubling`). With a constant 100, the first hundred
steps all use what one batch at the initial weights has shown, and lose to SGD.
"""

from dataclasses import dataclass

from natgrad.checks import NOT_NEGATIVE, POSITIVE, check_numbers, check_whole


@dataclass(frozen=True)
class GrowingInterval:
    """1 for ``after`` steps, then ``min(at_most, every ⌊e / every⌋ + 1)`` (Osawa 2019, eq. 20).

    Arguments:
        steps_per_epoch: ``> 0``, number of steps in an epoch; need not be whole.
        every: epochs after which the interval grows again, and by how many steps it then grows.
        at_most: the longest interval, in steps, at least 1.
        after: first steps, during which the interval is 1 whatever the epoch.
    """

    steps_per_epoch: float
    every: int = 5
    at_most: int = 20
    after: int = 500

    def __post_init__(self) -> None:
        check_numbers(self, steps_per_epoch=POSITIVE)
        for field, low in (("every", 1), ("at_most", 1), ("after", 0)):
            check_whole(getattr(self, field), f"GrowingInterval.{field}", low)

    def __call__(self, step: int) -> int:
        if step < self.after:
            return 1
        return min(self.at_most, self.every * int(step // (self.every * self.steps_per_epoch)) + 1)


@dataclass(frozen=True)
class Doubling:
    """Steps 0, 1, 2, 4, 8, 16, …, and every ``at_most`` steps once that is reached.

    Curvature changes fastest at the start, where a factor has seen least data: a constant interval
    would work for long with what one batch at the initial weights has shown.

    Arguments:
        at_most: the final interval, in steps.
    """

    at_most: int

    def __post_init__(self) -> None:
        check_whole(self.at_most, "Doubling.at_most", low=1)

    def __call__(self, step: int) -> int:
        return min(self.at_most, max(1, -(-step // 2)))


@dataclass(frozen=True)
class TwoPhaseInterval:
    """``first`` while ``e < epoch``, ``then`` afterwards (Osawa 2019, eq. 21).

    Arguments:
        steps_per_epoch: ``> 0``, number of steps in an epoch; need not be whole.
        first: interval of the first phase, in steps.
        then: interval of the second phase, in steps.
        epoch: ``≥ 0``, at which the second phase starts; need not be whole.
    """

    steps_per_epoch: float
    first: int = 1
    then: int = 20
    epoch: float = 13

    def __post_init__(self) -> None:
        check_numbers(self, steps_per_epoch=POSITIVE, epoch=NOT_NEGATIVE)
        for field in ("first", "then"):
            check_whole(getattr(self, field), f"TwoPhaseInterval.{field}", low=1)

    def __call__(self, step: int) -> int:
        return self.first if step < self.epoch * self.steps_per_epoch else self.then


@dataclass(frozen=True)
class BatchInterval:
    """Interval inversely proportional to the global batch: as many refreshes in every epoch.

    The defaults give 2000, 1000, 500, 250, 125 on 16, 32, 64, 128, 256 processes of 32 samples
    (Pauloski 2022, sec. 6.4.1).

    Arguments:
        batch: samples in a step, over all processes.
        interval: in steps, at a batch of ``reference`` samples.
        reference: batch at which ``interval`` was tuned.
    """

    batch: int
    interval: int = 500
    reference: int = 2048

    def __post_init__(self) -> None:
        for field in ("batch", "interval", "reference"):
            check_whole(getattr(self, field), f"BatchInterval.{field}", low=1)

    def __call__(self, step: int) -> int:
        return max(1, round(self.interval * self.reference / self.batch))


@dataclass(frozen=True)
class Drift:
    """Refresh a factor when its decomposition is measured to have drifted from its running average.

    Arguments:
        tolerance: ``> 0``, relative error (`Inverse.error`) above which a factor is decomposed
            again: for `Eigen`, what lies beside the diagonal in the old eigenbasis; for `Cholesky`,
            how far the old inverse is from being one.
        at_most: longest interval in steps, whatever is measured; ``None`` sets no limit.
    """

    tolerance: float
    at_most: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, tolerance=POSITIVE)
        if self.at_most is not None:
            check_whole(self.at_most, "Drift.at_most", low=1)


@dataclass(frozen=True)
class Staggered:
    """Refresh the layers one after the other, so that no step has to wait for all decompositions at
    once. The first refresh is of all.

    Arguments:
        every: steps within which every layer has its turn once, at least 1.
    """

    every: int

    def __post_init__(self) -> None:
        check_whole(self.every, "Staggered.every", low=1)

    def turn(self, step: int, index: int, count: int) -> bool:
        """Whether a layer has its turn at a step.

        Arguments:
            step: counted from 0.
            index: of the layer, from 0 to ``count - 1``.
            count: number of layers.
        """
        return step % self.every == index * self.every // count
