"""K-FAC as a preconditioner in front of any optimizer. ``KFAC.step`` tells the whole story."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from natgrad.comm import Communicator, connect
from natgrad.comm.checkpoints import Folder
from natgrad.comm.layouts import check_layout, first_peer, last_backward
from natgrad.curvature.fisher import EmpiricalFisher, Fisher
from natgrad.errors import CaptureError, SettingError
from natgrad.inverses import Eigen, Inverse
from natgrad.placement import Auto, Plan, Strategy
from natgrad.runtime import agreement, arguments, checkpoint, reports, sharding
from natgrad.runtime.adaptive import Prediction
from natgrad.runtime.apply import Preconditioning
from natgrad.runtime.blocks import Block
from natgrad.runtime.capture import Capture, Pass
from natgrad.runtime.discovery import Choice, Pattern, StructureOf, discover
from natgrad.runtime.gradients import Gradients
from natgrad.runtime.mixed import no_autocast, unscale
from natgrad.runtime.observation import Observation
from natgrad.runtime.reduction import Reducer
from natgrad.runtime.refresh import Refresh
from natgrad.runtime.scaling import LevenbergMarquardt
from natgrad.runtime.schedule import Doubling, Schedule
from natgrad.runtime.settings import Clocks, Intervals, Reduction, Settings, Values
from natgrad.runtime.statistics import Statistics
from natgrad.runtime.team import Group, Team, Wire, world_of
from natgrad.runtime.thin import ThinGradients
from natgrad.runtime.timing import Stopwatch
from natgrad.runtime.update import Update
from natgrad.runtime.wrappers import Compiled, unwrapped
from natgrad.tables import Table


class KFAC:
    """Replaces gradients by preconditioned ones, ``(F + damping I)^-1 grad``, layer by layer.

    ``kfac = KFAC(model, optimizer)`` once, ``kfac.step()`` between ``loss.backward()`` and
    ``optimizer.step()``. See the table of arguments in ``docs/index.md``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        damping: float | Schedule | LevenbergMarquardt = 0.01,
        decay: float | Schedule = 0.95,
        kl_clip: float | Schedule | None = 1e-3,
        update_every: Intervals = Doubling(10),  # noqa: B008 (frozen)
        refresh_every: Intervals = Doubling(100),  # noqa: B008 (frozen)
        curvature: Fisher | None = None,
        structure: StructureOf = None,
        norm_damping: float | Schedule = 1.0,
        inverse: Inverse | None = None,
        placement: Strategy | None = None,
        include: Iterable[Pattern] | Pattern | None = None,
        exclude: Iterable[Pattern] | Pattern = (),
        reduction: Reduction = "mean",
        terms_per_sample: float = 1,
        regions: Mapping[str, float] | None = None,
        batch_axis: int = 0,
        group: Group = None,
        factor_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        wire: Wire = Wire(),  # noqa: B008 (frozen)
        scaler: GradScaler | None = None,
    ) -> None:
        self.comm: Communicator = connect(group)
        self.steps = 0
        with agreement.Together(self.comm) as agreed:
            arguments.check_model(model, optimizer, kl_clip)
            arguments.check_choices(curvature, structure, inverse, placement)
            arguments.check_tensors(factor_dtype, batch_axis, scaler, optimizer)
            arguments.check_wire(wire_dtype, wire)
            check_layout(model, self.comm.ranks)
            self.model, self.optimizer, self.scaler = unwrapped(model), optimizer, scaler
            self.curvature = curvature or EmpiricalFisher()
            self.settings = Settings(
                damping, decay, kl_clip, norm_damping, reduction, terms_per_sample
            )
            self.update_clocks = Clocks(update_every, "update_every", drift=False)
            self.refresh_clocks = Clocks(refresh_every, "refresh_every", drift=True)
            clocks = (self.update_clocks, self.refresh_clocks)
            choice = Choice(
                structure,
                inverse or Eigen(),
                None if include is None else _patterns(include),
                _patterns(exclude),
                factor_dtype,
                batch_axis,
                arguments.regions(regions or {}, self.settings, self.curvature),
            )
            self.blocks, self.uncovered = discover(self.model, choice)
            agreed.words = agreement.described(
                self.model, self.blocks, self.settings, clocks, self.curvature, wire_dtype
            )
        world = world_of(model, self.comm, *clocks, choice.inverse)
        self.team = Team(self.comm, self.blocks, placement or Auto(), world, wire, wire_dtype)
        self.watch = Stopwatch()
        self.statistics = Statistics(self._wanted, self.watch)
        self.capture = Capture(
            self.model,
            self.blocks,
            self.statistics.add,
            taping=self.curvature.observes,
            batch_axis=batch_axis,
        )
        drawing = first_peer(model, self.comm.ranks, self.comm.rank)
        self.observation = Observation(self.curvature, self.capture, self.statistics, drawing)
        self.reducer = Reducer(self.team, self._wanted, self._statistics_scale)
        self._overlap(model)
        self.updating = Update(
            self.team,
            self.reducer,
            self.capture,
            self.statistics,
            self.curvature,
            self.update_clocks,
        )
        self.refreshing = Refresh(self.team, self.refresh_clocks)
        self.compiled = Compiled(model)
        # Hooks of every step would be traced into compiled code; others' batches are elsewhere.
        thin = self.team.alone and not self.compiled.found
        self.thin = ThinGradients(self.blocks, enabled=thin)
        self.gradients = Gradients(self.team, self.model.parameters())
        self.preconditioning = Preconditioning(self.team, self.gradients, optimizer, self.thin)
        self.prediction = Prediction(self.team, self.model)
        self.detached = False
        self._samples: int | None = None  # as the user says
        self._warned: set[str] = set()
        self._prepare()

    @torch.no_grad()
    def step(self, samples: int | None = None) -> None:
        """Replace the gradients by preconditioned ones. Call it before ``optimizer.step()``.

        ``samples``: how many samples the loss since the last step was over, if that is not what the
        model was called with.
        """
        if self.detached:
            raise CaptureError(
                "step() was called after detach(), which takes K-FAC off the model for good: leave "
                "the call out, or make a new KFAC."
            )
        loss_scale = unscale(self.scaler, self.optimizer)
        now = self.settings.at(self.steps)
        self._samples = samples
        samples = samples or self.capture.samples()
        with no_autocast(self.blocks[0].device):
            if self.capture.armed:
                with self.watch("fold"):
                    self._report(self.updating(self.steps, now, samples))
            with self.watch("refresh"):
                self._report(self.refreshing(self.steps, now, updated=self.capture.armed))
            with self.watch("apply"):
                self._apply(now, samples, loss_scale)
        self.steps += 1
        self._prepare()

    def observe(self, output: Tensor, targets: Tensor | None = None) -> None:
        """Show the model's output, before ``loss.backward()``, to a Fisher that is not empirical.

        ``targets`` only says which positions are ignored. Free on steps that update nothing."""
        if self.capture.armed and self.curvature.observes:
            scale = self.scaler.get_scale() if self.scaler is not None else 1.0
            self.observation(output, targets, scale)

    def adapt(self, before: Tensor | float, after: Tensor | float) -> float:
        """Adapt the damping to a step: the loss of one batch before and after ``optimizer.step()``.

        Only with ``damping=LevenbergMarquardt(...)``; does nothing between its steps. Returns the
        damping."""
        rule = self.settings.damping
        if not isinstance(rule, LevenbergMarquardt):
            raise SettingError(
                f"adapt() needs a damping that adapts, but damping is {rule!r}: pass "
                "damping=natgrad.LevenbergMarquardt() to KFAC."
            )
        if self.prediction.remembered:
            now = self.settings.at(max(0, self.steps - 1))
            ratio = self.prediction.ratio(float(before), float(after), now)
            self.settings.adapted = rule.next(self.settings.adapted, ratio)
        return self.settings.adapted

    # To look at.

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

    def memory(self) -> Table:
        """Bytes by block and purpose."""
        return reports.memory(self.blocks, self.preconditioning.stacks)

    def timings(self) -> reports.Timings:
        """Seconds by stage, since the start."""
        return reports.timings(self.watch, self.steps)

    def drift(self) -> reports.DriftTable:
        """How fast the factors change, and how far their decompositions lag behind."""
        return reports.drift(self.blocks, self.settings.at(self.steps))

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as tensors, numbers and strings, on every rank.

        All ranks must call this and the four below together: one alone waits for the others."""
        return checkpoint.save(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, at any world size and placement. A state that
        does not fit changes nothing."""
        checkpoint.load(self, state)
        self._prepare()

    def shards(self) -> sharding.Shards:
        """The state for ``torch.distributed.checkpoint``: a rank's own share of it."""
        return sharding.Shards(self, self._prepare)

    def save(self, folder: Folder, beside: dict[str, Any] | None = None) -> None:
        """Write the shards of all ranks, and what is ``beside`` them (model, optimizer, numbers).
        An interrupted save leaves the last good one."""
        sharding.save(self.shards(), folder, beside or {})

    def load(self, folder: Folder, beside: dict[str, Any] | None = None) -> None:
        """Continue where ``save`` was called; what is ``beside`` is loaded or overwritten."""
        sharding.load(self.shards(), folder, {} if beside is None else beside)

    def discard(self) -> None:
        """Forget the statistics since the last step, of a batch that will not be stepped on.

        Of several ranks all must do so."""
        self.reducer.discard()
        for block in self.blocks:
            block.sums = {}
        self._prepare()

    def detach(self) -> None:
        """Take all hooks off the model and give its compiled form back, for good."""
        self.detached = True
        self.capture.detach()
        self.thin.detach()
        self.compiled.run_eagerly(False)

    # Parts of a step.

    def _prepare(self) -> None:
        """Make ready for the next step: hooks are there only if it updates something."""
        self._samples = None
        self.capture.forget()
        self.statistics.forget()
        self.reducer.forget()
        self.thin.forget()
        updates = bool(self.update_clocks.due(self.steps)) and not self.detached
        self.compiled.run_eagerly(updates)
        counts = self.settings.reduction == "sum" or self.gradients.are_local
        counts = counts and not self.detached
        self.capture.count_samples(updates or counts)
        self.capture.arm() if updates else self.capture.disarm()

    def _wanted(self, block: Block) -> list[str]:
        due = self.update_clocks.due(self.steps)
        return [name for name in block.factors if self.update_clocks.key(name) in due]

    def _apply(self, now: Values, samples: int | None, loss_scale: float) -> None:
        """Precondition the gradients of the blocks that are ready, and clip."""
        ready = [block for block in self.blocks if block.ready]
        present, all_samples = self.gradients.agree(samples, ready)
        weight = 1.0
        if self.gradients.are_local:
            samples = all_samples
            if self.settings.reduction == "mean":
                own = self._samples or self.capture.samples() or 0
                weight = own / all_samples if all_samples else 1.0 / self.team.size
        scale = self._gradient_scale(samples)
        if self._adapts():
            share = weight if self.gradients.are_local else 1.0 / self.team.size
            self.prediction.remember(scale, share)
        self.preconditioning(now, present, scale, weight, loss_scale)

    def _statistics_scale(self) -> float:
        """What makes captured gradients, as of now, those of a term of the loss."""
        amp = self.scaler.get_scale() if self.scaler is not None else 1.0
        samples = self._samples or self.capture.samples() or 0
        return self.settings.statistics_scale(samples, observed=self.curvature.observes) / amp

    def _overlap(self, model: nn.Module) -> None:
        """Let sums leave during a backward pass, where something says that no other one follows."""
        is_last = None if self.team.alone else last_backward(model)
        if is_last is not None and not self.team.units:
            self.reducer.overlaps = True

            def complete(block: Block, this: Pass) -> None:
                if is_last():
                    self.reducer.complete(block, this)

            # Several gradients are drawn for one output; all of them are there after observe().
            if self.curvature.observes:
                self.observation.complete = complete
            else:
                self.statistics.complete = complete

    def _gradient_scale(self, samples: int | None) -> float:
        """What makes the gradients in ``.grad`` those of the mean loss of a term."""
        if self.settings.reduction == "mean":
            return 1.0
        called = samples or self.capture.passes  # an empty batch has no samples
        if not called and any(p.grad is not None for p in self.model.parameters()):
            raise CaptureError(
                "reduction='sum' needs the number of samples, but the model itself was not called "
                "since the last step. Call the model KFAC was given, or pass step(samples=...)."
            )
        return self.settings.gradient_scale(samples or 1)

    def _adapts(self) -> bool:
        rule = self.settings.damping
        return isinstance(rule, LevenbergMarquardt) and self.steps % rule.every == 0

    def _report(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._warned:
                self._warned.add(problem)
                warnings.warn(problem, stacklevel=4)  # step() is inside of no_grad()


def _patterns(given: Iterable[Pattern] | Pattern) -> tuple[Pattern, ...]:
    return (given,) if isinstance(given, str | nn.Module) else tuple(given)
