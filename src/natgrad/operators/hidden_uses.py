"""Whether the layers of a model show all that it does with its weights, sample by sample.

For one sample's output vector ``w`` the layers' ``Σ_s g[s] a[s]ᵀ`` must be autograd's ``Jᵀ w``, and
come from that sample alone. It does not where a weight is used without its module being called, or
where a layer has one input for all samples, such as the positions of tokens.
"""

from typing import Any

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.errors import CoverageError
from natgrad.layers import Layer
from natgrad.operators.data import Batch
from natgrad.operators.problem import Problem
from natgrad.operators.tape import Tape, positions


def refuse_unseen(problem: Problem) -> None:
    """Raise if layers do not show all that the model does with its weights.

    Arguments:
        problem: model, loss and data.
    """
    if why := unseen(problem):
        raise CoverageError(why)


def unseen(problem: Problem) -> str:
    """A sentence on what is not seen, or none; looked for once, and only with ``check=True``.

    Arguments:
        problem: model, loss and data.
    """
    if problem.unseen is None:
        own = _search(problem) if problem.check else ""
        found = problem.comm.gather(own) if problem.check and problem.comm.size > 1 else [own]
        problem.unseen = next(filter(None, found), "")
    return problem.unseen


def _search(problem: Problem) -> str:
    batch = _batch_of_several(problem)
    if batch is None:  # other processes have data
        return ""
    try:
        tape = Tape(problem, None)
    except CoverageError:  # no layer is known, so none is asked
        return ""
    with problem.ready(), tape:
        output = tape.forward(batch)
        w = torch.zeros_like(output)
        last = torch.randn(w[-1].shape, generator=torch.Generator().manual_seed(0))
        w[-1] = last.to(w)
        rows: dict[Block, Tensor] = {}
        for (block, layer), x, (g,) in tape.backpropagate(output, w.unsqueeze(0)):
            alone = _of_last(x, g, batch.samples)
            if alone is None:
                return (
                    f"The gradients of {batch.samples} samples cannot be told apart in "
                    f"{layer.kind} {layer.name!r}, which has one input for several of them, or "
                    "after which the model mixes them: give it an input for every sample, leave it "
                    "out with parameters=[...], or take structure=None."
                )
            row = _gradient(layer, *alone)
            rows[block] = rows[block] + row if block in rows else row
        own = list(problem.parameters.values())
        truth = problem.flat(torch.autograd.grad(output, own, w, allow_unused=True))
    if not bool(truth.isfinite().all()):
        return (
            "The gradient of the model's output is not finite: look for NaN or overflow in the "
            "model or the data."
        )
    for block in tape.blocks:
        expected = truth[positions(problem, block)]
        found = rows.get(block, torch.zeros_like(expected))
        if not _close(found, expected):
            return (
                f"The weight of {block.kind} {block.name!r} has more to do with the output than "
                "calls of that layer show: call the layer wherever its weight is used, leave it "
                "out with parameters=[...], or take structure=None."
            )
    return ""


def _batch_of_several(problem: Problem) -> Batch | None:
    """The first batch with two samples that could be confused, if there is one."""
    batches = iter(problem.data)
    first = next(batches, None)
    if first is None or first.samples > 1:
        return first
    return next((batch for batch in batches if batch.samples > 1), first)


def _of_last(x: Any, g: Tensor, samples: int) -> tuple[Any, Tensor] | None:
    """Input and gradient of the last sample; ``None`` if the gradient is not that sample's."""
    fold = len(g) // samples  # a sample's tokens may lie along the first axis
    if bool(g[: len(g) - fold].any()):
        return None
    if isinstance(x, Tensor) and len(x) == len(g):
        return x[len(x) - fold :], g[len(g) - fold :]
    return x, g


def _gradient(layer: Layer[Any], x: Any, g: Tensor) -> Tensor:
    """``[groups * rows * cols]``."""
    return sum(
        (piece.sum(0).flatten() for piece in layer.sample_gradients(x, g, None)),
        torch.zeros((), dtype=g.dtype, device=g.device),
    )


def _close(found: Tensor, expected: Tensor) -> bool:
    """Up to what rounding leaves, of sums whose terms may cancel."""
    allowed: float = torch.finfo(expected.dtype).eps ** 0.5
    apart, size = float((found - expected).norm()), float(expected.norm())
    return apart <= allowed * max(size, 1e-6)
