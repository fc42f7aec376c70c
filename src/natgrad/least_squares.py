"""Training by squared residuals alone: K-FAC says where, the exact quadratic model how far.

    L = Σ_t w_t mean(r_t²)      G = Σ_t 2 w_t / N_t J_tᵀ J_t
    D = -(F + γI)⁻¹ ∇L          F ≈ G by K-FAC
    d = α D + μ d_last          α, μ = argmin <∇L, d> + 1/2 <d, (G + γI) d>

A learning rate of 1 is too long where the blocks of ``F`` know nothing of each other, and one that
is small enough for the worst step is too small for all others. But ``G d`` itself is known: of two
directions ``J D`` and ``J d_last`` are two products with the residuals' Jacobian, and what is left
is a system of two equations (Martens & Grosse 2015, sec. 6.4 and 7; for physics-informed networks
Dangel et al. 2024). On a quadratic this is a method of conjugate gradients with K-FAC as its
preconditioner.

A step that does not lower the loss is halved until it does, or not taken. How much of what the
model has promised came true moves the damping (`natgrad.schedules.LevenbergMarquardt`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.capture.discovery import Pattern, StructureOf
from natgrad.curvature import GaussNewton
from natgrad.damping import Relative
from natgrad.errors import SettingError
from natgrad.inverses import Inverse
from natgrad.kfac.attaching import KEY
from natgrad.kfac.clocks import Intervals
from natgrad.preconditioner import KFAC
from natgrad.schedules import LevenbergMarquardt, Schedule

HALVINGS = 10  # before a step is given up

Residuals = Tensor | Sequence[Tensor]


class LeastSquares(Optimizer):
    """K-FAC for a loss of squared residuals, without a learning rate or a momentum to choose.

    For physics-informed networks and other regressions on all points at once, best in float64. In
    one process. ``optimizer.kfac`` is the `natgrad.KFAC` inside.

    Arguments:
        model: the network, which the residuals may differentiate by its inputs, to any order.
        weights: of the terms of the loss, ``Σ_t w_t mean(r_t²)``; None is 1 for each.
        damping: what is added to the curvature: one that adapts, a number, or a function of the
            step.
        factor_decay: weight of the past in the running averages of the factors; a number or a
            function of the step.
        update_every: steps between two measurements of the curvature.
        refresh_every: steps between two decompositions.
        structure: what is kept of a layer's block; ``Kronecker(sharing="traces")`` if it is None.
        inverse: how factors are decomposed; ``Eigen()`` if it is None.
        include: patterns of module names, or modules, that have a block; None for all.
        exclude: patterns of module names, or modules, whose gradients stay plain in ``D``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: Sequence[float] | None = None,
        damping: float | Schedule | LevenbergMarquardt = LevenbergMarquardt(  # noqa: B008 (frozen)
            start=1e-3, every=1, decay=0.8, low=1e-14
        ),
        factor_decay: float | Schedule = 0.5,
        update_every: Intervals = 1,
        refresh_every: Intervals = 1,
        structure: StructureOf = None,
        inverse: Inverse | None = None,
        include: Iterable[Pattern] | Pattern | None = None,
        exclude: Iterable[Pattern] | Pattern = (),
    ) -> None:
        if isinstance(damping, Relative):
            raise SettingError(
                f"LeastSquares() got damping={damping!r}, which differs from block to block, but "
                "needs one number for the quadratic model of all: pass a number, a function of the "
                "step, or natgrad.schedules.LevenbergMarquardt()."
            )
        super().__init__(list(model.parameters()), {})
        self.weights = weights
        self.kfac = KFAC(
            model,
            curvature=GaussNewton(),
            damping=damping,
            factor_decay=factor_decay,
            kl_clip=None,
            update_every=update_every,
            refresh_every=refresh_every,
            structure=structure,
            inverse=inverse,
            include=include,
            exclude=exclude,
        )
        # Of what is computed between two steps, such as derivatives for a plot, nothing counts.
        self.kfac.capture.ignores = True
        if not self.kfac.team.alone:
            self.kfac.detach()
            raise SettingError(
                f"LeastSquares() is for one process, but there are {self.kfac.team.size}: use "
                "natgrad.KFAC with curvature=natgrad.curvature.GaussNewton() and residuals()."
            )

    def _follow(self) -> None:
        """Have the parameters that the model has now: those that were replaced or added, too."""
        first, *others = self.param_groups
        apart = {id(p) for group in others for p in group["params"]}
        first["params"] = [p for p in self.kfac.model.parameters() if id(p) not in apart]
        held = {p for group in self.param_groups for p in group["params"]}
        for p in [p for p in self.state if p not in held]:
            del self.state[p]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the loss before it.

        Arguments:
            closure: computes the residuals, a tensor or several, ``[n, …]`` of ``n`` points each,
                with their graph. Called twice or more in a step, and must take the same points.
        """
        if closure is None:
            raise SettingError(
                "LeastSquares.step() got no closure: pass a function that computes the residuals."
            )
        damping = self.kfac.settings.at(self.kfac.steps).damping
        assert not isinstance(damping, Relative)
        loss, terms, own, gradient = self._measure(closure)
        if not self.kfac.preconditioning.moved:
            return loss
        directions = [[-p.grad for p in own if p.grad is not None]]
        if all("last" in self.state[p] for p in own):
            directions.append([self.state[p]["last"] for p in own])
        images = products(terms, own, directions)
        del terms  # and their graph
        paths = torch.stack([flat(d) for d in directions])
        shares, promised = minimum(images, paths, gradient, float(damping))
        change = (shares @ paths).split([p.numel() for p in own])
        kept, ratio = self._take(own, change, closure, float(loss), promised)
        rule = self.kfac.settings.damping
        if isinstance(rule, LevenbergMarquardt) and (self.kfac.steps - 1) % rule.every == 0:
            self.kfac.settings.adapted = rule.next(self.kfac.settings.adapted, ratio)
        for p, each in zip(own, change, strict=True):
            if kept:
                self.state[p]["last"] = kept * each.view_as(p)
            else:
                self.state[p].pop("last", None)
        return loss

    def _measure(
        self, closure: Callable[[], Any]
    ) -> tuple[Tensor, list[Tensor], list[nn.Parameter], Tensor]:
        """The loss, its weighted residuals with their graph, the parameters that they depend on,
        and the gradient as it was before K-FAC has preconditioned it."""
        if self.kfac.following.changes.found():
            self._follow()
        self.zero_grad()
        self.kfac.capture.ignores = False
        try:
            with torch.enable_grad():
                residuals = _listed(closure())
                loss = self.kfac.residuals(*residuals, weights=self.weights)
                terms = weighted(residuals, self.weights)
                loss.backward(retain_graph=True)
            own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            gradient = flat([p.grad for p in own if p.grad is not None])
            self.kfac.step()
        finally:
            self.kfac.capture.ignores = True
        self.kfac.prediction.remembered = []  # its model is K-FAC's; ours is exact
        return loss.detach(), terms, own, gradient

    def _take(
        self,
        own: Sequence[Tensor],
        change: Sequence[Tensor],
        closure: Callable[[], Any],
        before: float,
        promised: float,
    ) -> tuple[float, float]:
        """Add as much of the change as lowers the loss: that share, and the actual change of the
        loss over the promised one, for all of it."""
        old, share, ratio = [p.clone() for p in own], 1.0, float("nan")
        for trial in range(HALVINGS):
            for p, start, each in zip(own, old, change, strict=True):
                p.copy_(start + share * each.view_as(p))
            with torch.enable_grad():
                residuals = _listed(closure())
            after = float(sum(r.square().sum() / 2 for r in weighted(residuals, self.weights)))
            if trial == 0 and promised:
                ratio = (after - before) / promised
            if after < before:
                return share, ratio
            share /= 2
        for p, start in zip(own, old, strict=True):
            p.copy_(start)
        return 0.0, ratio

    def state_dict(self) -> dict[str, Any]:
        """The last step, and the state of `KFAC` under ``"kfac"``."""
        return {**super().state_dict(), KEY: self.kfac.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Arguments:
            state_dict: what ``state_dict()`` has returned.
        """
        if KEY not in state_dict:
            raise SettingError(
                f"The state has {', '.join(map(str, state_dict))} but no kfac, so it is of another "
                "optimizer: pass what LeastSquares.state_dict() has returned."
            )
        self.kfac.load_state_dict(state_dict[KEY])
        super().load_state_dict({name: v for name, v in state_dict.items() if name != KEY})

    def __getstate__(self) -> dict[str, Any]:
        """All of it: a copy goes on as the original would."""
        return self.__dict__.copy()


