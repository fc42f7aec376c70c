"""One block of the curvature matrix: a weight, the layers that use it, and its factors."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.inverses import Inverse, Parts, contained
from natgrad.layers import Layer
from natgrad.layers.base import real
from natgrad.linalg.forms import DiagonalForm, Form
from natgrad.runtime.factors import RunningFactor, fold_all
from natgrad.structures import Structure, Sum, Sums


class Block:
    """``layers[0]`` says how the weight is a matrix; the others use the same weight (tied)."""

    def __init__(
        self,
        name: str,
        layers: list[Layer[Any]],
        structure: Structure,
        inverse: Inverse,
        factor_dtype: torch.dtype | None,
    ) -> None:
        self.name, self.layers, self.structure, self.inverse = name, layers, structure, inverse
        self.factors = structure.factors(layers)
        self.forms: dict[str, Form] = {n: f.form for n, f in self.factors.items()}
        sample = self.parameters[0]
        self.device = sample.device
        self.dtype = factor_dtype or real(sample.dtype)
        self.running: dict[str, RunningFactor] = {}
        self.sums: Sums = {}
        self.parts: dict[str, Parts] = {}
        self.dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        self.failures = 0
        self.version = 0  # changes whenever the parts do
        self.twin: Block | None = None  # a block that sees the same inputs

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.layers[0].parameters

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.layers[0].shape

    @property
    def kind(self) -> str:
        return " + ".join(layer.kind for layer in self.layers)

    @property
    def normalises(self) -> bool:
        return self.layers[0].normalises

    @property
    def ready(self) -> bool:
        """Whether there is something to precondition with."""
        return all(name in self.parts for name in self.structure.needs)

    # Statistics.

    def open(self, names: Iterable[str], dtype: torch.dtype) -> Sums:
        """The sums of these factors, made where there are none yet."""
        for name in names:
            if name not in self.sums:
                form = self.forms[name]
                kept = torch.zeros(form.numel, dtype=dtype, device=self.device)
                self.sums[name] = Sum(form, kept)
        return {name: self.sums[name] for name in names}

    def fold(self, samples: int, scale: float, decay: float) -> bool:
        """Sums since the last step -> running averages; returns whether there was anything.

        ``scale`` makes a captured gradient that of one sample's loss; the block is a mean over
        ``samples``."""
        sums, self.sums = self.sums, {}
        news = {}
        for name, total in sums.items():
            if not total.count:
                continue
            factor = scale**2 / samples if self.factors[name].of_gradients else 1 / total.count
            news[name] = total.kept, factor
            if name not in self.running:
                self.running[name] = RunningFactor(self.forms[name], self.dtype, self.device)
        if not news:
            return False
        self.dropped += ~fold_all(self.running, news, decay)
        for name in self.structure.in_basis:
            if name in news and name in self.parts:
                self.write(name, (self.running[name].mean.view_as(self.parts[name][0]),))
        return True

    def kept(self) -> dict[str, Tensor]:
        """The running averages of the factors that have seen data."""
        return {
            name: running.mean.to(torch.promote_types(running.mean.dtype, torch.float32))
            for name, running in self.running.items()
            if bool(running.weight > 0)
        }

    # Decomposition.

    def refresh(self, names: Iterable[str], damping: float) -> list[str]:
        """Decompose these factors anew; returns the names of those that could not be.

        What cannot be decomposed keeps its last good parts.
        """
        kept = self.kept()
        matrices = self.structure.decomposed(kept, self.forms)
        if not set(self.structure.needs) <= {*matrices, *self.structure.in_basis}:
            return []  # not all factors have seen data yet
        dampings = self.structure.dampings(matrices, self.forms, damping)
        old = {}
        if self.structure.in_basis:  # new parts are written over the old ones
            old = {n: tuple(p.clone() for p in parts) for n, parts in self.parts.items()}
        failed = []
        for name, matrix in matrices.items():
            if name not in names and name in self.parts:
                continue
            parts = self._decompose(self.forms[name], matrix, dampings[name])
            if parts is None:
                failed.append(name)
                self.failures += 1
            else:
                self.write(name, parts)
        if self.structure.in_basis and "A" in self.parts and "G" in self.parts:
            for name, value in self.structure.follow(kept, old, self.parts).items():
                if name in kept:
                    self.running[name].mean.copy_(value.flatten())
                self.write(name, (value,))
        return failed

    def _decompose(self, form: Form, matrix: Tensor, damping: Tensor) -> Parts | None:
        if isinstance(form, DiagonalForm):
            return self.inverse.decompose_diagonal(form.values(matrix), damping)
        return contained(self.inverse, form.dense(matrix), damping)

    def write(self, name: str, parts: Parts) -> None:
        """Keep parts, in place where there are some already: a stack may look at them."""
        self.version += 1
        old = self.parts.get(name)
        if old is None or any(a.shape != b.shape for a, b in zip(old, parts, strict=True)):
            self.parts[name] = parts
            return
        for a, b in zip(old, parts, strict=True):
            a.copy_(b)

    def error(self, name: str, damping: float) -> float:
        """How far the decomposition of a factor is from the factor now, relative."""
        matrices = self.structure.decomposed(self.kept(), self.forms)
        if name not in matrices or name not in self.parts:
            return float("inf")
        dampings = self.structure.dampings(matrices, self.forms, damping)
        dense = self.forms[name].dense(matrices[name])
        return float(self.inverse.error(self.parts[name], dense, dampings[name]))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything kept between steps, by what it is for."""
        for running in self.running.values():
            yield "factors", running.mean
        for total in self.sums.values():
            yield "sums", total.kept
        for parts in self.parts.values():
            for part in parts:
                yield "inverses", part
