"""One forward pass that remembers every layer's input, and sends vectors back to their outputs."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import Choice, StructureOf, clean, discover
from natgrad.capture.hooks import Capture
from natgrad.capture.passes import Pass
from natgrad.capture.tensor_hooks import Use
from natgrad.errors import CoverageError, SettingError
from natgrad.inverses import Eigen
from natgrad.operators.data import Batch
from natgrad.operators.problem import Problem
from natgrad.structures import Structure


class Tape:
    """Hooks on the layers of a model, which together cover all parameters of a problem. Use it as a
    context: hooks are there only inside.

    Arguments:
        problem: model, loss and data.
        structure: what is kept of each block: a structure, a function from layer to structure, or
            ``None`` for ``Kronecker()`` and ``UnitWise()``.
    """

    def __init__(self, problem: Problem, structure: StructureOf) -> None:
        self.problem = problem
        _check(structure)
        with problem.ready():
            self.blocks, uncovered = discover(
                problem.model, Choice(structure, Eigen(), None, (), None, 0, split={})
            )
        names = {clean(name): name for name in problem.parameters}
        self.uncovered = {names[n]: u for n, u in uncovered.items() if n in names}
        self.capture = Capture(problem.model, self.blocks, _unused, taping=True, batch_axis=0)

    def refuse_uncovered(self) -> None:
        if self.uncovered:
            (name, why), *others = self.uncovered.items()
            raise CoverageError(
                f"Parameter {name!r} has no block ({why.reason})"
                f"{f', nor have {len(others)} others' if others else ''}: leave such parameters "
                "out with parameters=[...], or take structure=None."
            )

    def __enter__(self) -> "Tape":
        self.capture.count_samples(True)
        self.capture.arm()
        return self

    def __exit__(self, *_: object) -> None:
        self.capture.detach()

    def forward(self, batch: Batch) -> Tensor:
        """The model's output for a batch; the inputs of layers are kept.

        Arguments:
            batch: as `Problem.batches` gives it.
        """
        self.capture.forget()
        return self.problem.output(batch)

    @property
    def current(self) -> Pass:
        assert self.capture.current is not None
        return self.capture.current

    def edges(self) -> list[Any]:
        """Of the outputs of layers, in the order of their calls."""
        return [edge for _, _, edge, _ in self.current.tape]

    def backpropagate(
        self, output: Tensor, vectors: Tensor
    ) -> Iterator[tuple[Use, Any, Sequence[Tensor]]]:
        """For each use of a layer: the use, its input, and the gradients of its output, one a
        vector.

        Arguments:
            output: of the last `forward`.
            vectors: ``[q, n, …]``, each shaped like the output, to be backpropagated from it.
        """
        edges = self.edges()
        grads = batched_grad(output, edges, vectors.to(output.dtype))
        for (use, x, _, view), g in zip(self.current.tape, grads, strict=True):
            if g is not None:
                yield use, x, [view(one) for one in g]


def batched_grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Sequence[Any],
    vectors: Tensor | Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` for several vectors at once; the graph stays.

    One by one where an operation cannot take them together.

    Arguments:
        outputs: what is differentiated: one tensor or several.
        inputs: what they are differentiated by: tensors or graph edges. One that no output depends
            on gives ``None``.
        vectors: ``[k, …]`` for one output, or one such tensor for each of several: ``k`` vectors to
            backpropagate.
        create_graph: whether the result can be differentiated again.
    """
    several = isinstance(vectors, Tensor)
    first = vectors if several else vectors[0]
    assert isinstance(first, Tensor)
    k = len(first)

    def grad(v: Any, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            outputs,
            list(inputs),
            v,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=batched,
        )

    if k > 1:
        try:
            return grad(vectors, True)
        except RuntimeError:  # an operation without a batching rule
            pass
    ones = [grad(vectors[i] if several else [v[i] for v in vectors], False) for i in range(k)]
    return tuple(
        None if found[0] is None else torch.stack([t for t in found if t is not None])
        for found in zip(*ones, strict=True)
    )


def positions(problem: Problem, block: Block) -> Tensor:
    """Where the entries of ``vec(W)`` lie in a flat vector, ``[groups * rows * cols]``.

    Arguments:
        problem: model, loss and data.
        block: of one of its layers; all of its parameters must be the problem's.
    """
    own = {id(p) for p in block.parameters}
    where = {
        id(p): torch.arange(part.start, part.stop).view(p.shape)
        for p, part in zip(problem.parameters.values(), problem.space.slices.values(), strict=True)
        if id(p) in own
    }
    index = torch.zeros(block.shape, dtype=torch.int64)
    block.layers[0].load(index, lambda p: where[id(p)])
    return index.flatten().to(problem.device)


def _check(structure: Any) -> None:
    function = callable(structure) and not isinstance(structure, type)
    if structure is not None and not isinstance(structure, Structure) and not function:
        raise SettingError(
            f"structure is {structure!r} but must be None, a structure such as natgrad.Kronecker(),"
            " or a function from a layer to one: give one of them."
        )


def _unused(*_: object) -> None:
    raise AssertionError("a tape has no pairs of its own")
