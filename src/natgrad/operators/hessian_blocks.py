"""The Hessian layer by layer, ``∇²_W L`` and what a structure keeps of it.

Dense entries are columns of products. A Kronecker product is that of the second moment of inputs
with the mean Hessian of the loss in the layer's output, ``A x 1/W Σ_n Σ_s ∂²/∂y_ns²``: exact for
one sample, and equal to K-FAC of the GGN where the network is piecewise linear.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import StructureOf
from natgrad.capture.tensor_hooks import View
from natgrad.errors import CoverageError
from natgrad.layers import Layer, SharedInput
from natgrad.layers.axes import grouped, per_sample
from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix
from natgrad.linalg.forms import Form
from natgrad.linalg.symmetric import (
    DenseBlocks,
    DiagonalMatrix,
    KroneckerProduct,
    Rotated,
    Symmetric,
)
from natgrad.operators.hessian import Hessian
from natgrad.operators.hidden_uses import refuse_unseen
from natgrad.operators.problem import Problem
from natgrad.operators.progress import track
from natgrad.operators.structured import PlacedMatrix, Structured, sums_of
from natgrad.operators.tape import Tape, batched_grad, positions
from natgrad.operators.vectors import LossGradients
from natgrad.structures import EKFAC, Diagonal, Full, Kronecker, UnitWise

_COLUMNS = 1 << 24  # numbers of columns that are made at a time


def build_hessian(
    problem: Problem, structure: StructureOf, hessian: Hessian | None = None
) -> Structured:
    """The Hessian with a structure.

    Arguments:
        problem: model, loss and data.
        structure: what is kept of the block of each layer: ``Full()``, ``UnitWise()``,
            ``Diagonal()``, ``Kronecker()`` or ``EKFAC()``, or a function from layer to one of
            these; ``None`` is ``Kronecker()``, and ``UnitWise()`` for norm layers.
        hessian: whose columns the entries are; ``None`` makes one.
    """
    tape = Tape(problem, structure)
    tape.refuse_uncovered()
    hessian = hessian or Hessian(problem)
    products: dict[Block, KroneckerProduct] = {}
    two_sided = [b for b in tape.blocks if isinstance(b.structure, Kronecker | EKFAC)]
    if two_sided:
        refuse_unseen(problem)
        if traced := [b.structure for b in two_sided if b.structure.whole]:
            raise CoverageError(
                f"{traced[0]!r} has squares of per-sample gradients, and the Hessian is no sum of "
                "such: take Kronecker() or EKFAC(), or Full() for small layers."
            )
        products = _kronecker(problem, tape, two_sided)
    placed = {}
    for block in tape.blocks:
        index = positions(problem, block)
        matrix = _matrix(block, index, hessian, products.get(block))
        placed[block.name] = PlacedMatrix(matrix, index, block.structure)
    return Structured(problem, "Hessian", placed, definite=False)


def _matrix(
    block: Block, index: Tensor, hessian: Hessian, product: KroneckerProduct | None
) -> Symmetric:
    structure = block.structure
    if isinstance(structure, Kronecker):
        assert product is not None
        return product
    if isinstance(structure, EKFAC):
        assert product is not None
        return _rotated(product, index, hessian)
    dims = {Full: len(index), UnitWise: block.shape[2], Diagonal: 1}
    if type(structure) not in dims:
        raise CoverageError(
            f"The Hessian has no form for {structure!r}: take Full(), UnitWise(), Diagonal(), "
            "Kronecker() or EKFAC()."
        )
    dim = dims[type(structure)]
    out = torch.zeros(len(index) // dim, dim, dim, dtype=hessian.dtype, device=hessian.device)
    for some, columns in _columns(hessian, index):
        entries = columns.view(len(index) // dim, dim, -1)  # [pieces, dim, some]
        which = torch.arange(some.start, some.stop, device=index.device)
        local = torch.arange(len(which), device=index.device)
        out[which // dim, :, which % dim] = entries[which // dim, :, local]
    out = (out + out.mT) / 2
    return DiagonalMatrix(out.flatten()) if dim == 1 else DenseBlocks(out)


def _columns(hessian: Hessian, index: Tensor) -> Iterator[tuple[range, Tensor]]:
    """The columns ``index[some]`` of the Hessian, of which the rows ``index``."""
    for some in _pieces(hessian, len(index)):
        yield some, hessian.columns(index[some.start : some.stop])[index]


def _pieces(hessian: Hessian, count: int) -> Iterator[range]:
    """Of ``count`` columns as many as may be made at a time."""
    width = max(1, _COLUMNS // hessian.size)
    pieces = [range(i, min(i + width, count)) for i in range(0, count, width)]
    return track(pieces, "columns of the Hessian", hessian.problem.progress)


def _rotated(product: KroneckerProduct, index: Tensor, hessian: Hessian) -> Rotated:
    """``qᵀ H q`` for every eigenvector ``q`` of the Kronecker product."""
    values = []
    for some in _pieces(hessian, product.size):
        which = torch.arange(some.start, some.stop, device=index.device)
        rows = product.eigenvectors(which)
        v = torch.zeros(hessian.size, len(which), dtype=hessian.dtype, device=hessian.device)
        v[index] = rows.mT
        values.append((rows.mT * hessian.product(v)[index]).sum(0))
    shape = (product.groups, product.rows, product.cols)
    return Rotated(*product.bases(), torch.cat(values).view(shape))


def _kronecker(problem: Problem, tape: Tape, blocks: list[Block]) -> dict[Block, KroneckerProduct]:
    with problem.ready(twice=True), tape:
        wanted = {b: ["A"] if b in blocks else [] for b in tape.blocks}
        inputs = sums_of(problem, tape, LossGradients(), wanted, "inputs")
        curved = {b: torch.zeros((), dtype=problem.dtype, device=problem.device) for b in blocks}
        for batch in problem.batches("output Hessians"):
            loss = problem.loss.total(tape.forward(batch), batch.targets)
            grads = torch.autograd.grad(loss, tape.edges(), create_graph=True, allow_unused=True)
            for (use, _, edge, view), g in zip(tape.current.tape, grads, strict=True):
                block, layer = use
                if block in curved and tape.current.calls[block] > 1:
                    raise _used_twice(block)
                if block in curved and g is not None and g.requires_grad:
                    output = _LayerOutput(layer, view, batch.samples)
                    curved[block] = curved[block] + output.hessian(g, edge, _reduces(block))
    products = {}
    for block in blocks:
        groups, rows, _ = block.shape
        total = problem.totals(curved[block].expand(groups, rows, rows)) / problem.weight
        a = block.forms["A"].entries(inputs[block]["A"])
        products[block] = KroneckerProduct(_kept_of(block.forms["G"], (total + total.mT) / 2), a)
    return products


def _kept_of(form: Form, dense: Tensor) -> Matrix:
    """What a form keeps of ``dense [groups, rows, rows]``."""
    if form.sections:
        return BlockDiagonal.of(dense, form.sections)
    return dense.diagonal(dim1=1, dim2=2) if form.diagonal else dense


class _LayerOutput:
    """A layer's output as ``[groups, n, s, rows]``."""

    def __init__(self, layer: Layer[Any], view: View, samples: int) -> None:
        assert isinstance(layer, SharedInput)
        self.layer, self.view, self.samples = layer, view, samples

    def arrange(self, t: Tensor) -> Tensor:
        return per_sample(grouped(self.layer.gradients(self.view(t))), self.samples)

    def hessian(self, g: Tensor, edge: GradientEdge, reduce: bool) -> Tensor:
        """``Σ_n Σ_s ∂g_ns/∂y_ns [groups, rows, rows]``, or ``Σ_s Σ_t`` of them to ``reduce``."""
        arranged = self.arrange(g)
        groups, _, positions, rows = arranged.shape
        out = torch.zeros(groups, rows, rows, dtype=g.dtype, device=g.device)
        everywhere = [slice(None)] if reduce else [slice(s, s + 1) for s in range(positions)]
        for group in range(groups):
            for here in everywhere:
                for some in torch.arange(rows).split(max(1, _COLUMNS // arranged.numel())):
                    v = torch.zeros(len(some), *arranged.shape, dtype=g.dtype, device=g.device)
                    for i, row in enumerate(some.tolist()):
                        v[i, group, :, here, row] = 1.0
                    (found,) = batched_grad(arranged, [edge], v)
                    if found is not None:
                        out[group, some] += torch.stack(
                            [self.arrange(one)[group, :, here].sum((0, 1)) for one in found]
                        )
        return out


def _reduces(block: Block) -> bool:
    return isinstance(block.structure, Kronecker) and block.structure.sharing == "reduce"


def _used_twice(block: Block) -> CoverageError:
    return CoverageError(
        f"The weight of {block.name!r} is used several times, so the Hessian of its output is not "
        "that of one call: take Full(), UnitWise() or Diagonal() for it."
    )
