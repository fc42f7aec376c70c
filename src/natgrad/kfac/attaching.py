"""``KFAC(model, optimizer).attach()``: K-FAC that steps, saves and loads with its optimizers.

Trainers of other libraries call ``optimizer.step()`` and nothing else. So its hooks do the rest:

- Before a step gradients are preconditioned. Whatever decides that there is a step (accumulation, a
  GradScaler that has found infinities) decides it for K-FAC, too; whatever has been done to the
  gradients until then (unscaling, clipping their norm) has been done to plain ones.
- With a closure the gradients come during the step, so it is the closure that is extended.
- Where the length is a `Dogleg`, gradients stay as they are, and weights are moved after the step.
- The state is ``"kfac"`` beside ``"state"`` and ``"param_groups"`` in that of the optimizer: a key
  that optimizers without K-FAC do not look at.

Several optimizers share the gradients of one backward pass: a *round*. The first one that steps has
all of them preconditioned, and the others of that round find that done.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.capture.hooks import Capture
from natgrad.capture.wrappers import no_autocast
from natgrad.comm import Communicator
from natgrad.comm.connecting import others_have_come
from natgrad.comm.layouts import is_sharded, local
from natgrad.errors import CaptureError, SettingError
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.attachable import check, initialises, not_attached
from natgrad.kfac.blending import Blending
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.ranks.gradients import Gradients
from natgrad.kfac.scalers import check_scaled_ranks, found_scaler, overflowed
from natgrad.kfac.watched import ADDED, Watched

KEY = "kfac"
_TWICE = (
    "kfac.step() was called again on gradients that it had preconditioned, with more added to them "
    "and no optimizer.step() between: call it once before each optimizer.step(), as "
    "KFAC(model, optimizer).attach() does, or zero_grad(set_to_none=True) in between."
)
_COPIED = (
    "This KFAC is a copy, and its model is one as well, which has no gradients: copy them together "
    "by model, optimizer, kfac = copy.deepcopy((model, optimizer, kfac)), and train the copied "
    "model."
)
_NOT_THERE = (
    "The optimizer's state has none of K-FAC, so that its curvature begins anew: load one that was "
    "saved with K-FAC attached. torch.distributed.checkpoint keeps optimizers' own entries alone; "
    "give it kfac.shards() beside them."
)
_ALONE = (
    "The optimizer's state is saved without K-FAC's, which takes all ranks: call kfac.state_dict() "
    "on all of them before, or attach(all_ranks_save=True) where all of them call "
    "optimizer.state_dict(), or save kfac.shards() beside it."
)


class Attaching:
    """The method of `natgrad.KFAC` that hangs it on its optimizers."""

    rates: LearningRates
    capture: Capture
    scaler: torch.amp.GradScaler | None
    gradients: Gradients
    preconditioning: Preconditioning
    blending: Blending | None
    attachment: "Attachment | None" = None
    comm: Communicator
    _began = False
    _copied = False
    _watched: tuple[Watched, ...] = ()  # a gradient of each, where there are several optimizers
    _left: "Mark | None" = None  # by the last step, where the optimizer's step is the user's

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy looks around at its first step."""
        self.__dict__.update(state)
        self._copied, self._watched = True, ()

    def before_step(self) -> list[str]:
        """Refuse a step that would be a second one. Returns sentences for the user."""
        if self.attachment is not None and not self.attachment.stepping:
            raise CaptureError(
                "step() was called, but KFAC is attached to its optimizer and steps before each of "
                "its steps: leave the call out, or do not attach()."
            )
        if self.attachment is None and self.blending is not None:
            raise not_attached(self.blending.length)
        if not self._began and others_have_come(self.comm):
            raise SettingError(
                "torch.distributed was initialised after KFAC was made, which knows of this "
                "process alone: make it later, after init_process_group(), Accelerator() or "
                "TrainingArguments()."
            )
        self._began = True
        copied, self._copied = self._copied, False
        if copied and not self.gradients.any_here():
            return [_COPIED]
        left, self._left = self._left, None
        if any(one.added for one in self._watched):
            return [ADDED]
        return [_TWICE] if left is not None and left.added_to else []

    def after_step(self) -> None:
        """Remember the gradients that the optimizer is to step on."""
        if self.attachment is None and len(self.rates.optimizers) == 1:
            self._left = Mark(self.rates.optimizers[0])
        self.stop_watching()
        if len(self.rates.optimizers) > 1:
            self._watched = tuple(Watched(Mark(o)) for o in self.rates.optimizers)

    def stop_watching(self) -> None:
        """Take the hooks off gradients."""
        for one in self._watched:
            one.remove()
        self._watched = ()

    def attach(self, *, all_ranks_save: bool = False) -> Self:
        """Step, save and load with the optimizer from now on, and return the KFAC itself.

        ``kfac = KFAC(model, optimizer).attach()`` is then the only line: ``step()`` is called by
        ``optimizer.step()``, and the state is part of ``optimizer.state_dict()``.

        Arguments:
            all_ranks_save: of several ranks all call ``optimizer.state_dict()`` together, as in
                Lightning and accelerate. Otherwise the state of K-FAC, which takes all of them, is
                in it only after ``kfac.state_dict()``, called by all ranks.
        """
        if self.attachment is None:
            check(self.rates.optimizers, self.preconditioning)
            if self.scaler is not None:
                check_scaled_ranks(self.gradients)
            self.attachment = Attachment(self, all_ranks_save)
        return self


