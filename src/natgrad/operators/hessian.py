"""The Hessian ``H = ∇²L``, by differentiating the gradient once more."""

from collections.abc import Iterator

import torch
from torch import Tensor

from natgrad.operators.base import Operator
from natgrad.operators.data import Batch
from natgrad.operators.problem import Problem
from natgrad.operators.tape import batched_grad

_MADE = 1 << 25  # numbers of gradients that are made at a time


class Hessian(Operator):
    """Of one batch the graph of the gradient is kept, so that a product is one backward pass."""

    definite = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, "Hessian")
        self._graph: list[Tensor | None] | None = None
        self._seen: tuple[float, ...] = ()

    def product(self, v: Tensor) -> Tensor:
        v = v.to(self.dtype)
        out = torch.zeros_like(v)
        problem = self.problem
        own = list(problem.parameters.values())
        width = max(1, _MADE // problem.space.size)
        for grads in self._gradients():
            used = [i for i, g in enumerate(grads) if g is not None]
            if not used:  # the loss is linear in every parameter
                continue
            outputs = [g for g in grads if g is not None]
            for start in range(0, v.shape[1], width):
                columns = v[:, start : start + width].mT.contiguous()
                parts = problem.space.split(columns)
                found = batched_grad(outputs, own, [parts[i] for i in used])
                out[:, start : start + width] += problem.rows(found, len(columns)).mT
        return problem.totals(out).div_(problem.weight)

    def _gradients(self) -> Iterator[list[Tensor | None]]:
        """Of the sum of losses, with a graph, for each batch."""
        if self._seen != (state := self.problem.state()):
            self._seen, self._graph = state, None
        if self._graph is not None:
            yield self._graph
            return
        with self.problem.ready(twice=True):
            for batch in self.problem.batches(self.kind):
                made = self._gradient(batch)
                if self.problem.data.single:
                    self._graph = made
                yield made

    def _gradient(self, batch: Batch) -> list[Tensor | None]:
        problem = self.problem
        loss = problem.loss.total(problem.output(batch), batch.targets)
        own = list(problem.parameters.values())
        found = torch.autograd.grad(loss, own, create_graph=True, allow_unused=True)
        return [g if g is not None and g.requires_grad else None for g in found]
