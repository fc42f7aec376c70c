"""The methods of a preconditioner that only look: what it covers, keeps, sends and takes.

They are a base class of `natgrad.KFAC`, so that preconditioner.py holds the story of a step alone.
"""

from torch import nn

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import Uncovered
from natgrad.capture.statistics import Statistics
from natgrad.capture.stopwatch import Stopwatch
from natgrad.comm import Communicator
from natgrad.curvature.fisher import Fisher
from natgrad.kfac import health, reports
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.attaching import Attachment
from natgrad.kfac.change_rates import ChangeRates
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.loss_finding import LossFinding
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import KFACSettings
from natgrad.placement import Plan
from natgrad.tables import Table


class Inspection:
    """The methods of `natgrad.KFAC` that only look."""

    model: nn.Module
    blocks: list[Block]
    uncovered: dict[str, Uncovered]
    comm: Communicator
    team: Team
    watch: Stopwatch
    statistics: Statistics
    settings: KFACSettings
    finding: LossFinding
    curvature: Fisher
    preconditioning: Preconditioning
    rates: LearningRates
    attachment: Attachment | None
    steps: int
    monitor: health.Monitor

    def __repr__(self) -> str:
        """One line: what it covers, by which settings, what it hangs on, and how far it is."""
        here = [block for block in self.blocks if not block.lost]
        covered = sum(p.numel() for p in {p for block in here for p in block.parameters})
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        length = self.team.motion.length
        names = " and ".join(type(o).__name__ for o in self.rates.optimizers)
        said = [
            f"{len(here)} blocks precondition {covered / max(1, trained):.1%} of {trained:,} "
            "parameters",
            f"damping={self.settings.damping or self.settings.at(self.steps).damping!r}",
            f"length={length!r}" if length else f"kl_clip={self.settings.kl_clip!r}",
            f"{'in front of' if self.attachment is None else 'attached to'} {names}" * bool(names),
            f"rank {self.team.rank} of {self.team.size}" * (not self.team.alone),
            f"step {self.steps}",
        ]
        text = ", ".join(filter(None, said))
        return f"<{type(self).__name__} of {type(self.model).__name__}: {text}>"

    @property
    def plan(self) -> Plan:
        """Who reduces, decomposes and preconditions what; prints as a table, ``draw()`` draws."""
        return self.team.plan

    def traffic(self) -> reports.TrafficTable:
        """Bytes that this rank has sent, by purpose, since the start."""
        return reports.traffic(self.comm, self.steps)

    def coverage(self) -> Table:
        """Every parameter: the structure that preconditions it, or why none does."""
        return reports.coverage(self.model, self.blocks, self.uncovered)

    def health(self) -> health.Health:
        """Whether it works: coverage, statistics, scale of the loss, damping and curvature, how far
        gradients are turned, cost of a refresh; each with what to do."""
        return health.health(self)

    def memory(self) -> Table:
        """Bytes by block and purpose."""
        applied = self.preconditioning
        return reports.memory(self.blocks, applied.stacks, applied.buffers)

    def timings(self) -> reports.Timings:
        """Seconds by stage, since the start."""
        return reports.timings(self.watch, self.steps)

    def time_with(self, watch: Stopwatch) -> None:
        """Measure the seconds of all stages with another stopwatch from now on.

        Arguments:
            watch: called with the name of a stage, it gives a context for its time.
        """
        self.watch = self.statistics.watch = watch

    def track_changes(self) -> ChangeRates:
        """Measure from now on how much new estimates of the factors differ from those before, and
        their running averages; keeps one more copy of every factor. A second call takes the place
        of the first."""
        return ChangeRates(self)

    def drift(self) -> reports.DriftTable:
        """How fast the factors change, and how far their decompositions lag behind."""
        return reports.drift(self.blocks, self.settings.at(self.steps))
