"""As far as the optimizer's own update, and from there along the natural gradient.

    s = u + b d,    0 <= b,    |s| <= most |u|,    d = -(F + damping I)^-1 g

``u`` is what the optimizer has made of plain gradients, as if nobody looked; ``g`` is the mean of
gradients that it follows itself, momentum included. ``b`` makes the quadratic model smallest,

    m(s) = <g, s> + 1/2 <s, (F + damping I) s>

As ``(F + damping I) d = -g``, its slope and its curvature along the second leg are inner products
that are there already, and nothing is multiplied by ``F``:

    m(u + b d) = m(u) - b (N - U) + 1/2 b^2 N,    U = -<g, u>,    N = -<g, d>
    b = min(max(0, 1 - U / N), where the leg leaves the ball)

The bend is that of the dogleg (Powell 1970): one leg that is known to be good, one towards the
minimum of the model, and a ball in which that model is believed. His first leg ends at the minimum
along the gradient, and his second one goes back on it as it goes on, ``u + t (d - u)``. Here ``u``
has a length that somebody has tuned, and ``F`` one that nobody answers for: an empirical Fisher is
wrong by the square of the loss's scale, and Martens & Grosse (2015, sec. 6.4) measure each step
with an exact one for that reason. So ``u`` is kept whole, weight decay included, and the model may
only add to it:

- To first order the step takes at least as much off the loss as ``u``: ``U + b N``.
- ``F`` too large: ``N`` is small and ``b`` is 0, which is the optimizer alone. Too small: the ball.
- The ball is a multiple of ``u``, so that schedules, warm-up and a rate of 0 mean what they meant.

``|.|`` is over a layer, or over those of its parameters that have the same learning rate: the leg
ends where it leaves the first of their balls, since no rate may be exceeded for the sake of another
one, and one that is 0 does not move.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.checks import AT_LEAST_ONE, check_numbers
from natgrad.inverses import Decomposed
from natgrad.lengths.base import Length


class Legs(NamedTuple):
    """Inner products of both legs, of ``n`` layers with at most ``k`` learning rates each.

    Arguments:
        update_gain: ``U [n]``, what the update takes off the loss to first order.
        natural_gain: ``N [n]``, what the whole natural gradient does.
        update: ``|u|^2 [n, k]``, 0 for a rate that is not there.
        both: ``<u, d> [n, k]``.
        natural: ``|d|^2 [n, k]``.
    """

    update_gain: Tensor
    natural_gain: Tensor
    update: Tensor
    both: Tensor
    natural: Tensor


@dataclass(frozen=True)
class Dogleg(Length):
    """The optimizer's own update, lengthened along the natural gradient as far as the quadratic
    model says, within a multiple of that update; with ``KFAC(model, optimizer).attach()``.

    Arguments:
        most: length of a layer's step, relative to what the optimizer does without K-FAC.
    """

    most: float = 2.0

    def __post_init__(self) -> None:
        check_numbers(self, most=AT_LEAST_ONE)

    @property
    def of_update(self) -> bool:
        return True

    def squares(self, block: Decomposed, step: Tensor) -> Tensor:
        return step.square().sum((1, 2))

    def second_leg(self, legs: Legs) -> Tensor:
        """How much of the natural gradient is added to each update, ``b [n]``.

        Arguments:
            legs: inner products of both, in the norm of `squares`.
        """
        tiny = torch.finfo(legs.natural_gain.dtype).tiny
        wanted = 1 - legs.update_gain / legs.natural_gain.clamp(min=tiny)
        wanted = torch.where(legs.natural_gain > 0, wanted, torch.zeros_like(wanted))
        # The positive root of |d|^2 b^2 + 2 <u, d> b = room, without a difference of equal numbers.
        room = (self.most**2 - 1) * legs.update
        root = (legs.both.square() + legs.natural * room).sqrt()
        ahead = room / (legs.both + root).clamp(min=tiny)
        behind = (root - legs.both) / legs.natural.clamp(min=tiny)
        edge = torch.where(legs.both > 0, ahead, behind)
        edge = torch.where(legs.natural > 0, edge, torch.full_like(edge, torch.inf))
        found = torch.minimum(wanted.clamp(min=0.0), edge.amin(1))
        return torch.where(torch.isfinite(found), found, torch.zeros_like(found))
