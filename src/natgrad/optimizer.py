"""Natural gradient training in one line: ``optimizer = natgrad.NaturalMuon(model)``.

The engine is `natgrad.KFAC` with spectral geometry: each layer's momentum is whitened by its Fisher
factors, replaced by its polar factor, brought back and given a root mean square of 1. So the
learning rate is how far an entry of a weight moves in a step, in every layer and network, and
nothing depends on the scale of the loss: sums and means, token losses, a `GradScaler`'s factor and
the number of micro-batches all cancel.

What has no block (norm layers, and what `KFAC` does not cover) is stepped by AdamW at the same
learning rate, whose steps are as long.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from natgrad.capture.discovery import Choice, Pattern, StructureOf
from natgrad.checks import FRACTION, NOT_NEGATIVE, POSITIVE, number
from natgrad.curvature.fisher import Fisher
from natgrad.curvature.subsample import Subsample
from natgrad.damping import Relative
from natgrad.errors import SettingError
from natgrad.geometry import Geometry, Spectral
from natgrad.inverses import Inverse
from natgrad.kfac.attachable import initialises
from natgrad.kfac.attaching import KEY
from natgrad.kfac.clocks import Intervals
from natgrad.kfac.ranks.distributed import Distributed
from natgrad.kfac.scalers import found_scaler
from natgrad.layers import Elementwise, layers_of
from natgrad.layers.row_parts import Split
from natgrad.lengths import Length, Rms
from natgrad.loss_scale import MeanLoss, SumLoss
from natgrad.preconditioner import KFAC
from natgrad.schedules import Schedule
from natgrad.structures import MAX_DIM

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class NaturalMuon(Optimizer):
    """Steepest descent under the spectral norm, in coordinates whitened by the Fisher factors.

    A ``torch.optim.Optimizer`` like any other: schedulers, ``GradScaler``, gradient clipping,
    accumulation, closures and ``state_dict`` work as they do with AdamW.

    Arguments:
        model: the network, plain or wrapped by DDP, FSDP2 or tensor parallelism.
        lr: root mean square of a step's change of an entry.
        params: parameters, or groups of them as for any optimizer, each with its own ``lr`` and
            ``weight_decay`` if it says so; if it is None, all parameters of the model, also those
            that it gets later, in the first group.
        momentum: weight of the past in the running mean of gradients.
        weight_decay: decoupled: a weight shrinks by ``lr * weight_decay`` of itself in a step.
        betas: weights of the past in AdamW's moments, for what has no block.
        eps: what AdamW adds to the root of its second moments.
        geometry: what is steepest; ``Spectral(power=0)`` is Muon and measures no curvature.
        length: of each layer's step; the learning rate is in its units.
        damping: of the curvature; ``Relative()`` to itself, a number, or a function of the step.
        factor_decay: weight of the past in the running averages of the factors; a number or a
            function of the step.
        update_every: steps between two measurements of the curvature.
        refresh_every: steps between two decompositions.
        curvature: which Fisher; the empirical one if it is None.
        statistics: share of a batch's samples, as a float, or their number, as an int, that the
            curvature is measured on; ``Subsample`` has a seed as well; None for all of them.
        structure: what is kept of a layer's block; ``Kronecker()`` if it is None.
        inverse: how factors are decomposed; ``Eigen()`` if it is None.
        include: patterns of module names, or modules, that have a block; None for all but norm
            layers.
        exclude: patterns of module names, or modules, that are left to AdamW.
        split: rows of the matrices that lie in one weight, by patterns of module names, or
            ``Interleaved(...)``, and ``Experts(...)`` by those of parameters; None finds fused
            projections (query, key and value; gate and up) by their usual names.
        max_dim: widest factor of a layer that is kept whole; of a wider one diagonal blocks or the
            diagonal. None keeps all of them whole.
        loss: which axis of the batch the samples are on, and terms that differ between layers; None
            finds what matters of it.
        distributed: what concerns several processes: who does what, and how numbers travel.
        factor_dtype: in which the running averages are kept; float32 or better if it is None.
        scaler: the ``torch.amp.GradScaler`` that scales the loss; the one that steps is found if it
            is None.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        *,
        params: Params | None = None,
        momentum: float | Schedule = 0.9,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        geometry: Geometry = Spectral(),  # noqa: B008 (frozen)
        length: Length = Rms(),  # noqa: B008 (frozen)
        damping: float | Relative | Schedule = Relative(0.1),  # noqa: B008 (frozen)
        factor_decay: float | Schedule = 0.95,
        update_every: Intervals = 4,
        refresh_every: Intervals = 20,
        curvature: Fisher | None = None,
        statistics: float | Subsample | None = None,
        structure: StructureOf = None,
        inverse: Inverse | None = None,
        include: Iterable[Pattern] | Pattern | None = None,
        exclude: Iterable[Pattern] | Pattern = (),
        split: Split | None = None,
        max_dim: int | None = MAX_DIM,
        loss: MeanLoss | SumLoss | None = None,
        distributed: Distributed = Distributed(),  # noqa: B008 (frozen)
        factor_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        number(lr, "lr", NOT_NEGATIVE)
        number(weight_decay, "weight_decay", NOT_NEGATIVE)
        number(eps, "eps", POSITIVE)
        for beta in betas:
            number(beta, "betas", FRACTION)
        if isinstance(length, Length) and length.of_update:
            raise SettingError(
                f"length={length!r} adds to the update of another optimizer, and NaturalMuon is "
                "one itself: pass natgrad.Rms(), or KFAC(model, optimizer, length=...).attach()."
            )
        given = list(model.parameters()) if params is None else params
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(given, defaults)
        self.kfac = KFAC(
            model,
            self,
            damping=damping,
            factor_decay=factor_decay,
            kl_clip=None,
            update_every=update_every,
            refresh_every=refresh_every,
            curvature=curvature,
            statistics=statistics,
            structure=structure,
            inverse=inverse,
            geometry=geometry,
            length=length,
            momentum=momentum,
            include=include,
            exclude=[*_patterns(exclude), *_norms(model)],
            split=split,
            max_dim=max_dim,
            loss=loss,
            distributed=distributed,
            factor_dtype=factor_dtype,
            scaler=scaler,
        )
        # An optimizer is told by zero_grad() alone that a batch does not count.
        self.kfac.capture.expects_restarts = True
        self.kfac.following.choose = self._without_norms
        if params is None:
            self.kfac.following.on_change = self._follow
        # A GradScaler then calls step() also where gradients are not finite: ranks that average
        # them by themselves must step together, and see together that they do not.
        self._step_supports_amp_scaling = self.kfac.gradients.are_local

    def _without_norms(self, choice: Choice) -> Choice:
        """Of the model as it is now; its norm layers are AdamW's."""
        return replace(choice, exclude=(*choice.exclude, *_norms(self.kfac.model)))

    def _follow(self) -> None:
        """Have the parameters that the model has now, in its order, as if made for it anew; AdamW's
        state of those that are still there stays."""
        first, *others = self.param_groups
        apart = {id(p) for group in others for p in group["params"]}
        first["params"] = [p for p in self.kfac.model.parameters() if id(p) not in apart]
        held = {p for group in self.param_groups for p in group["params"]}
        for p in [p for p in self.state if p not in held]:
            del self.state[p]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step along the gradients that are there.

        Arguments:
            closure: computes the loss and its gradients anew, once; its value is returned.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        if initialises(self, self.kfac.capture):
            covered = {id(p) for block in self.kfac.blocks for p in block.parameters}
            for group in self.param_groups:
                self._update(group, covered)
            return value
        with found_scaler(self.kfac):
            self.kfac.step()
        if self.kfac.preconditioning.moved:
            natural = {id(p) for block in self.kfac.gradients.present for p in block.parameters}
            for group in self.param_groups:
                self._update(group, natural)
        return value

    def _update(self, group: dict[str, Any], natural: set[int]) -> None:
        lr = float(group["lr"])
        there = [p for p in group["params"] if p.grad is not None]
        stepped = [p for p in there if id(p) in natural]
        if stepped:
            self._count(stepped)
            if group["weight_decay"]:
                torch._foreach_mul_(stepped, 1 - lr * group["weight_decay"])
            torch._foreach_add_(stepped, [p.grad for p in stepped], alpha=-lr)
        if rest := [p for p in there if id(p) not in natural]:
            self._adamw(group, lr, rest)

    def _count(self, parameters: Sequence[nn.Parameter]) -> None:
        """Of all: torch.distributed.checkpoint loads no parameter that has no state at all. Steps
        are those of AdamW."""
        for p in parameters:
            if p not in self.state:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32)

    def _adamw(self, group: dict[str, Any], lr: float, parameters: Sequence[nn.Parameter]) -> None:
        self._count(parameters)
        for p in parameters:
            if "exp_avg" not in (state := self.state[p]):
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        states = [self.state[p] for p in parameters]
        adamw(
            list(parameters),
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of AdamW as other optimizers have it, and that of `KFAC` under ``"kfac"``, the
        same at any number of processes, of which all must call it together."""
        gathered = self.kfac.gathered_state()
        kfac = self.kfac.state_dict() if gathered is None else gathered
        return {**super().state_dict(), KEY: kfac}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, on any number of processes.

        Arguments:
            state_dict: what ``state_dict()`` has returned.
        """
        if KEY in state_dict:
            self.kfac.load_state_dict(state_dict[KEY])
        elif not (self.kfac.steps and _has_settings(state_dict, self.defaults)):
            raise SettingError(
                f"The state has {', '.join(map(str, state_dict))} but no kfac, so it is of another "
                "optimizer: pass what NaturalMuon.state_dict() has returned. With "
                "torch.distributed.checkpoint, load optimizer.kfac.shards() before it."
            )
        own = {name: value for name, value in state_dict.items() if name != KEY}
        super().load_state_dict(own)

    def __getstate__(self) -> dict[str, Any]:
        """All of it: a copy goes on as the original would."""
        return self.__dict__.copy()


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if _normalises(module, name)]


def _normalises(module: nn.Module, name: str) -> bool:
    layers = layers_of(name, module)
    if isinstance(layers, str) or not layers:  # none of a computed weight that is frozen as yet
        return False
    return all(isinstance(each, Elementwise) for each in layers)


def _has_settings(state: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether groups of a state have the settings of this optimizer, and no others."""
    return all({*defaults, "params"} == set(group) for group in state["param_groups"])


def _patterns(given: Iterable[Pattern] | Pattern) -> list[Pattern]:
    return [given] if isinstance(given, str | nn.Module) else list(given)
