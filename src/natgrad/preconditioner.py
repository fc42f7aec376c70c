"""K-FAC as a preconditioner in front of any optimizer. ``KFAC.step`` tells the whole story."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from natgrad.capture.chosen import chooser_of
from natgrad.capture.discovery import Choice, Pattern, StructureOf, discover
from natgrad.capture.hooks import Capture
from natgrad.capture.passes import entering_share
from natgrad.capture.statistics import Statistics
from natgrad.capture.stopwatch import Stopwatch
from natgrad.capture.wrappers import (
    Compiled,
    listed,
    no_autocast,
    unscale,
    unwrapped,
    without_fabric,
)
from natgrad.comm import Communicator, connect
from natgrad.comm.agreement import AllRanksAgree
from natgrad.comm.layouts import check_layout, first_tensor_parallel_rank, last_backward
from natgrad.curvature.fisher import EmpiricalFisher, Fisher
from natgrad.curvature.subsample import Subsample, subsample_of
from natgrad.damping import Relative
from natgrad.errors import CaptureError
from natgrad.geometry import Euclidean, Geometry
from natgrad.inverses import Eigen, Inverse
from natgrad.kfac import arguments, blending
from natgrad.kfac.adapting import Adapting
from natgrad.kfac.assembling import Assembling
from natgrad.kfac.attaching import Attaching
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.clocks import Clocks, Intervals
from natgrad.kfac.following import Following, FollowsOptimizer
from natgrad.kfac.health import Monitor
from natgrad.kfac.inspection import Inspection
from natgrad.kfac.motion import motion_of
from natgrad.kfac.newcomers import Newcomers
from natgrad.kfac.observation import Observation
from natgrad.kfac.ranks import agreement
from natgrad.kfac.ranks.distributed import Distributed
from natgrad.kfac.ranks.team import Team, world_of
from natgrad.kfac.residuals import Residuals, finding_of
from natgrad.kfac.settings import KFACSettings
from natgrad.kfac.state.saving import Saving
from natgrad.kfac.step import Step
from natgrad.layers.row_parts import Split
from natgrad.lengths import Length
from natgrad.loss_scale import MeanLoss, SumLoss
from natgrad.schedules import Doubling, LevenbergMarquardt, Schedule
from natgrad.structures import MAX_DIM


class KFAC(Inspection, Attaching, Adapting, Residuals, Saving, FollowsOptimizer, Assembling):
    """Replaces gradients by preconditioned ones, ``(F + damping I)^-1 grad``, layer by layer.

    ``kfac = KFAC(model, optimizer)`` once, ``kfac.step()`` between ``loss.backward()`` and
    ``optimizer.step()``; or ``KFAC(model, optimizer).attach()``, which calls it there.

    Arguments:
        model: the network, plain or wrapped by DDP, FSDP2 or tensor parallelism.
        optimizer: whose ``step()`` follows, or a list of several that share the model; the KL clip
            reads their learning rates and momenta.
        damping: what is added to the eigenvalues of the curvature: larger is more careful; a
            number, a function of the step, ``Relative()`` to the curvature itself, or
            ``LevenbergMarquardt()``, which adapts it. None is 0.01, or ``Relative(0.1)`` where the
            scale of the loss is not known and the optimizer, as Adam, divides by that of gradients.
        factor_decay: weight of the past in the running averages of the factors; a number or a
            function of the step.
        kl_clip: bound on how far a step may move the predictions, with what the optimizer's
            momentum adds; a number, a function of the step, or None for no bound.
        update_every: steps between two measurements of the curvature; an int, a function of the
            step, or one for each factor, ``{"A": ..., "G": ...}``.
        refresh_every: steps between two decompositions; as ``update_every``, or ``Drift()``.
        curvature: which Fisher; ``EmpiricalFisher()`` if it is None.
        statistics: share of a batch's samples, as a float, or their number, as an int, that the
            curvature is measured on; ``Subsample`` has a seed as well; None for all of them.
        structure: what is kept of a layer's block, or a function from a layer to that; if it is
            None, ``UnitWise()`` for norm layers and ``Kronecker()`` for all others.
        norm_damping: the damping of norm layers is multiplied by this number, or by this function
            of the step.
        inverse: how factors are inverted, ``Eigen()`` or ``Cholesky()``; the first if it is None.
        geometry: what is steepest in coordinates of the curvature: ``Euclidean()`` is the natural
            gradient, ``Spectral()`` its polar factor.
        length: of each layer's step, ``Rms()`` or ``OutputChange()``, so that the learning rate is
            the length; ``lengths.Graft()``, as long as the gradient; ``lengths.Dogleg()``, beside
            the update of the optimizer that it is attached to; None leaves it to the KL clip, and
            is ``Rms()`` where a geometry has no length of its own.
        momentum: weight of the past in a running mean of gradients that steps follow, for an
            optimizer that has none; a number or a function of the step.
        include: patterns of module names, or modules, that are preconditioned; None for all.
        exclude: patterns of module names, or modules, that keep their plain gradients.
        split: rows of the matrices that lie in one weight, by patterns of module names, such as
            ``{"*.c_attn": (d, d, d)}`` or ``Interleaved(...)``; None finds them by their names.
        max_dim: widest factor that is kept whole, of wider ones only diagonal blocks or a diagonal
            (``coverage()`` says of which); None keeps all of them whole.
        loss: how the loss between two steps adds up its samples, ``MeanLoss()`` or ``SumLoss()``;
            None finds it from the gradient at the model's output.
        distributed: what concerns several processes: who does what, and how numbers travel.
        factor_dtype: in which the running averages are kept; float32 or better if it is None.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does.
        half_products: whether activations and gradients of 16 bits, as under autocast, are
            multiplied as they are, with sums in float32; if it is None, on GPUs with tensor cores.
            True has bfloat16 multiplied so on CPUs as well, where sums of a few rows are rounded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        damping: float | Relative | Schedule | LevenbergMarquardt | None = None,
        factor_decay: float | Schedule = 0.95,
        kl_clip: float | Schedule | None = 0.01,
        update_every: Intervals = Doubling(10),  # noqa: B008 (frozen)
        refresh_every: Intervals = Doubling(100),  # noqa: B008 (frozen)
        curvature: Fisher | None = None,
        statistics: float | Subsample | None = None,
        structure: StructureOf = None,
        norm_damping: float | Schedule = 1.0,
        inverse: Inverse | None = None,
        geometry: Geometry = Euclidean(),  # noqa: B008 (frozen)
        length: Length | None = None,
        momentum: float | Schedule = 0.0,
        include: Iterable[Pattern] | Pattern | None = None,
        exclude: Iterable[Pattern] | Pattern = (),
        split: Split | None = None,
        max_dim: int | None = MAX_DIM,
        loss: MeanLoss | SumLoss | None = None,
        distributed: Distributed = Distributed(),  # noqa: B008 (frozen)
        factor_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        half_products: bool | None = None,
    ) -> None:
        self.comm: Communicator = connect(arguments.group_of(distributed))
        self.steps, optimizers = 0, listed(optimizer)
        with AllRanksAgree(self.comm) as agreed:
            arguments.check_model(model)
            arguments.check_choices(curvature, structure, inverse)
            arguments.check_groups(loss, distributed)
            arguments.check_motion(geometry, length, inverse or Eigen())
            blending.check_length(length, geometry, momentum, damping)
            finds, loss = loss is None, loss or MeanLoss()
            self.settings = KFACSettings(
                damping, factor_decay, kl_clip, norm_damping, momentum, loss, finds
            )
            motion, some = motion_of(geometry, length, momentum), subsample_of(statistics)
            arguments.check_max_dim(max_dim)
            arguments.check_tensors(factor_dtype, half_products, scaler)
            clip = None if motion.length else kl_clip
            arguments.check_optimizers(model, optimizers, clip, scaler)
            model = without_fabric(model)
            check_layout(model, self.comm.ranks)
            self.model, self.scaler = unwrapped(model), scaler
            self.curvature = curvature or EmpiricalFisher()
            structure = arguments.structure_of(structure, motion, self.curvature)
            self.update_clocks = Clocks(update_every, "update_every", drift=False)
            self.refresh_clocks = Clocks(refresh_every, "refresh_every", drift=True)
            clocks = (self.update_clocks, self.refresh_clocks)
            choice = Choice(
                structure,
                inverse or Eigen(),
                None if include is None else _patterns(include),
                _patterns(exclude),
                factor_dtype,
                loss.axis_of_model,
                arguments.regions(loss, self.curvature),
                half_products,
                loss.axes_of_modules,
                split,
                max_dim,
                motion.does_without,
                geometry.measures_in_basis,
                motion.takes_vectors,
            )
            self.blocks, self.uncovered = discover(self.model, choice)
            motion.check(self.blocks)
            alike = (self.curvature, distributed.wire_dtype, motion, some)
            agreed.compared = agreement.settings_to_compare(
                self.model, self.blocks, self.settings, clocks, *alike
            )
        world = world_of(model, self.comm, *clocks)
        self.watch, self.monitor = Stopwatch(), Monitor()
        self.statistics = Statistics(self.watch)
        sampling_rank = first_tensor_parallel_rank(model, self.comm.ranks, self.comm.rank)
        self.capture = Capture(
            self.model,
            self.blocks,
            self.statistics.add,
            taping=self.curvature.observes,
            batch_axis=loss.axis_of_model,
            chooser=chooser_of(some, self.comm, sampling_rank, self.blocks[0].device),
        )
        self.observation = Observation(self.curvature, self.capture, self.statistics, sampling_rank)
        self._look_at_outputs()
        matters = motion.is_free or not isinstance(damping, Relative)
        found = (self.settings, self.capture, scaler, self.curvature)
        self.finding = finding_of(*found, enabled=matters)
        self.compiled, self.rates = Compiled(model), LearningRates(optimizers)
        self.newcomers, self._is_last = Newcomers(*clocks), last_backward(model)
        self._assemble(Team(self.comm, self.blocks, world, distributed, motion))
        self.following = Following(self.model, self.blocks, choice)
        self.capture.on_begin, self.capture.on_restart = self._begin, self.discard
        self.detached = False
        self._warned: set[str] = set()
        self._prepare()

    @torch.no_grad()
    def step(self, samples: int | None = None) -> None:
        """Replace the gradients by preconditioned ones. Call it before ``optimizer.step()``.

        Arguments:
            samples: how many samples the loss since the last step was over, if that is not what the
                model was called with.
        """
        if samples is not None:
            arguments.check_samples(samples)
        if not self._began or self.attachment or self._left or self._watched or self._copied:
            self._warn(self.before_step())
        if self.following.changes.found():
            self._follow()
        if doubts := self.capture.finish(counted=samples is None):
            self._warn(doubts)
        if self.newcomers.born:
            self._check_newcomers()
        now = self._now(samples)
        with no_autocast(self.blocks[0].device):
            if now.updates:
                with self.watch("fold"):
                    self._warn(self.updating(now))
                if self.finding.settled:
                    weight = self.finding(samples).first
                    now = replace(now, values=self.settings.at(self.steps), gradient_weight=weight)
            with self.watch("refresh"):
                self._warn(self.refreshing(now))
            with self.watch("apply"):
                (self.blending or self.preconditioning)(now)
        self.after_step()
        self.steps += 1
        if self.monitor.open:
            self._warn(self.monitor.after_step(self))
        if self.following.pending and (self.team.alone or self.team.agreed):
            self._warn(self._rebuild())
        self._prepare()

    def _now(self, samples: int | None) -> Step:
        """This step as a value, with everything that the stages below need to know."""
        if self.detached:
            raise CaptureError(
                "step() was called after detach(), which takes K-FAC off the model for good: leave "
                "the call out, or make a new KFAC."
            )
        self.rates.read()
        self.settings.keep_scale = self.rates.keep_scale
        loss_scale, found = unscale(self.scaler, self.rates.optimizers), self.finding(samples)
        chooser = self.capture.chooser
        return Step(
            index=self.steps,
            values=self.settings.at(self.steps),
            due=self.statistics.due,
            samples=found.samples or None,
            terms=found.terms,
            passes=len(self.capture.passes),
            statistics_scale=found.scale,
            loss_scale=loss_scale,
            share=1.0 if chooser is None else entering_share(self.capture.passes),
            gradient_weight=found.first,
            votes=found.votes,
        )

    def _prepare(self) -> None:
        """Make ready for the next step: hooks are there only if it updates something."""
        keys = set() if self.detached else self.update_clocks.due(self.steps)
        due = self.update_clocks.factors(self.blocks, keys) if keys else {}
        if self.newcomers.born and not self.detached:
            self.newcomers.join(self.steps)
            due = self.newcomers.updated(due, self.steps)
        self.capture.forget()
        self._gathered = None
        if self.capture.chooser is not None:
            self.capture.chooser.begin(self.steps)
        self.statistics.begin(due)
        self.reducer.begin(due)
        self.low_rank.forget()
        self.compiled.run_eagerly(bool(due))
        counts = self.finding.prepare(updates=bool(due)) or self.gradients.are_local
        self.capture.watch(layers=bool(due), samples=bool(due) or (counts and not self.detached))

    def _follow(self) -> None:
        """The model is another one than at the last step."""
        self.following(self.capture, self.gradients, self.preconditioning)

    def _begin(self) -> None:
        """Before a forward pass that is watched: in one process new layers can still join it."""
        if self.following.changes.found():
            self._follow()
        if self.following.pending and self._may_join():
            self._warn(self._rebuild())
            self.statistics.due = self.reducer.due = self.newcomers.updated(
                {b: list(names) for b, names in self.statistics.due.items() if b in self.blocks},
                self.steps,
            )

    def _warn(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._warned:
                self._warned.add(problem)
                warnings.warn(problem, stacklevel=4)  # step() is wrapped by no_grad()

    def discard(self) -> None:
        """Forget the statistics since the last step, of a batch that will not be stepped on.

        Of several ranks all must do so."""
        self.reducer.discard(self.finding.statistics_scale())
        for block in self.blocks:
            block.take_sums()
        self._prepare()

    def detach(self) -> None:
        """Take all hooks off the model and give its compiled form back, for good."""
        self.detached = True
        if self.attachment is not None:
            self.attachment.remove()
        self.stop_watching()
        self.capture.detach()
        self.low_rank.detach()
        self.compiled.run_eagerly(False)


def _patterns(given: Iterable[Pattern] | Pattern) -> tuple[Pattern, ...]:
    return (given,) if isinstance(given, str | nn.Module) else tuple(given)
