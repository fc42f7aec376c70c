"""How many numbers a curvature matrix has in each structure, by layer (Schmidt, slides).

full (Σ p)²,   layer block Σ p²,   Kronecker Σ rows² + cols²,   diagonal Σ p     (p = rows·cols)
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import clean
from natgrad.errors import CoverageError
from natgrad.layers import Elementwise
from natgrad.operators import Problem
from natgrad.operators.tape import Tape
from natgrad.preconditioner import KFAC
from natgrad.structures import EKFAC, Diagonal, Full, Kronecker, Structure, UnitWise
from natgrad.tables import Column, Table, bytes_text

STRUCTURES: dict[str, Structure] = {
    "layer block": Full(limit=1 << 62),
    "unit-wise": UnitWise(),
    "EKFAC": EKFAC(),
    "Kronecker": Kronecker(),
    "diagonal": Diagonal(),
}


@dataclass(frozen=True)
class LayerSize:
    """``shape``: groups, rows, columns of its weight as a matrix, the bias as a last column.

    ``entries`` of every structure; of a parameter that no known layer holds, only those of the
    block and of the diagonal.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    parameters: int
    entries: dict[str, int]


@dataclass(frozen=True)
class Sizes:
    """``layers`` in the order of the model, in numbers of ``dtype``."""

    layers: tuple[LayerSize, ...]
    dtype: torch.dtype

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def entries(self) -> dict[str, int | None]:
        """By structure, the largest first; ``None`` where some parameter is in no known layer."""
        found: dict[str, int | None] = {"full": self.parameters**2}
        for name in STRUCTURES:
            each = [layer.entries.get(name) for layer in self.layers]
            known = [n for n in each if n is not None]
            found[name] = sum(known) if len(known) == len(each) else None
        return found

    def table(self) -> Table:
        rows = []
        for name, count in self.entries().items():
            if count is None:
                rows.append((name, "–", "–", "–"))
                continue
            size = bytes_text(count * self.dtype.itemsize)
            rows.append((name, f"{count:,}", size, f"{count / self.parameters**2:.2g}"))
        columns = (
            Column("structure"),
            *(Column(name, "right") for name in ("numbers", "bytes", "share")),
        )
        kind = str(self.dtype).removeprefix("torch.")
        title = f"Sizes of a matrix over {self.parameters:,} parameters in {kind}"
        footer = "of matrices written out; symmetric halves need half of it"
        if None in self.entries().values():
            footer += "; –: a parameter is in no layer that is known"
        return Table(title, columns, tuple(rows), footer)


def sizes(problem: Problem) -> Sizes:
    """Of the parameters that the problem's matrices are over; nothing is computed."""
    blocks: list[Block] = []
    others = list(problem.parameters)
    with suppress(CoverageError):  # no layer is known
        tape = Tape(problem, None)
        blocks, others = tape.blocks, list(tape.uncovered)
    counts = {name: problem.parameters[name].numel() for name in others}
    return sizes_of(blocks, counts, problem.dtype)


def sizes_of(blocks: Sequence[Block], others: Mapping[str, int], dtype: torch.dtype) -> Sizes:
    """Of layers as K-FAC finds them, with how many numbers each of the ``others`` has, parameters
    that no layer is known for."""
    found = [_size(block) for block in blocks]
    for name, count in others.items():
        only = {"layer block": count**2, "diagonal": count}
        found.append(LayerSize(name, "", (1, 1, count), count, only))
    return Sizes(tuple(found), dtype)


def network_sizes(model: nn.Module) -> Sizes:
    """Of all parameters of a model, from its shapes alone: it may be on the meta device."""
    kfac = KFAC(model, kl_clip=None, max_dim=None)
    parameters = {clean(name): p for name, p in model.named_parameters()}
    others = {name: parameters[name].numel() for name in kfac.uncovered}
    kfac.detach()
    return sizes_of(kfac.blocks, others, next(iter(parameters.values())).dtype)


def _size(block: Block) -> LayerSize:
    groups, rows, cols = block.shape
    entries = {name: _entries(structure, block) for name, structure in STRUCTURES.items()}
    return LayerSize(block.name, block.kind, block.shape, groups * rows * cols, entries)


def _entries(structure: Structure, block: Block) -> int:
    if isinstance(block.layers[0], Elementwise) and isinstance(structure, Kronecker | EKFAC):
        structure = UnitWise()  # as everywhere: norm layers have no Kronecker factors
    forms = [factor.form for factor in structure.factors(block.layers).values()]
    return sum(form.batch * (form.dim if form.diagonal else form.dim**2) for form in forms)


def layers_table(found: Sequence[LayerSize], more: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """A row for each layer: its shape, the sizes of its blocks, and ``more`` named columns."""
    rows = []
    for i, layer in enumerate(found):
        groups, height, width = layer.shape
        shape = f"{height} × {width}" if groups == 1 else f"{groups} · {height} × {width}"
        row = (layer.name, layer.kind, shape, f"{layer.parameters:,}")
        rows.append((*row, *(cells[i] for _, cells in more)))
    columns = (
        Column("layer"),
        Column("kind"),
        *(Column(name, "right") for name in ("matrix", "parameters")),
        *(Column(name, "right") for name, _ in more),
    )
    return Table("Layers", columns, tuple(rows), "matrix: the weight with the bias as last column")
