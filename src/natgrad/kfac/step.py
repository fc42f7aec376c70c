"""One step as a value: what is due, the samples it is over, and what follows from these.

Before the backward pass it is known which factors the step updates (`Due`); with that the hooks go
to work. The number of samples is known when ``step()`` is called, and gives the rest: `Step` is
then handed down to the three stages. None of them asks the preconditioner for anything, so that
each can be read, and tested, with a `Step` alone.
"""

from dataclasses import dataclass

from torch.amp import GradScaler

from natgrad.capture.hooks import Capture
from natgrad.capture.statistics import Due
from natgrad.kfac.settings import KFACSettings, Values


@dataclass(frozen=True)
class Step:
    """``samples``: of this rank, as the user says or as counted at the model; ``None`` if neither.
    ``passes``: forward passes that a gradient came back to. ``statistics_scale`` makes captured
    gradients those of one term of the loss; ``loss_scale`` is what a GradScaler put into them.
    ``share`` of the samples are those that the statistics are over."""

    index: int
    values: Values
    due: Due
    samples: int | None
    passes: int
    statistics_scale: float
    loss_scale: float
    share: float = 1.0

    @property
    def updates(self) -> bool:
        return bool(self.due)

    @property
    def entered(self) -> float:
        """How many samples of this rank the statistics are over."""
        return (self.samples or 0) * self.share


class StatisticsScale:
    """What makes gradients that are captured until now those of one term of the loss. It is asked
    before the step, too: buckets leave from inside the backward pass."""

    def __init__(
        self, settings: KFACSettings, capture: Capture, scaler: GradScaler | None, *, observed: bool
    ) -> None:
        self.settings, self.capture, self.scaler = settings, capture, scaler
        self.observed = observed

    def __call__(self, samples: int | None = None) -> float:
        """``samples``: if it is not what the model was called with."""
        amp = self.scaler.get_scale() if self.scaler is not None else 1.0
        samples = samples or self.capture.samples() or 0
        return self.settings.statistics_scale(samples, observed=self.observed) / amp
