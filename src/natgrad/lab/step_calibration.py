"""What a step of K-FAC takes beside products and decompositions: passes through memory, and starts.

    apply     products + start of every block  + each number of its gradient
    update    apply    + start of every factor + each of its numbers

Both are measured on K-FAC itself, in one process, all ranks at once: on many small layers, in which
starts are everything, and on one large layer with diagonal curvature, which has no products. A step
that updates and one that does not take turns.
"""

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor, nn

from natgrad.capture.discovery import StructureOf
from natgrad.comm import Alone
from natgrad.kfac.ranks.distributed import Distributed
from natgrad.placement import MeasuredCost, Passing
from natgrad.preconditioner import KFAC
from natgrad.specs import BlockSpec
from natgrad.structures import Diagonal

_SAMPLES = 4
_NEVER = 1 << 40
_WIDTHS = (8, 9, 10, 11)  # of small layers: as many stacks, as networks have several alike
Timed = Callable[[Callable[[], object]], float]


class Beside(nn.Module):
    """Linear layers without biases, ``[n, cols] -> [n, sum of rows]``, each with a copy of the
    input, as what layers share is counted once.

    Arguments:
        cols: columns of all layers.
        rows: of each.
    """

    def __init__(self, cols: int, rows: Sequence[int]) -> None:
        super().__init__()
        self.cols = cols
        self.layers = nn.ModuleList(nn.Linear(cols, each, bias=False) for each in rows)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all layers one behind the other.

        Arguments:
            x: ``[n, cols]``.
        """
        return torch.cat([layer(x.clone()) for layer in self.layers], 1)


class Stepped:
    """A network that steps, once with an update and once without, and so on.

    Arguments:
        model: that steps.
        structure: of its curvature.
        device: where everything is computed.
    """

    def __init__(self, model: Beside, structure: StructureOf, device: torch.device) -> None:
        self.model = model.to(device)
        self.kfac = KFAC(
            self.model,
            kl_clip=None,
            structure=structure,
            update_every=lambda step: 1 if step % 2 == 0 else _NEVER,
            refresh_every=lambda step: 1 if step == 0 else _NEVER,
            distributed=Distributed(group=Alone()),
        )
        self.inputs = torch.randn(_SAMPLES, model.cols, device=device)
        for _ in range(2):  # the first ones allocate and decompose
            self.prepare()
            self.kfac.step()

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        return self.kfac.plan.blocks

    def prepare(self) -> None:
        """All that comes before a step."""
        self.model.zero_grad()
        self.model(self.inputs).square().mean().backward()

    def seconds(self, timed: Timed, rounds: int) -> tuple[float, float]:
        """Of a step that updates and of one that does not, the least of some each.

        Arguments:
            timed: seconds of a call, on all ranks the same.
            rounds: how many of each.
        """
        least = [inf, inf]
        for turn in range(2 * rounds):
            self.prepare()
            least[turn % 2] = min(least[turn % 2], timed(self.kfac.step))
        return least[0], least[1]


def passing(
    timed: Timed, rounds: int, layers: int, width: int, cost: MeasuredCost, device: torch.device
) -> tuple[Passing, Passing]:
    """Seconds of gradients at a step, and of factors at an update, beside what ``cost`` knows.

    Arguments:
        timed: seconds of a call, on all ranks the same.
        rounds: of which the fastest counts.
        layers: how many small ones.
        width: rows and columns of the large one.
        cost: seconds of products, as measured.
        device: where everything is computed.
    """
    rows = [_WIDTHS[index % len(_WIDTHS)] for index in range(layers)]
    small = Stepped(Beside(max(_WIDTHS), rows), None, device)
    large = Stepped(Beside(width, [width]), Diagonal(), device)
    update, apply = small.seconds(timed, rounds)
    products = sum(map(cost.precondition, small.blocks)) / cost.flops
    factors = sum(len(block.factors) for block in small.blocks)
    starts = [max(0.0, apply - products) / layers, max(0.0, update - apply) / factors]
    update, apply = large.seconds(timed, rounds)
    carried, folded = (
        Passing(start, max(0.0, seconds - start) / width**2)
        for start, seconds in zip(starts, (apply, update - apply), strict=True)
    )
    return carried, folded
