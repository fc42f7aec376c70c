"""The optimizer's update and the natural gradient, brought together after ``optimizer.step()``.

    before the step    weights are remembered; gradients stay plain, and with them all that the
                       optimizer keeps
    optimizer.step()   u
    after it           the mean of gradients that u was made of -> preconditioned -> d
                       weights <- weights + b d, with b of `natgrad.lengths.Dogleg`

The mean is the optimizer's own: Adam's first moment, SGD's momentum, or the gradient itself where
there is neither. So nothing is kept between steps, nothing is saved, and what was resumed goes on
as it was. While it is preconditioned it stands in ``.grad``, where the ranks that need it look.

Each rank adds what it holds; where weights are cut, inner products are added up over all ranks, and
a number that several hold counts once. Ranks that average gradients in K-FAC's own step would have
to do so before the optimizer's: they are refused, as are several optimizers, weights of 16 bits, in
which a difference of two steps is rounded away, and optimizers whose next weights are not these
weights and an update, but those of a copy that they keep.

For as long as a step lasts it takes three tensors as large as the weights that it is about.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer, RAdam

from natgrad.capture.blocks import Block
from natgrad.comm.layouts import box_of, local
from natgrad.errors import SettingError
from natgrad.geometry import Euclidean, Geometry
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.ranks.block_specs import view_of
from natgrad.kfac.step import Step
from natgrad.lengths import Dogleg, Length
from natgrad.lengths.dogleg import Legs
from natgrad.schedules import LevenbergMarquardt

Group = Mapping[str, Any]
_FIRST_MOMENTS = (Adam, Adamax, NAdam, RAdam)  # AdamW is an Adam
_NEAR = 10.0  # updates between weights and a copy of them, at the first step
_FAR = 100.0  # updates in a weight, so that what is near it is near it by no chance


class Blending:
    """Takes the place of `Preconditioning` where the length is a `Dogleg`. ``waiting``: the step
    and the weights before it, until the optimizer has stepped."""

    def __init__(self, preconditioning: Preconditioning, length: Dogleg) -> None:
        self.preconditioning, self.length = preconditioning, length
        self.waiting: tuple[Step, dict[nn.Parameter, Tensor]] | None = None
        self._looked = False
        self._added: tuple[list[str], Tensor] | None = None

    def __call__(self, step: Step) -> None:
        """In the place of preconditioning."""
        held = dict.fromkeys(p for block in self._blocks() for p in block.parameters)
        self.waiting = step, {p: local(p.detach()).clone() for p in held}

    def take_over(self, other: "Blending") -> None:
        """Go on from one with other blocks, which the optimizer's step still waits for."""
        self.waiting, self._looked = other.waiting, other._looked

    def after(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            return
        step, updates = waiting
        for p, before in updates.items():
            torch.sub(local(p.detach()), before, out=before)  # u from here on
        if not self._looked:
            self._looked = True
            _check_copies(optimizer, updates)
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        plain = {p: p.grad for p in updates}
        means = {p: mean_of(optimizer, groups.get(p, {}), p) for p in updates}
        try:
            for p, mean in means.items():
                p.grad = mean if mean is None else mean.clone()
            self.preconditioning(step)
            self._add(updates, means)
        finally:
            for p, gradient in plain.items():
                p.grad = gradient

    @property
    def added(self) -> dict[str, float]:
        """How much of the natural gradient the last step has added, by block: ``b``."""
        names, added = self._added or ([], torch.zeros(0))
        return dict(zip(names, added.tolist(), strict=True))

    def _blocks(self) -> list[Block]:
        team = self.preconditioning.team
        return [b for b in team.blocks.values() if b.ready and b.has_gradient]

    def _add(
        self, updates: Mapping[nn.Parameter, Tensor], means: Mapping[nn.Parameter, Tensor | None]
    ) -> None:
        """Move the weights, from what was preconditioned and stands in ``.grad`` now."""
        blocks = [b for b in self._blocks() if all(p in updates for p in b.parameters)]
        if not blocks:
            return
        parts = [self._parts(block) for block in blocks]
        legs = self._legs(parts, updates, means)
        added = self.length.second_leg(legs)
        self._added = [block.name for block in blocks], added
        for own, b in zip(parts, added, strict=True):
            for part in own:
                assert part.parameter.grad is not None
                weight = part.of(part.parameter.detach())
                weight.sub_(part.of(part.parameter.grad) * b.to(weight.dtype))

    def _legs(
        self,
        parts: Sequence[Sequence["Part"]],
        updates: Mapping[nn.Parameter, Tensor],
        means: Mapping[nn.Parameter, Tensor | None],
    ) -> Legs:
        """Over all ranks. The direction ``d`` is minus what stands in ``.grad``."""
        team, gradients = self.preconditioning.team, self.preconditioning.gradients
        most = max(part.ball for own in parts for part in own) + 1
        found = torch.zeros(len(parts), 2 + 3 * most, dtype=torch.float64, device=team.device)
        cut = bool(gradients.sharded) and not team.alone
        for row, own in zip(found, parts, strict=True):
            for part in own:
                p = part.parameter
                mean, natural = means[p], p.grad
                assert mean is not None
                assert natural is not None
                g, u, d = (part.of(t).reshape(-1) for t in (mean, updates[p], natural))
                pairs = ((g, u), (g, d), (u, u), (u, d), (d, d))
                products = torch.stack([torch.dot(*pair) for pair in pairs]).to(row)
                products *= products.new_tensor([-1, 1, 1, -1, 1]) * (part.share if cut else 1.0)
                row[:2] += products[:2]
                row[2 + part.ball :: most] += products[2:]
        if cut:
            found = team.total(found.flatten()).view_as(found).to(found.device)
        both, balls = found[:, :2], found[:, 2:].unflatten(1, (3, most))
        return Legs(both[:, 0], both[:, 1], balls[:, 0], balls[:, 1], balls[:, 2])

    def _parts(self, block: Block) -> list["Part"]:
        """What this rank holds of the block's parameters."""
        team, rates = self.preconditioning.team, self.preconditioning.rates
        balls = _balls(block, rates)
        found = []
        for piece in team.plan.block[block.name].pieces:
            if team.rank in piece.holders:
                p = block.parameters[piece.parameter]
                share = 1.0 if piece.chunk is not None else 1.0 / len(piece.holders)
                box, by = piece.part(team.rank), block.layers[0].unfolding(p)
                found.append(Part(p, box, by, balls[piece.parameter], share))
        return found


class Part:
    """A box of a parameter that this rank holds and that belongs to a block. ``ball``: the number
    of its learning rate among those of the block; ``share``: one of so many ranks that hold it."""

    def __init__(
        self,
        parameter: nn.Parameter,
        box: tuple[tuple[int, int], ...],
        unfolding: tuple[int, int] | None,
        ball: int,
        share: float,
    ) -> None:
        self.parameter, self.ball, self.share = parameter, ball, share
        self._box, self._unfolding = box, unfolding
        self._offsets = [first for first, _ in box_of(parameter)]

    def of(self, t: Tensor) -> Tensor:
        """Of a tensor that lies as the parameter does, as a view."""
        return view_of(local(t), self._box, self._offsets, self._unfolding)


def mean_of(optimizer: Optimizer, group: Group, p: nn.Parameter) -> Tensor | None:
    """The mean of gradients that an update of ``p`` follows, after that; a new tensor. A sum of
    SGD's is divided by what it adds up to in the end, so that its first means are short."""
    state = optimizer.state.get(p, {})
    if isinstance(optimizer, _FIRST_MOMENTS) and "exp_avg" in state:
        weight = 1.0 - float(group["betas"][0]) ** float(state["step"])
        return (state["exp_avg"] / weight).to(p.dtype) if weight > 0 else None
    if isinstance(optimizer, SGD) and state.get("momentum_buffer") is not None:
        taken = 1.0 - float(group["dampening"])
        if taken > 0:
            mean: Tensor = state["momentum_buffer"] * ((1.0 - float(group["momentum"])) / taken)
            return mean.to(p.dtype)
    if p.grad is None:
        return None
    return p.grad.neg() if group.get("maximize") else p.grad.clone()


def _balls(block: Block, rates: LearningRates) -> list[int]:
    """Of each parameter the number of its learning rate among those of the block."""
    known: dict[float, int] = {}
    return [known.setdefault(rates.of(p), len(known)) for p in block.parameters]


def check_length(length: Length | None, geometry: Geometry, momentum: Any, damping: Any) -> None:
    """Whether what else was chosen goes together with a step beside the optimizer's."""
    if length is None or not length.of_update:
        return
    if not isinstance(geometry, Euclidean) or geometry.power != 1:
        raise SettingError(
            f"length={length!r} goes towards the minimum of the quadratic model, which "
            f"{geometry!r} does not: leave geometry out, or pass natgrad.geometry.Euclidean()."
        )
    if callable(momentum) or momentum:
        raise SettingError(
            f"length={length!r} follows the mean of gradients that the optimizer has, and "
            f"momentum={momentum!r} is one more: leave it out."
        )
    if isinstance(damping, LevenbergMarquardt):
        raise SettingError(
            f"length={length!r} moves weights after optimizer.step(), and damping={damping!r} "
            "compares the loss with what was predicted before: pass a number or natgrad.Relative()."
        )


def _check_copies(optimizer: Optimizer, updates: Mapping[nn.Parameter, Tensor]) -> None:
    """Raise for an optimizer that keeps weights: among what it keeps of a parameter is something
    that lies within a few updates of it, though the parameter is hundreds of them long. Of those
    that are known to keep none a gradient may look like that."""
    if isinstance(optimizer, (SGD, *_FIRST_MOMENTS)):
        return
    for p, update in updates.items():
        weight, moved = local(p.detach()), float(update.norm())
        if not 0 < _FAR * moved < float(weight.norm()):
            continue
        for name, kept in optimizer.state.get(p, {}).items():
            if not isinstance(kept, Tensor) or local(kept).shape != weight.shape:
                continue
            if float((local(kept).to(weight) - weight).norm()) <= _NEAR * moved:
                raise SettingError(
                    f"{type(optimizer).__name__} keeps a copy of the weights ({name!r}), which "
                    "would not know what Dogleg() adds to them: leave length out, or take an "
                    "optimizer that keeps none."
                )
