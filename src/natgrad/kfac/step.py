"""One step as a value: what is due, the samples it is over, and what follows from these.

Before the backward pass it is known which factors the step updates (`Due`); with that the hooks go
to work. The number of samples is known when ``step()`` is called, and gives the rest: `Step` is
then handed down to the three stages. None of them asks the preconditioner for anything, so that
each can be read, and tested, with a `Step` alone.
"""

from dataclasses import dataclass

from natgrad.capture.statistics import Due
from natgrad.kfac.settings import Values


@dataclass(frozen=True)
class Step:
    """``samples``: of this rank, as the user says or as counted at the model; ``None`` if neither.
    ``terms``: of the loss, over which gradients are averaged; samples, unless it was found.
    ``passes``: forward passes that a gradient came back to. ``statistics_scale`` makes captured
    gradients those of one term of the loss; ``loss_scale`` is what a GradScaler put into them.
    ``share`` of the samples are those that the statistics are over. ``gradient_weight``: sum of the
    weights of this rank's terms, if that was found and is not 1; ``votes``: for what it was."""

    index: int
    values: Values
    due: Due
    samples: int | None
    terms: float
    passes: int
    statistics_scale: float
    loss_scale: float
    share: float = 1.0
    gradient_weight: float | None = None
    votes: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def updates(self) -> bool:
        return bool(self.due)
