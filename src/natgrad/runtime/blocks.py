"""One block of the curvature matrix: a weight, the layers that use it, and its factors."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.inverses import Inverse, Parts, contained
from natgrad.layers import Layer
from natgrad.layers.base import real
from natgrad.linalg.forms import DiagonalForm, Form
from natgrad.runtime.factors import Estimate, News, RunningFactor
from natgrad.structures import Structure, Sum, Sums

__all__ = ["Block", "News"]


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
        self.solved: set[str] = set()  # factors whose parts are where they are needed
        self.dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        self.failures = 0
        self.version = 0  # changes whenever the parts do
        self.twin: Block | None = None  # a block that sees the same inputs
        # Terms of a region, where the layers see regions of samples instead of samples.
        self.region_terms: float | None = None

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
    def has_gradient(self) -> bool:
        return all(p.grad is not None for p in self.parameters)

    @property
    def ready(self) -> bool:
        """Whether there is something to precondition with, here or at the ranks that do."""
        return all(
            name in self.solved
            for name in self.structure.needs
            if name not in self.structure.in_basis
        )

    def part_shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Of the tensors that precondition for a factor; one in the basis of others is itself
        one."""
        spec = self.forms[name].spec
        in_basis = name in self.structure.in_basis
        return ((spec.batch, spec.dim),) if in_basis else self.inverse.shapes(spec)

    # Statistics.

    def open(self, names: Iterable[str], dtype: torch.dtype) -> Sums:
        """The sums of these factors, made where there are none yet."""
        for name in names:
            if name not in self.sums:
                form = self.forms[name]
                kept = torch.zeros(form.numel, dtype=dtype, device=self.device)
                self.sums[name] = Sum(form, kept)
        return {name: self.sums[name] for name in names}

    def estimate(self, news: News) -> Estimate | None:
        """Take in new estimates of the factors that are kept here; ``fold`` follows."""
        for name in news:
            if name not in self.running:
                self.running[name] = RunningFactor(self.forms[name], self.dtype, self.device)
        return Estimate(self.running, news) if news else None

    def fold(self, estimate: Estimate, fits: Tensor, decay: float) -> None:
        """New estimates -> running averages, if all of the block's ``fit``."""
        estimate.fold(fits, decay)
        for name in self.structure.in_basis:
            if name in estimate.lags and name in self.parts:
                self.write(name, (self.running[name].mean.view_as(self.parts[name][0]),))

    def kept(self) -> dict[str, Tensor]:
        """The running averages of the factors that have seen data."""
        return {
            name: running.mean.to(torch.promote_types(running.mean.dtype, torch.float32))
            for name, running in self.running.items()
            if bool(running.weight > 0)
        }

    # Decomposition.

    def decompose(self, names: Iterable[str], damping: float) -> dict[str, Parts | None]:
        """The parts of these factors as they are now, ``None`` for one that cannot be decomposed.

        A factor that has seen no data is left out."""
        matrices = self.structure.decomposed(self.kept(), self.forms)
        found: dict[str, Parts | None] = {}
        if not self.inverse.joint and not set(self.structure.needs) <= set(matrices):
            return found
        dampings = self._dampings(matrices, damping)
        for name in names:
            if name in matrices:
                found[name] = self._decompose(self.forms[name], matrices[name], dampings[name])
        return found

    def install(self, parts: dict[str, Parts], keeps: Container[str] | None = None) -> None:
        """Precondition with these from now on; what is in their basis follows them, if this rank
        ``keeps`` it."""
        old = {}
        if self.structure.in_basis:  # new parts are written over the old ones
            old = {n: tuple(p.clone() for p in one) for n, one in self.parts.items()}
        for name, new in parts.items():
            self.write(name, new)
        if parts and self.structure.in_basis and "A" in self.parts and "G" in self.parts:
            kept = self.kept()
            for name, value in self.structure.follow(kept, old, self.parts).items():
                if name in kept:
                    self.running[name].mean.copy_(value.flatten())
                if keeps is None or name in keeps:
                    self.write(name, (value,))

    def _decompose(self, form: Form, matrix: Tensor, damping: Tensor) -> Parts | None:
        if isinstance(form, DiagonalForm):
            return self.inverse.decompose_diagonal(form.values(matrix), damping)
        return contained(self.inverse, lambda: form.dense(matrix), damping)

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
        own = self._dampings(matrices, damping)[name]
        dense = self.forms[name].dense(matrices[name])
        return float(self.inverse.error(self.parts[name], dense, own))

    def _dampings(self, matrices: dict[str, Tensor], damping: float) -> dict[str, Tensor]:
        """What is added to each factor before it is decomposed, ``[batch]``."""
        if self.inverse.joint:  # damped when applied
            return {n: torch.zeros(self.forms[n].batch, device=self.device) for n in matrices}
        return self.structure.dampings(matrices, self.forms, damping)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything kept between steps, by what it is for."""
        for running in self.running.values():
            yield "factors", running.mean
        for total in self.sums.values():
            yield "sums", total.kept
        for parts in self.parts.values():
            for part in parts:
                yield "inverses", part
