"""A short training, for those who want to see a matrix at two accuracies."""

import copy
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.curvature.losses import CrossEntropy
from natgrad.measures.classes import margins
from natgrad.operators import Problem

LIMIT = 500  # steps
_RATE = 3e-3


@torch.no_grad()
def accuracy(problem: Problem) -> float | None:
    """The share of targets that the largest logit hits, a tie none; ``None`` without classes."""
    loss = problem.loss
    if not isinstance(loss, CrossEntropy) or loss.ahead:
        return None
    right = counted = 0
    for batch in problem.batches("accuracy"):
        if not isinstance(batch.targets, Tensor):
            return None
        ahead, counts = margins(loss, problem.output(batch), batch.targets)
        right += int(((ahead > 0) & counts).sum())
        counted += int(counts.sum())
    return right / counted if counted else None


def train(problem: Problem, target: float, limit: int = LIMIT) -> tuple[Problem, int]:
    """A copy of the model after as many steps of Adam, a batch each, as ``target`` accuracy takes,
    or ``limit`` of them; and how many those were."""
    model: nn.Module = copy.deepcopy(problem.model)
    names = [escape(name) for name in problem.parameters]
    options: dict[str, Any] = {"parameters": names, "progress": False, "check": False}
    trained = Problem(model, problem.loss, problem.data.source, **options)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=_RATE)
    step = 0
    while step < limit and (accuracy(trained) or 0.0) < target:
        model.train()
        for batch in trained.batches("training"):
            output = trained.output(batch)
            value = trained.loss.total(output, batch.targets)
            optimizer.zero_grad()
            (value / trained.loss.weight(output, batch.targets)).backward()
            optimizer.step()
            step += 1
            if step == limit:
                break
        model.eval()
    return trained, step
