"""Layer by layer: what a structure keeps of each block, with everything in closed form.

``F = diag(F_1, F_2, …)``, so that every function of ``F`` is that of its blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from natgrad.linalg.results import Eigenpairs, Number
from natgrad.linalg.symmetric import Function, Symmetric
from natgrad.operators.base import Operator
from natgrad.operators.estimators import Eigensolver, Lanczos
from natgrad.operators.powers import shifted_power
from natgrad.operators.problem import Problem
from natgrad.operators.tape import Tape, positions
from natgrad.operators.unseen import refuse_unseen
from natgrad.operators.vectors import Vectors
from natgrad.runtime.blocks import Block
from natgrad.runtime.discovery import StructureOf
from natgrad.runtime.ranges import NOT_NEGATIVE, number
from natgrad.runtime.statistics import Statistics
from natgrad.runtime.timing import Stopwatch
from natgrad.structures import Structure


@dataclass(frozen=True)
class Placed:
    """A block's matrix, and where its rows lie among the parameters, ``index [size]``."""

    matrix: Symmetric
    index: Tensor
    structure: Structure


class Structured(Operator):
    """``blocks`` by the name of the layer; they cover every parameter once.

    Unlike an operator without a structure, it is of the parameters as they were when it was made.
    """

    closed = True

    def __init__(
        self,
        problem: Problem,
        kind: str,
        blocks: Mapping[str, Placed],
        *,
        definite: bool = True,
        size: int | None = None,
    ) -> None:
        super().__init__(problem, kind, size)
        self.blocks, self.definite = dict(blocks), definite

    def product(self, v: Tensor) -> Tensor:
        return self._blockwise(v, lambda matrix, m: matrix.product(m))

    def apply(self, function: Function, v: Tensor) -> Tensor:
        """``f(F) v`` for ``v [P, k]``, with ``f`` of eigenvalues."""
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
    """One pass over the data, and a second one for what is kept in the basis of the first."""
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
                    matrices = block.structure.decomposed(kept[block], block.forms)
                    block.parts = {
                        name: _decompose(block, name, matrix) for name, matrix in matrices.items()
                    }
            for block, more in sums_of(problem, tape, vectors, second, kind).items():
                kept[block] |= more
    placed = {}
    for block in tape.blocks:
        parts = block.parts or None
        matrix = block.structure.matrix(kept[block], block.forms, block.shape, parts)
        placed[block.name] = Placed(matrix, positions(problem, block), block.structure)
    return Structured(problem, kind, placed)


def sums_of(
    problem: Problem,
    tape: Tape,
    vectors: Vectors,
    wanted: dict[Block, list[str]],
    kind: str,
) -> dict[Block, dict[str, Tensor]]:
    """The factors ``wanted``, of all data of all processes."""
    statistics = Statistics(wanted.__getitem__, Stopwatch())
    for block in tape.blocks:
        block.sums = {}
    samples, weight = 0, 0.0
    for index, batch in enumerate(problem.batches(kind)):
        output = tape.forward(batch)
        samples += batch.samples
        weight += float(problem.loss.weight(output.detach(), batch.targets))
        draw = 0
        for stack in vectors.stacks(problem.loss, output, batch, index):
            for use, x, gs in tape.pull(output, stack):
                block, layer = use
                if wanted[block]:
                    if tape.current.calls[block] == 1:  # calls that are summed stay apart
                        gs = block.structure.folded(layer, gs)
                    for j, g in enumerate(gs):
                        statistics.add(use, x, g, tape.current, draw + j)
            draw += len(stack)
        statistics.flush(tape.current)
        statistics.forget()
    problem.know(samples, weight)
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
        block.sums.pop(name)
    return kept


def _decompose(block: Block, name: str, kept: Tensor) -> tuple[Tensor, ...]:
    form = block.forms[name]
    zero = torch.zeros(form.batch, dtype=kept.dtype, device=kept.device)
    if form.diagonal:
        return block.inverse.decompose_diagonal(kept.view(form.batch, form.dim), zero)
    return block.inverse.decompose(form.dense(kept), zero)
