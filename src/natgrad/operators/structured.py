"""Layer by layer: what a structure keeps of each block, with everything in closed form.

``F = diag(F_1, F_2, …)``, so that every function of ``F`` is that of its blocks. One pass over the
data fills the same sums, by the same files (`natgrad.capture`), as a step of K-FAC does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import StructureOf
from natgrad.capture.statistics import Statistics
from natgrad.capture.stopwatch import Stopwatch
from natgrad.checks import NOT_NEGATIVE, number
from natgrad.errors import ConvergenceError
from natgrad.linalg.results import Eigenpairs, Number
from natgrad.linalg.symmetric import Function, Symmetric
from natgrad.operators.base import Operator
from natgrad.operators.estimators import Eigensolver, Lanczos
from natgrad.operators.hidden_uses import refuse_unseen
from natgrad.operators.powers import shifted_power
from natgrad.operators.problem import Problem
from natgrad.operators.tape import Tape, positions
from natgrad.operators.vectors import Vectors
from natgrad.structures import Structure
from natgrad.structures.decomposition import decompose_factor


@dataclass(frozen=True)
class PlacedMatrix:
    """The matrix of one block, and where its rows lie among the parameters.

    Arguments:
        matrix: the block, in closed form.
        index: ``[size]``, positions of the block's entries in a flat vector.
        structure: which entries of the block were kept.
    """

    matrix: Symmetric
    index: Tensor
    structure: Structure


class Structured(Operator):
    """A block-diagonal matrix ``diag(F_1, F_2, …)`` whose functions are known in closed form.

    Unlike an operator without a structure, it is that of the parameters as they were when it was
    made.

    Arguments:
        problem: model, loss and data that it was made from.
        kind: name of the matrix, in print and in error sentences.
        blocks: by the name of the layer; together they cover every parameter once.
        definite: whether no eigenvalue is below zero.
        size: number of parameters; ``None`` takes those of the problem.
    """

    closed = True

    def __init__(
        self,
        problem: Problem,
        kind: str,
        blocks: Mapping[str, PlacedMatrix],
        *,
        definite: bool = True,
        size: int | None = None,
    ) -> None:
        super().__init__(problem, kind, size)
        self.blocks, self.definite = dict(blocks), definite

    def product(self, v: Tensor) -> Tensor:
        return self._blockwise(v, lambda matrix, m: matrix.product(m))

    def apply(self, function: Function, v: Tensor) -> Tensor:
        """``f(F) v``, block by block.

        Arguments:
            function: ``f``, from a tensor of eigenvalues to one of the same shape, entry by entry.
            v: ``[P, k]``.
        """
        return self._blockwise(v, lambda matrix, m: matrix.apply(function, m))

    def _blockwise(self, v: Tensor, function: Callable[[Symmetric, Tensor], Tensor]) -> Tensor:
        out = torch.zeros_like(v)
        for placed in self.blocks.values():
            out[placed.index] = function(placed.matrix, v[placed.index].mT.contiguous()).mT
        return out

    def _dense(self) -> Tensor:
        out = self._new(self.size, self.size)
        for placed in self.blocks.values():
            out[placed.index.unsqueeze(1), placed.index] = placed.matrix.dense()
        return out

    def diagonal(self) -> Tensor:
        out = self._new(self.size)
        for placed in self.blocks.values():
            out[placed.index] = placed.matrix.diagonal()
        return out

    def _exact_trace(self) -> Number:
        total = sum(float(placed.matrix.trace()) for placed in self.blocks.values())
        return Number(total, "exact: the sum of the traces of all blocks")

    def norm(self) -> Number:
        total = sum(float(placed.matrix.square_norm()) for placed in self.blocks.values())
        return Number(total**0.5, "exact: from the norms of all blocks")

    def exact_eigenvalues(self) -> Tensor:
        """All of them, descending ``[P]``."""
        found = torch.cat([placed.matrix.eigenvalues() for placed in self.blocks.values()])
        return found.sort(descending=True).values

    def eigenvalues(
        self,
        k: int = 10,
        *,
        smallest: bool = False,
        by: Eigensolver = Lanczos(),  # noqa: B008 (frozen)
    ) -> Eigenpairs:
        """In closed form, so ``by`` is not looked at."""
        k = self._count(k)
        values = torch.cat([placed.matrix.eigenvalues() for placed in self.blocks.values()])
        top = values.topk(k, largest=not smallest)
        order = top.values.argsort(descending=True)
        chosen, found = top.indices[order], top.values[order]
        vectors = self._new(self.size, k)
        start = 0
        for placed in self.blocks.values():
            mine = (chosen >= start) & (chosen < start + placed.matrix.size)
            if mine.any():
                columns = mine.nonzero().squeeze(1)
                rows = placed.matrix.eigenvectors(chosen[mine] - start)
                vectors[placed.index.unsqueeze(1), columns] = rows.mT
            start += placed.matrix.size
        apart = (self.product(vectors) - vectors * found).norm(dim=0)
        return Eigenpairs(
            found,
            vectors,
            apart / values.abs().max().clamp(min=1e-300),
            True,
            0,
            "exact: from the eigendecompositions of all blocks",
        )

    def _solve(self, v: Tensor, damping: float, preconditioner: Operator | None = None) -> Tensor:
        return self.apply(shifted_power(-1.0, damping, self.kind), v)

    def _power(self, v: Tensor, exponent: float, damping: float) -> Tensor:
        return self.apply(shifted_power(exponent, damping, self.kind), v)

    def logdet(self, damping: float = 0.0, probes: int = 0, steps: int = 0) -> Number:
        damping = number(damping, "damping", NOT_NEGATIVE)
        values = self.exact_eigenvalues().double() + damping
        if bool((values <= 0).any()):
            raise self._no_logarithm(damping, float(values.min()))
        return Number(float(values.log().sum()), "exact: from the eigenvalues of all blocks")

    def layers(self) -> dict[str, Operator]:
        return {
            name: Structured(
                self.problem,
                f"{self.kind}, {name}",
                {name: replace(placed, index=torch.arange(placed.matrix.size, device=self.device))},
                definite=self.definite,
                size=placed.matrix.size,
            )
            for name, placed in self.blocks.items()
        }

    def __repr__(self) -> str:
        kinds = sorted({repr(placed.structure) for placed in self.blocks.values()})
        return f"<{self.kind} of {self.size:,} parameters as {', '.join(kinds)}>"


def build(problem: Problem, vectors: Vectors, structure: StructureOf, kind: str) -> Structured:
    """A block-diagonal matrix by one pass over the data, and a second one for what is kept in the
    eigenbasis of the first (EKFAC).

    Arguments:
        problem: model, loss and data.
        vectors: which output vectors are summed.
        structure: what is kept of the block of each layer, such as ``Kronecker()`` or
            ``Diagonal()``, or a function from layer to structure; ``None`` is ``Kronecker()``, and
            ``UnitWise()`` for norm layers.
        kind: name of the matrix, in print and on progress bars.
    """
    tape = Tape(problem, structure)
    tape.refuse_uncovered()
    refuse_unseen(problem)
    with problem.ready(), tape:
        first = {b: [n for n in b.factors if n not in b.structure.in_basis] for b in tape.blocks}
        kept = sums_of(problem, tape, vectors, first, kind)
        second = {b: list(b.structure.in_basis) for b in tape.blocks}
        if any(second.values()):
            for block in tape.blocks:
                if block.structure.in_basis:
                    _decompose(block, kept[block])
            for block, more in sums_of(problem, tape, vectors, second, kind).items():
                kept[block] |= more
    placed = {}
    for block in tape.blocks:
        basis = block.decomposed_factors()
        matrix = block.structure.matrix(kept[block], block.forms, block.shape, basis)
        placed[block.name] = PlacedMatrix(matrix, positions(problem, block), block.structure)
    return Structured(problem, kind, placed)


def sums_of(
    problem: Problem,
    tape: Tape,
    vectors: Vectors,
    wanted: dict[Block, list[str]],
    kind: str,
) -> dict[Block, dict[str, Tensor]]:
    """The ``wanted`` factors by block and name, as means over the data of all processes.

    Arguments:
        problem: model, loss and data.
        tape: with its hooks on (entered as a context).
        vectors: which output vectors are summed.
        wanted: names of factors for each block; empty for blocks that are left out of this pass.
        kind: what progress bars say.
    """
    statistics = Statistics(Stopwatch())
    for block in tape.blocks:
        block.take_sums()
    samples, weight = 0, 0.0
    for index, batch in enumerate(problem.batches(kind)):
        output = tape.forward(batch)
        statistics.begin(wanted)
        samples += batch.samples
        weight += float(problem.loss.weight(output.detach(), batch.targets))
        draw = 0
        for stack in vectors.stacks(problem.loss, output, batch, index):
            for use, x, gs in tape.backpropagate(output, stack):
                block, layer = use
                if wanted[block]:
                    if tape.current.calls[block] == 1:  # calls that are summed stay apart
                        gs = block.structure.folded(layer, gs)
                    for j, g in enumerate(gs):
                        statistics.add(use, x, g, tape.current, draw + j)
            draw += len(stack)
        statistics.flush(tape.current)
    problem.remember_totals(samples, weight)
    return _means(problem, vectors, wanted)


def _means(
    problem: Problem, vectors: Vectors, wanted: dict[Block, list[str]]
) -> dict[Block, dict[str, Tensor]]:
    """Sums of all processes, in one reduction, to means."""
    keys = [(block, name) for block, names in wanted.items() for name in names]
    for block, names in wanted.items():
        block.open(names, block.dtype)  # of layers that the data never reached: zeros
    sums = [block.sums[name] for block, name in keys]
    if problem.comm.size > 1:
        counts = torch.tensor([float(total.count) for total in sums], device=problem.device)
        everything = torch.cat([counts.to(problem.dtype), *(total.kept for total in sums)])
        pieces = problem.totals(everything).split([len(sums), *(t.kept.numel() for t in sums)])
        for total, count, summed in zip(sums, pieces[0].tolist(), pieces[1:], strict=True):
            total.count, total.kept = round(count), summed
    scale = vectors.scale(problem)
    kept: dict[Block, dict[str, Tensor]] = {block: {} for block in wanted}
    for (block, name), total in zip(keys, sums, strict=True):
        of_gradients = block.factors[name].of_gradients
        kept[block][name] = total.kept * (scale if of_gradients else 1.0 / max(1, total.count))
        block.take_sum(name)
    return kept


def _decompose(block: Block, kept: dict[str, Tensor]) -> None:
    """Give the block the eigenbasis of these factors, for statistics in it."""
    found = {}
    for name, matrix in block.structure.matrices(kept, block.forms).items():
        zero = torch.zeros(block.forms[name].batch, dtype=matrix.dtype, device=matrix.device)
        parts = decompose_factor(block.inverse, block.forms[name], matrix, zero)
        if parts is None:
            raise ConvergenceError(
                f"Factor {name} of {block.kind} {block.name!r} has no eigendecomposition, as not "
                "all of its numbers are finite: look at the data and the weights."
            )
        found[name] = parts
    block.install(found, found)
