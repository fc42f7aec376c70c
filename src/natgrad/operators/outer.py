"""GGN, Fisher and empirical Fisher without writing them out: ``scale Σ_batches Rᵀ R``.

Where it fits into memory the rows are kept layer by layer (`jacobian_rows`); otherwise each product
runs the model once more: ``J v`` by differentiating ``w -> Jᵀ w``, the output's curvature, ``Jᵀ``.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from natgrad.errors import CoverageError, SettingError
from natgrad.linalg.forms import Triangle
from natgrad.linalg.results import Number
from natgrad.operators import requirements
from natgrad.operators.base import Operator
from natgrad.operators.data import Batch
from natgrad.operators.hidden_uses import unseen
from natgrad.operators.jacobian_rows import JacobianRows, gather
from natgrad.operators.problem import Problem
from natgrad.operators.structured import build
from natgrad.operators.tape import Tape, batched_grad
from natgrad.operators.vectors import Vectors
from natgrad.structures import Diagonal

_KEPT = 1 << 28  # bytes of rows that are kept between products
_EACH = 64  # vectors of a sample above which running the model is cheaper than keeping rows
_MADE = 1 << 24  # numbers of intermediate results of a product
_GRAM = 1 << 14  # rows of a Gram matrix


class OuterProducts(Operator):
    """A positive semidefinite matrix ``scale Σ Rᵀ R``: GGN, Fisher or empirical Fisher.

    Arguments:
        problem: model, loss and data.
        vectors: which output vectors are pulled back to rows ``R``.
        kind: name of the matrix, for print.
    """

    definite = True

    def __init__(self, problem: Problem, vectors: Vectors, kind: str) -> None:
        super().__init__(problem, kind)
        self.vectors = vectors
        self._tape = _tape(problem)
        self._rows: list[JacobianRows] | None = None
        self._seen: tuple[float, ...] = ()
        self._graph: tuple[Tensor, Tensor, list[Tensor | None]] | None = None

    @property
    def scale(self) -> float:
        return self.vectors.scale(self.problem)

    def product(self, v: Tensor) -> Tensor:
        v = v.to(self.dtype)
        out = torch.zeros_like(v)
        rows = self._kept_rows()
        if rows is not None:
            for one in rows:
                width = max(1, _MADE // max(1, one.widest()))
                for start in range(0, v.shape[1], width):
                    part = slice(start, start + width)
                    one.backward(one.forward(v[:, part]), out[:, part])
        else:
            self._run_model(v, out)
        return self.problem.totals(out).mul_(self.scale)

    # Rows of layers.

    def _kept_rows(self) -> list[JacobianRows] | None:
        if self._seen != (state := self.problem.state()):
            self._seen, self._rows, self._graph = state, self._collect(), None
        return self._rows

    def _collect(self) -> list[JacobianRows] | None:
        found: list[JacobianRows] = []
        if self._tape is None:
            return None
        samples, weight, kept = 0, 0.0, 0
        for rows, batch, output_weight in self._gather(self._tape, limit=_EACH):
            if rows is None:
                return None
            found.append(rows)
            samples, weight = samples + batch.samples, weight + output_weight
            kept += rows.numel * self.dtype.itemsize
            if kept > _KEPT:
                return None
        self.problem.remember_totals(samples, weight)
        return found

    def _gather(
        self, tape: Tape, limit: int | None = None
    ) -> Iterator[tuple[JacobianRows | None, Batch, float]]:
        """The rows of every batch; ``None`` if there are more than ``limit`` for a sample."""
        problem = self.problem
        with problem.ready(), tape:
            for index, batch in enumerate(problem.batches(self.kind)):
                with torch.no_grad():
                    output = problem.output(batch)
                weight = float(problem.loss.weight(output, batch.targets))
                if limit is not None and self.vectors.per_sample(problem.loss, output) > limit:
                    yield None, batch, weight
                    return
                yield gather(problem, tape, self.vectors, batch, index), batch, weight

    # Through the model.

    def _run_model(self, v: Tensor, out: Tensor) -> None:
        problem = self.problem
        own = list(problem.parameters.values())
        with problem.ready(twice=True):
            for index, batch in enumerate(problem.batches(self.kind)):
                f, w, pulled = self._linearised(batch, own)
                used = [(g, i) for i, g in enumerate(pulled) if g is not None]
                k_at_once = max(1, _MADE // max(1, f.numel() * 4))
                for start in range(0, v.shape[1], k_at_once):
                    columns = v[:, start : start + k_at_once].mT.contiguous()
                    tangents = problem.space.split(columns)
                    (pushed,) = batched_grad(
                        [g for g, _ in used], [w], [tangents[i] for _, i in used]
                    )
                    assert pushed is not None
                    curved = self.vectors.curve(problem.loss, f, batch, index, pushed)
                    back = batched_grad(f, own, curved.to(f.dtype))
                    out[:, start : start + k_at_once] += problem.rows(back, len(columns)).mT

    def _linearised(
        self, batch: Batch, own: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Output, ``w``, and ``Jᵀ w`` as a function of ``w``; kept if there is but one batch."""
        if self._graph is not None:
            return self._graph
        f = self.problem.output(batch)
        w = torch.zeros_like(f, requires_grad=True)
        pulled = list(torch.autograd.grad(f, own, w, create_graph=True, allow_unused=True))
        made = f, w, [g if g is not None and g.requires_grad else None for g in pulled]
        if self.problem.data.single:
            self._graph = made
        return made

    # Exact results from rows that are written out.

    def rows(self) -> Iterator[Tensor]:
        """``[n * q, P]`` of each batch of this process, unscaled."""
        if self._tape is not None:
            kept = self._kept_rows()
            if kept is not None:
                yield from (one.explicit() for one in kept)
                return
            for rows, _, _ in self._gather(self._tape):
                assert rows is not None
                yield rows.explicit()
            return
        problem = self.problem
        own = list(problem.parameters.values())
        with problem.ready():
            for index, batch in enumerate(problem.batches(self.kind)):
                f = problem.output(batch)
                for stack in self.vectors.stacks(problem.loss, f, batch, index):
                    for n in range(batch.samples):  # one sample at a time, as others are zeros
                        one = torch.zeros_like(stack)
                        one[:, n] = stack[:, n]
                        yield problem.rows(batched_grad(f, own, one.to(f.dtype)), len(stack))

    def _dense(self) -> Tensor:
        form = Triangle(self.size)
        total = self._new(form.numel)
        for rows in self.rows():
            form.add_rows(total, rows.unsqueeze(0))
        return form.dense(self.problem.totals(total).mul_(self.scale))[0]

    def diagonal(self) -> Tensor:
        if self._tape is not None:
            return build(self.problem, self.vectors, Diagonal(), self.kind).diagonal()
        total = self._new(self.size)
        for rows in self.rows():
            total += rows.square().sum(0)
        return self.problem.totals(total) * self.scale

    def combined(self, u: Tensor) -> Tensor:
        """``Rᵀ u [P, k]``, of this process's rows, unscaled.

        Arguments:
            u: ``[rows, k]``, rows in the order of `rows`.
        """
        out = self._new(self.size, u.shape[1])
        kept = self._kept_rows()
        if kept is not None:
            pieces = u.split([one.samples * one.each for one in kept])
            for one, piece in zip(kept, pieces, strict=True):
                one.backward(piece.reshape(one.samples, one.each, -1), out)
            return out
        start = 0
        for rows in self.rows():
            out += rows.mT @ u[start : start + len(rows)]
            start += len(rows)
        return out

    def gram(self) -> Tensor:
        """``R Rᵀ [rows, rows]``, unscaled: sample by sample, then vector by vector."""
        if self.problem.comm.size > 1:
            raise SettingError(
                "A Gram matrix needs all rows in one process, but the data are spread over "
                f"{self.problem.comm.size}: use eigenvalues(k) or spectrum()."
            )
        kept = self._kept_rows()
        number = self._number_of_rows()
        instead = "use fewer samples, eigenvalues(k) or spectrum()"
        requirements.fits(number, number, self.dtype, "The Gram matrix", instead)
        if kept is None:
            requirements.fits(number, self.size, self.dtype, "The matrix of all rows", instead)
            everything = torch.cat(list(self.rows()))
            return everything @ everything.mT
        return torch.cat([torch.cat([one.gram(other) for other in kept], 1) for one in kept])

    def exact_eigenvalues(self) -> Tensor:
        """All that are not zero, descending, from the Gram matrix, or from the dense one where that
        is smaller or the rows are spread over processes."""
        if self.problem.comm.size > 1 or self.size <= self._number_of_rows():
            return super().exact_eigenvalues().clamp_(min=0.0)
        found: Tensor = torch.linalg.eigvalsh(self.gram())
        return found.flip(0).clamp_(min=0.0) * self.scale

    def _number_of_rows(self) -> int:
        """Of this process; as the first batch has them if they are not kept."""
        kept = self._kept_rows()
        if kept is not None:
            return sum(one.samples * one.each for one in kept)
        with torch.no_grad():
            output = self.problem.output(next(iter(self.problem.data)))
        return self.problem.samples * self.vectors.per_sample(self.problem.loss, output)

    def norm(self) -> Number:
        kept = self._kept_rows()
        if kept is not None and self.problem.comm.size == 1 and self._number_of_rows() <= _GRAM:
            value = float(self.gram().norm()) * self.scale
            return Number(value, "exact: the norm of the Gram matrix")
        return super().norm()


def _tape(problem: Problem) -> Tape | None:
    """If all parameters are of layers that are known, and that show all that is done with them."""
    try:
        tape = Tape(problem, None)
    except CoverageError:
        return None
    return None if tape.uncovered or unseen(problem) else tape
