"""K-FAC as a preconditioner in front of any optimizer. ``KFAC.step`` tells the whole story."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from natgrad.curvature.fisher import EmpiricalFisher, Fisher
from natgrad.errors import CaptureError, SettingError
from natgrad.inverses import Eigen, Inverse
from natgrad.runtime import arguments, checkpoint, reports
from natgrad.runtime.adaptive import Prediction
from natgrad.runtime.apply import Preconditioning
from natgrad.runtime.blocks import Block
from natgrad.runtime.capture import Capture
from natgrad.runtime.discovery import Choice, Pattern, StructureOf, discover
from natgrad.runtime.mixed import no_autocast, unscale
from natgrad.runtime.observation import Observation
from natgrad.runtime.refresh import Refresh
from natgrad.runtime.scaling import LevenbergMarquardt
from natgrad.runtime.schedule import Doubling, Schedule
from natgrad.runtime.settings import Clocks, Intervals, Reduction, Settings, Values
from natgrad.runtime.statistics import Statistics
from natgrad.runtime.thin import ThinGradients
from natgrad.runtime.timing import Stopwatch
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
        damping: float | Schedule | LevenbergMarquardt = 3e-3,
        decay: float | Schedule = 0.95,
        kl_clip: float | Schedule | None = 1e-3,
        update_every: Intervals = Doubling(10),  # noqa: B008 (frozen)
        refresh_every: Intervals = Doubling(100),  # noqa: B008 (frozen)
        curvature: Fisher | None = None,
        structure: StructureOf = None,
        norm_damping: float | Schedule = 1.0,
        inverse: Inverse | None = None,
        include: Iterable[Pattern] | Pattern | None = None,
        exclude: Iterable[Pattern] | Pattern = (),
        reduction: Reduction = "mean",
        terms_per_sample: float = 1,
        batch_axis: int = 0,
        factor_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        arguments.check_model(model, optimizer, kl_clip)
        arguments.check_choices(curvature, structure, inverse)
        arguments.check_tensors(factor_dtype, batch_axis, scaler, optimizer)
        self.steps = 0
        self.model, self.optimizer, self.scaler = unwrapped(model), optimizer, scaler
        self.curvature = curvature or EmpiricalFisher()
        self.settings = Settings(damping, decay, kl_clip, norm_damping, reduction, terms_per_sample)
        self.update_clocks = Clocks(update_every, "update_every", drift=False)
        self.refresh_clocks = Clocks(refresh_every, "refresh_every", drift=True)
        choice = Choice(
            structure,
            inverse or Eigen(),
            None if include is None else _patterns(include),
            _patterns(exclude),
            factor_dtype,
            batch_axis,
        )
        self.blocks, self.uncovered = discover(self.model, choice)
        self.watch = Stopwatch()
        self.statistics = Statistics(self._wanted, self.watch)
        self.capture = Capture(
            self.model,
            self.blocks,
            self.statistics.add,
            taping=self.curvature.observes,
            batch_axis=batch_axis,
        )
        self.observation = Observation(self.curvature, self.capture, self.statistics)
        self.refreshing = Refresh(self.blocks, self.refresh_clocks)
        self.compiled = Compiled(model)
        # Hooks of every step would be traced into compiled code.
        self.thin = ThinGradients(self.blocks, enabled=not self.compiled.found)
        self.preconditioning = Preconditioning(self.model, self.blocks, optimizer, self.thin)
        self.prediction = Prediction(self.blocks, self.model)
        self.detached = False
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
        samples = samples or self.capture.samples()
        with no_autocast(self.blocks[0].device):
            if self.capture.armed:
                with self.watch("fold"):
                    self._report(self._update(now, samples, loss_scale))
            with self.watch("refresh"):
                self._report(self.refreshing(self.steps, now, updated=self.capture.armed))
            if self._adapts():
                self.prediction.remember(self._gradient_scale(samples))
            with self.watch("apply"):
                self.preconditioning(now, self._gradient_scale(samples), loss_scale)
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
        """Everything a resumed run needs, as tensors, numbers and strings."""
        return checkpoint.save(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. A state that does not fit changes nothing."""
        checkpoint.load(self, state)
        self._prepare()

    def discard(self) -> None:
        """Forget the statistics since the last step, of a batch that will not be stepped on."""
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
        self.capture.forget()
        self.statistics.forget()
        self.thin.forget()
        updates = bool(self.update_clocks.due(self.steps)) and not self.detached
        self.compiled.run_eagerly(updates)
        counts = self.settings.reduction == "sum" and not self.detached
        self.capture.count_samples(updates or counts)
        self.capture.arm() if updates else self.capture.disarm()

    def _wanted(self, block: Block) -> list[str]:
        due = self.update_clocks.due(self.steps)
        return [name for name in block.factors if self.update_clocks.key(name) in due]

    def _update(self, now: Values, samples: int | None, loss_scale: float) -> list[str]:
        """Sums since the last step -> running averages, now that the number of samples is known.

        Returns what is amiss, a sentence each."""
        for this in self.capture.passes:
            self.statistics.flush(this)
        if not samples and self.capture.passes:  # an empty batch says nothing of the curvature
            for block in self.blocks:
                block.sums = {}
            return []
        if not samples or not any(block.sums for block in self.blocks):
            self._complain_of_silence()
            return []
        # Gradients that observe() made are those of one sample's loss already.
        scale = 1.0 if self.curvature.observes else self.settings.loss_scale(samples)
        silent = [
            block
            for block in self.blocks
            if not block.fold(samples, scale / loss_scale, now.decay) and self._wanted(block)
        ]
        self.update_clocks.mark(self.steps, self.update_clocks.due(self.steps))
        return [_silence(block) for block in silent if _has_moved(block)]

    def _gradient_scale(self, samples: int | None) -> float:
        """What makes the gradients in ``.grad`` those of the mean loss of a sample."""
        if self.settings.reduction == "mean":
            return self.settings.terms_per_sample
        called = samples or self.capture.passes  # an empty batch has no samples
        if not called and any(p.grad is not None for p in self.model.parameters()):
            raise CaptureError(
                "reduction='sum' needs the number of samples, but the model itself was not called "
                "since the last step. Call the model KFAC was given, or pass step(samples=...)."
            )
        return 1.0 / samples if samples else 1.0

    def _adapts(self) -> bool:
        rule = self.settings.damping
        return isinstance(rule, LevenbergMarquardt) and self.steps % rule.every == 0

    def _complain_of_silence(self) -> None:
        if all(p.grad is None for block in self.blocks for p in block.parameters):
            return
        if self.curvature.observes:
            why = f"{self.curvature!r} saw no output: call kfac.observe(output) before backward()"
        elif self.capture.skipped:
            why = "the backward pass ran with create_graph=True: take that away on this step"
        else:
            why = (
                "no layer that KFAC watches was called: call the model that KFAC was given, and do "
                "not compile a function around it"
            )
        raise CaptureError(f"There are gradients at step {self.steps} but no statistics, as {why}.")

    def _report(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._warned:
                self._warned.add(problem)
                warnings.warn(problem, stacklevel=4)  # step() is inside of no_grad()


def _has_moved(block: Block) -> bool:
    """Whether there is a gradient for this block that is not 0."""
    return any(p.grad is not None and bool(p.grad.any()) for p in block.parameters)


def _silence(block: Block) -> str:
    return (
        f"{block.kind} {block.name!r} has a gradient but gave no statistics, so its curvature is "
        "not updated. Call the module itself, not a function of its weight, and compile modules, "
        "not functions that call them."
    )


def _patterns(given: Iterable[Pattern] | Pattern) -> tuple[Pattern, ...]:
    return (given,) if isinstance(given, str | nn.Module) else tuple(given)
