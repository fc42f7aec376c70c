"""What the quadratic model predicts for a step, for damping by Levenberg-Marquardt.

    M(d) - M(0) = <grad, d> + 1/2 <d, (F + damping I) d>
    ratio       = (loss(theta + d) - loss(theta)) / (M(d) - M(0))

Near 1 the model can be trusted and the damping may fall; near 0 it must rise (Martens & Grosse
2015, sec. 6.5; `natgrad.schedules.LevenbergMarquardt`). The step ``d`` is read from the weights, so
that momentum, weight decay and the optimizer's own scaling are part of it.
"""

import torch
from torch import Tensor, nn

from natgrad.comm.layouts import full_tensor
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import Values


class QuadraticModel:
    """``M(d) - M(0) = <grad, d> + 1/2 <d, (F + damping I) d>`` of the step ``d`` that was taken.

    Parameters without a block enter with their gradient alone.
    """

    def __init__(self, team: Team, model: nn.Module) -> None:
        self.team, self.model = team, model
        self.remembered: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._gradient_scale = self._weight = 1.0

    def take_over(self, other: "QuadraticModel") -> None:
        """Go on from one with other blocks; what these say of a step that was taken is left out."""
        self.remembered = other.remembered
        self._gradient_scale, self._weight = other._gradient_scale, other._weight

    def remember(self, gradient_scale: float, weight: float) -> None:
        """Weights and gradients before the step; the scale makes the gradient that of a sample's
        mean loss, which is what the curvature is of, and the weights of all ranks make the loss
        that of all of them."""
        self._gradient_scale, self._weight = gradient_scale, weight
        self.remembered = [
            (p, p.detach().clone(), p.grad * gradient_scale)
            for p in self.model.parameters()
            if p.grad is not None
        ]

    @torch.no_grad()
    def ratio(self, before: float, after: float, now: Values) -> float:
        """Actual change of the loss / predicted change; forgets what was remembered. The losses are
        of this rank's batch, and all ranks get the same ratio."""
        change = 0.0
        for p, old, g in self.remembered:
            change += float((full_tensor(g) * full_tensor(p.detach() - old)).sum())
        olds = {id(p): old for p, old, _ in self.remembered}
        curved_change = 0.0
        for block in self.team.blocks.values():
            if not block.ready or any(id(p) not in olds for p in block.parameters):
                continue
            # All ranks bring together what is spread over them.
            moved = {p: full_tensor(p.detach() - olds[id(p)]) for p in block.parameters}
            # Of the ranks that precondition a block the first one speaks for it.
            if self.team.plan.workers[block.name][0] != self.team.rank:
                continue
            d = torch.empty(block.shape, dtype=block.wide_dtype, device=block.device)
            block.layers[0].load(d, moved.__getitem__)
            curved = block.decomposed().multiply(d, now.damping_of(block))
            curved_change += 0.5 * float((d * curved).sum())
        self.remembered = []
        actual = (after - before) * self._gradient_scale * self._weight
        predicted = change * self._weight + curved_change
        actual, predicted = self.team.total([actual, predicted]).tolist()
        return actual / predicted if predicted else float("nan")
