"""From a stack's gradients to its step: momentum, geometry, length.

    m    <- beta m + (1 - beta) grad               running mean, by its owner
    m'    = (1 - beta) grad + beta m / weight      Nesterov's look ahead, without bias
    step  = geometry(m')                           steepest in coordinates of the curvature
    step <- step / length(step)                    if each layer has a length of its own
    step <- step length(m')                        if that is the gradient's

A length that is found beside the optimizer's update leaves all of it to `natgrad.kfac.blending`.

What is kept between steps lives in the `Block` and on the ranks that precondition it: a layer's
momentum is kept once for each copy of its inverse, and not once a rank.

A gradient that is not finite enters no average. The step of all layers is then nothing, as for the
plain preconditioner, and the averages of other layers have seen one gradient more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.damping import Damping
from natgrad.geometry import Geometry
from natgrad.geometry.base import Shape
from natgrad.inverses import Decomposed
from natgrad.lengths import Length, Rms
from natgrad.schedules import Schedule


@dataclass(frozen=True)
class Motion:
    """How gradients become steps, the same for all blocks. Without a ``length`` it is left to the
    KL clip."""

    geometry: Geometry
    length: Length | None
    has_momentum: bool

    @property
    def is_plain(self) -> bool:
        """Whether the step of a sum of gradients is the sum of their steps, and nothing is kept."""
        return self.geometry.is_linear and self.is_free and not self.has_momentum

    @property
    def is_free(self) -> bool:
        """Whether a step is as long as its geometry makes it, until all of them are there."""
        return self.length is None or self.length.of_update

    @property
    def uses_curvature(self) -> bool:
        """Otherwise none is measured."""
        by_length = self.length is not None and self.length.uses_curvature
        return self.geometry.uses_curvature or by_length

    @property
    def does_without(self) -> bool:
        """Whether a step makes sense for a block that has no curvature: not if that is the gradient
        itself, or if its length is measured by the curvature."""
        by_length = self.length is not None and self.length.uses_curvature
        return not self.geometry.is_linear and not by_length

    @property
    def takes_vectors(self) -> bool:
        """Whether a step makes sense for what is no matrix of a layer, such as a position table:
        not if it is one of singular values or eigenvectors, or measured by a layer's inputs. The
        optimizer's own is the better one there, as Adam's beside Muon's."""
        return self.geometry.is_linear and not (self.length and self.length.uses_curvature)

    def check(self, blocks: Sequence[Block]) -> None:
        """Raise CoverageError for a block that does not keep what is needed."""
        if self.length is not None:
            for block in blocks:
                self.length.check(block.name, block.structure, normalises=block.normalises)

    @property
    def names(self) -> list[str]:
        """Of what is kept."""
        return sorted(self.kept((1, 1, 1)))

    def kept(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """The shapes of what is kept for a block between steps, by name."""
        momentum = {"momentum": shape, "weight": ()} if self.has_momentum else {}
        return {**momentum, **self.geometry.kept(shape)}


def motion_of(geometry: Geometry, length: Length | None, momentum: float | Schedule) -> Motion:
    """As the user has said it. A step that is not linear in the gradient has no length of its own,
    and gets one."""
    if length is None and not geometry.is_linear:
        length = Rms()
    return Motion(geometry, length, has_momentum=callable(momentum) or momentum > 0)


class Mover:
    """Moves the gradients of one stack. ``kept``: stacked, ``[blocks, ...]``, by name."""

    def __init__(self, motion: Motion, blocks: Sequence[Block]) -> None:
        self.motion = motion
        first = blocks[0]
        self.kept: dict[str, Tensor] = {}
        for name, shape in motion.kept(first.shape).items():
            zeros = torch.zeros(shape, dtype=first.wide_dtype, device=first.device)
            own = [block.moments.get(name, zeros) for block in blocks]
            self.kept[name] = torch.stack(own) if len(own) > 1 else own[0].unsqueeze(0)
        if self.kept:
            for index, block in enumerate(blocks):
                block.keep_moments({name: both[index] for name, both in self.kept.items()})

    def __call__(
        self, block: Decomposed, raw: Tensor, damping: Damping, beta: float, out: Tensor
    ) -> None:
        """``raw [blocks, groups, rows, cols]`` becomes what the step follows, ``out`` the step."""
        flat, found = raw.flatten(0, 1), out.flatten(0, 1)
        kept = {name: both.flatten(0, 1) for name, both in self.kept.items() if both.ndim > 1}
        if self.kept:
            self._remember(block, raw, kept, beta)
        self.motion.geometry.step(block, flat, kept, damping, found)
        if not self.motion.is_free and self.motion.length is not None:
            length = self.motion.length
            squares = length.squares(block, found).view(raw.shape[:2]).mean(1)
            # A step that is nothing has no direction, and stays nothing.
            tiny = torch.finfo(squares.dtype).tiny
            factor = squares.clamp(min=tiny).rsqrt_()
            if length.of_gradient:
                factor *= length.squares(block, flat).view(raw.shape[:2]).mean(1).sqrt_()
            out *= factor.view(-1, 1, 1, 1)

    def _remember(
        self, block: Decomposed, raw: Tensor, kept: Mapping[str, Tensor], beta: float
    ) -> None:
        fits = torch.isfinite(raw.flatten(1).sum(1))
        clean = raw
        if not raw.is_cpu or not bool(fits.all()):  # a GPU is not waited for
            clean = torch.where(fits.view(-1, 1, 1, 1), raw, torch.zeros_like(raw))
        each = fits.repeat_interleave(raw.shape[1])
        self.motion.geometry.observe(block, clean.flatten(0, 1), each, kept)
        if self.motion.has_momentum:
            momentum, weight = self.kept["momentum"], self.kept["weight"]
            gain = fits.to(raw.dtype) * (1 - beta)
            if clean is raw:
                momentum.lerp_(clean, 1 - beta)
            else:
                momentum.lerp_(clean, gain.view(-1, 1, 1, 1).expand_as(momentum))
            weight.lerp_(torch.ones_like(weight), gain)
            share = (beta / weight.clamp(min=torch.finfo(raw.dtype).tiny)).view(-1, 1, 1, 1)
            raw.mul_(1 - beta).addcmul_(momentum, share)