def weighted(residuals: Sequence[Tensor], weights: Sequence[float] | None) -> list[Tensor]:
    """``√(2 w_t / N_t) r_t``: half of their squares is the loss, and their Jacobian is ``√G``.

    Arguments:
        residuals: one for each term.
        weights: one for each; None is 1.
    """
    given = [1.0] * len(residuals) if weights is None else weights
    return [r * (2 * w / r.numel()) ** 0.5 for w, r in zip(given, residuals, strict=True)]


def products(
    terms: Sequence[Tensor], own: Sequence[Tensor], directions: Sequence[Sequence[Tensor]]
) -> Tensor:
    """``J d [directions, entries of all terms]``. Backward passes are linear in what is sent back,
    so that differentiated by it they are the products of the other side.

    Arguments:
        terms: functions of the parameters, with their graph.
        own: the parameters.
        directions: a tensor for each parameter, of each direction.
    """
    with torch.enable_grad():
        sent = [torch.zeros_like(r, requires_grad=True) for r in terms]
        back = torch.autograd.grad(terms, own, sent, create_graph=True, allow_unused=True)
        used = [i for i, g in enumerate(back) if g is not None]
        found = [
            torch.autograd.grad(
                [back[i] for i in used],
                sent,
                [direction[i] for i in used],
                retain_graph=True,
                materialize_grads=True,
            )
            for direction in directions
        ]
    return torch.stack([flat(images) for images in found])


def minimum(
    images: Tensor, paths: Tensor, gradient: Tensor, damping: float
) -> tuple[Tensor, float]:
    """The share of each direction where the quadratic model is smallest, and its change there.

    Arguments:
        images: ``J d [k, entries]`` of all directions.
        paths: the directions themselves, ``[k, parameters]``.
        gradient: ``[parameters]``.
        damping: ``γ``.
    """
    curved = (images @ images.mT + damping * paths @ paths.mT).double()
    slope = (paths @ gradient).double()
    # In directions of length 1, so that the older one, often shorter by far, is not rounded away.
    length = curved.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    near = 10 * torch.finfo(paths.dtype).eps  # directions that cannot be told apart
    inverse = torch.linalg.pinv(curved / length / length[:, None], rtol=near, hermitian=True)
    shares = -(inverse @ (slope / length)) / length
    change = slope @ shares + shares @ curved @ shares / 2
    return shares.to(paths.dtype), float(change)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries, one after the other.

    Arguments:
        tensors: of any shapes.
    """
    return torch.cat([t.flatten() for t in tensors])


def _listed(residuals: Residuals) -> list[Tensor]:
    return [residuals] if isinstance(residuals, Tensor) else list(residuals)