class Attachment:
    """The hooks of one preconditioner on its optimizers."""

    def __init__(self, kfac: Any, all_ranks_save: bool) -> None:
        self.kfac, self.all_ranks_save = kfac, all_ranks_save
        self.rates: LearningRates = kfac.rates
        self.stepping, self._blends = False, kfac.blending is not None
        kfac.capture.expects_restarts = True  # zero_grad() is all that a trainer calls
        self._handles: list[Any] = []
        self._round: dict[int, Mark] = {}  # of this round: what K-FAC has left to each optimizer
        self._stepped: set[int] = set()
        self._register()

    def _register(self) -> None:
        first = self.rates.optimizers[0]
        for optimizer in self.rates.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            if self._blends:
                self._handles.append(optimizer.register_step_post_hook(self._after_step))
        self._handles += [
            first.register_state_dict_post_hook(self._save),
            first.register_load_state_dict_pre_hook(self._load),
        ]

    def remove(self) -> None:
        """Take the hooks off all optimizers."""
        while self._handles:
            self._handles.pop().remove()

    def follow(self) -> None:
        """The optimizers are others than before."""
        check(self.rates.optimizers, self.kfac.preconditioning)
        self.remove()
        self._round, self._stepped = {}, set()
        self._register()

    def __getstate__(self) -> dict[str, Any]:
        """Without hooks, which optimizers leave behind when they are copied."""
        kept: dict[str, Any] = {"_handles": [], "_round": {}, "_stepped": set()}
        return {**self.__dict__, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    # Steps.

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook: ``args`` and ``kwargs`` are those of ``optimizer.step``, itself included."""
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._extended(optimizer, args[1]), *args[2:]), kwargs
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": self._extended(optimizer, closure)}
        self._step(optimizer)
        return None

    def _extended(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise SettingError(
                    f"{type(optimizer).__name__} evaluates its closure several times in a step, so "
                    "that K-FAC cannot tell which gradients it steps on: do not attach(), and call "
                    "kfac.step() inside the closure where it should act."
                )
            value = closure()
            self._step(optimizer)
            return value

        return evaluate

    def _step(self, optimizer: Optimizer) -> None:
        kfac = self.kfac
        if initialises(optimizer, kfac.capture):
            return
        several = len(self.rates.optimizers) > 1
        if several and self._joins(optimizer):
            return
        # Ranks that average gradients themselves wait for each other, also for one without any.
        if not kfac.gradients.are_local and not kfac.gradients.any_here():
            return
        if overflowed(optimizer):
            kfac.discard()
            return
        self.stepping = True
        try:
            with found_scaler(kfac):
                if kfac.scaler is not None:
                    check_scaled_ranks(kfac.gradients)
                kfac.step()
        finally:
            self.stepping = False
        if getattr(optimizer, "grad_scale", None) is not None and kfac.scaler is not None:
            optimizer.grad_scale = None  # type: ignore[attr-defined]  # K-FAC has unscaled them
        if several:
            self._round = {id(o): Mark(o) for o in self.rates.optimizers}
            self._stepped = {id(optimizer)}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Where the step that is taken lies between the optimizer's own and that of K-FAC."""
        with torch.no_grad(), no_autocast(self.kfac.blocks[0].device), self.kfac.watch("apply"):
            self.kfac.blending.after(optimizer)

    def _joins(self, optimizer: Optimizer) -> bool:
        """Whether its gradients have been preconditioned, at the first step of this round."""
        mark = self._round.get(id(optimizer))
        name = type(optimizer).__name__
        if mark is not None and id(optimizer) not in self._stepped:
            if mark.same:
                self._stepped.add(id(optimizer))
                return True
            if mark.changed:
                raise SettingError(
                    f"Gradients of {name} were changed after K-FAC had preconditioned them, at the "
                    "step of another optimizer, and before its own: clip before the first of them "
                    "steps, and let all of them step after each backward pass."
                )
        left = [
            type(o).__name__
            for o in self.rates.optimizers
            if o is not optimizer
            and id(o) in self._round
            and id(o) not in self._stepped
            and self._round[id(o)].waits
        ]
        if left:
            raise SettingError(
                f"{left[0]} has not stepped on the gradients that K-FAC preconditioned for it, and "
                f"{name} steps again: let all optimizers of a KFAC step after each backward pass, "
                "or make a KFAC for the network of each."
            )
        return False

    # States.

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        kfac = self.kfac
        if kfac.team.alone or self.all_ranks_save:
            state[KEY] = kfac.state_dict()
        elif (gathered := kfac.gathered_state()) is not None:
            state[KEY] = gathered
        elif kfac.steps:
            warnings.warn(_ALONE, stacklevel=3)

    def _load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        saved: Mapping[str, Any] | None = state.pop(KEY, None)
        if saved is not None:
            self.kfac.load_state_dict(saved)
        elif state.get("state") and not self.kfac.steps:
            warnings.warn(_NOT_THERE, stacklevel=3)


class Mark:
    """The gradients of an optimizer as K-FAC has left them: the first one tells for all."""

    def __init__(self, optimizer: Optimizer) -> None:
        having = (p for g in optimizer.param_groups for p in g["params"] if p.grad is not None)
        self.parameter: nn.Parameter | None = next(having, None)
        self.gradient: Tensor | None = None if self.parameter is None else self.parameter.grad
        self.version = 0 if self.gradient is None else self.gradient._version
        self.weights = 0 if self.parameter is None else self.parameter._version

    @property
    def _there(self) -> bool:
        p = self.parameter
        return p is not None and p.grad is not None and p.grad is self.gradient

    @property
    def same(self) -> bool:
        return self._there and self.gradient is not None and self.gradient._version == self.version

    @property
    def changed(self) -> bool:
        return self._there and not self.same

    @property
    def added_to(self) -> bool:
        """As micro-batches do, whose gradients are added up before a step: the weight is still the
        same. (That of a sharded one does not say.)"""
        p = self.parameter
        return self.changed and p is not None and not is_sharded(p) and p._version == self.weights

    @property
    def waits(self) -> bool:
        """There was something to step on."""
        return self.gradient is not None and bool(local(self.gradient).any())
