"""One block of the curvature matrix: a weight, the layers that use it, and its factors.

    sums of a step     ->  running averages  ->  parts of decomposed factors
    open, take_sums        estimate, fold        decompose, install

A block has these three stages and methods for each. On several ranks they may lie apart: every rank
has sums of its own data, the keepers of a factor have its average, and those that precondition have
the parts. Only the block's own methods write to it, so that all that can happen to its state is in
this file.

A weight that several modules use is one block, since it has one gradient, the sum over its uses.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.averages import NewEstimate, NewSums, RunningFactor
from natgrad.capture.change_rates import Watcher
from natgrad.capture.refusals import Refusals
from natgrad.damping import Damping
from natgrad.errors import SettingError
from natgrad.inverses import Decomposed, DecomposedFactor, Diagonalization, Inverse, Parts
from natgrad.layers import Layer
from natgrad.layers.base import real
from natgrad.linalg.forms import Form
from natgrad.structures import Structure, Sum, Sums
from natgrad.structures.decomposition import decompose_factor, factor_error

Rows = tuple[int, int]  # (start, stop)


class Block:
    """One weight, the layers that use it, and all that is known of its curvature.

    ``layers[0]`` says how the weight is a matrix; the others use the same weight (tied). Only the
    methods of a block write to it. What it holds goes through three stages, each with methods of
    its own: ``sums`` of the data since the last step, ``running`` averages, and the ``parts`` of
    decomposed factors. On several ranks each stage of a factor may live elsewhere.
    """

    def __init__(
        self,
        name: str,
        layers: list[Layer[Any]],
        structure: Structure,
        inverse: Inverse,
        factor_dtype: torch.dtype | None,
        region_terms: float | None = None,
        half_products: bool | None = None,
        measured_in_basis: bool = False,
    ) -> None:
        self.name, self.layers, self.structure, self.inverse = name, layers, structure, inverse
        self.factors = structure.factors(layers)
        self.forms: dict[str, Form] = {n: f.form for n, f in self.factors.items()}
        for form in self.forms.values():
            form.half_products = half_products
        sample = self.parameters[0]
        self.device = sample.device
        self.dtype = factor_dtype or real(sample.dtype)
        # Of decompositions and of what they are applied to: float32 or better.
        self.wide_dtype = torch.promote_types(self.dtype, torch.float32)
        self.normalises = layers[0].normalises
        # The factors that are decomposed; the others are merged into these, or in their basis.
        self.decomposes = tuple(n for n in structure.needs if n not in structure.in_basis)
        self._part_shapes = {name: self._shapes(name) for name in self.forms}
        # Whether bases must depend on the factors alone, where rounding would decide.
        self.settles = measured_in_basis or bool(structure.in_basis)
        # Whether there is something to precondition with, on all ranks together.
        self.ready = not self.decomposes
        # Terms of a region, where the layers see regions of samples instead of samples.
        self.region_terms = region_terms
        self.running: dict[str, RunningFactor] = {}
        self.sums: Sums = {}
        self.parts: dict[str, Parts] = {}
        self.solved: set[str] = set()  # factors whose parts are where they are needed
        self.moments: dict[str, Tensor] = {}  # what steps keep beside the curvature: momentum
        self.dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        self.failures = 0
        self.version = 0  # changes whenever the parts do
        self.shares_input_with: Block | None = None  # whose factors of the inputs are the same
        self.watcher: Watcher | None = None  # sees updates before they are folded
        self.lost = ""  # what happened to a parameter that the model has no longer as it was
        self.asleep = False  # all its parameters are frozen, and may be trained again
        self.refusals = Refusals()

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
    def has_gradient(self) -> bool:
        return not self.lost and all(p.grad is not None for p in self.parameters)

    @property
    def decomposed_together(self) -> bool:
        """Whether one factor's decomposition depends on the others: tied uses are merged first, and
        a damping that is split between factors depends on all of them."""
        return len(self.layers) > 1 or self.inverse.damps_factors

    def part_shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Of the tensors that precondition for a factor; one in the basis of others is itself
        one."""
        return self._part_shapes[name]

    def _shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        spec = self.forms[name].spec
        if name in self.structure.in_basis:
            return ((spec.batch, spec.dim),)
        if spec.diagonal:
            return self.inverse.diagonal_shapes(spec)
        each = (self.inverse.shapes(own) for own in self.forms[name].section_specs)
        return tuple(shape for shapes in each for shape in shapes)

    def lose(self, reason: str, *, asleep: bool = False) -> None:
        """One of the parameters was replaced, resized or frozen, so that the block preconditions
        none of them, or all are frozen and it is ``asleep``; no ``reason``: all are as they
        were."""
        self.lost, self.asleep = reason, asleep

    @property
    def refused(self) -> str:
        """Why no statistics of it can be taken, if a use of it was not understood; for reports."""
        return self.refusals.reason()

    # Statistics.

    def open(self, names: Iterable[str], dtype: torch.dtype) -> Sums:
        """The sums of these factors, made where there are none yet."""
        for name in names:
            if name not in self.sums:
                form = self.forms[name]
                kept = torch.zeros(form.numel, dtype=dtype, device=self.device)
                self.sums[name] = Sum(form, kept)
        return {name: self.sums[name] for name in names}

    def take_sum(self, name: str) -> Sum | None:
        """The sum of one factor, which leaves the block."""
        return self.sums.pop(name, None)

    def take_sums(self, among: Container[str] | None = None) -> Sums:
        """All sums, or those ``among`` some; none is left in the block."""
        taken = {n: s for n, s in self.sums.items() if among is None or n in among}
        self.sums = {}
        return taken

    def share_input(self, other: "Block | None") -> None:
        """The factors of the inputs of both are the same, as both are called with one input; of no
        ``other`` as far as is known."""
        self.shares_input_with = other

    def estimate(self, new_sums: NewSums) -> NewEstimate | None:
        """Take in new estimates of the factors that are kept here; ``fold`` follows."""
        for name in new_sums:
            if name not in self.running:
                self.running[name] = RunningFactor(self.forms[name], self.dtype, self.device)
        return NewEstimate(self.running, new_sums) if new_sums else None

    def fold(self, estimate: NewEstimate | None, fits: Tensor, decay: float) -> None:
        """New estimates -> running averages, if all of the block's ``fit``, on every rank."""
        self.dropped += ~fits
        if estimate is None:
            return
        if self.watcher is not None and fits:
            self.watcher(self, estimate, decay)
        estimate.fold(fits, decay)
        for name in self.structure.in_basis:
            if name in estimate.gaps and name in self.parts:
                self._write(name, (self.running[name].mean.view_as(self.parts[name][0]),))

    def kept(self) -> dict[str, Tensor]:
        """The running averages of the factors that have seen data."""
        return {
            name: running.mean.to(self.wide_dtype)
            for name, running in self.running.items()
            if bool(running.weight > 0)
        }

    # Decomposition.

    def decompose(
        self, names: Iterable[str], damping: Damping, rows: Mapping[str, Rows] | None = None
    ) -> dict[str, Parts | None]:
        """The parts of these factors as they are now, ``None`` for one that cannot be decomposed;
        of those in ``rows`` only these rows, as other ranks make the others.

        A factor that has seen no data is left out, and all where nothing comes of the others."""
        rows, names = rows or {}, tuple(names)
        matrices = self.structure.matrices(self.kept(), self.forms)
        begins = () if self.ready else names  # a block begins with all of its factors
        if not matrices.keys() >= set(self.decomposes if self.inverse.damps_factors else begins):
            return {}  # the damping of one depends on the others
        dampings = self._dampings(matrices, damping)
        found = {
            name: decompose_factor(
                self.inverse, self.forms[name], matrices[name], dampings[name], rows.get(name)
            )
            for name in names
            if name in matrices
        }
        if self.settles and isinstance(self.inverse, Diagonalization):
            for name, parts in found.items():
                if parts is not None and not self.forms[name].diagonal:
                    own = len(parts) // max(1, len(self.forms[name].sections))
                    for first in range(0, len(parts), own):
                        self.inverse.settle(parts[first : first + own])
        return found

    def install(
        self, parts: dict[str, Parts], solved: Iterable[str], keeps: Container[str] | None = None
    ) -> None:
        """Precondition with these from now on; what is in their basis follows them, if this rank
        ``keeps`` it. ``solved``: what is decomposed now, here or elsewhere."""
        old = {}
        if self.structure.in_basis and self.parts:  # new parts are written over the old ones
            before = {n: tuple(p.clone() for p in one) for n, one in self.parts.items()}
            old = self._decomposed_factors(before)
        for name, new in parts.items():
            self._write(name, new)
        if parts and self.structure.in_basis:
            kept = self.kept()
            new_basis = self._decomposed_factors(self.parts)
            for name, value in self.structure.follow(kept, old, new_basis).items():
                if name in kept:
                    self.running[name].mean.copy_(value.flatten())
                if keeps is None or name in keeps:
                    self._write(name, (value,))
        self._solve(self.solved | set(solved))

    def install_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Precondition with these rows ``[n, d]`` of a factor's inverse from now on; its other rows
        come from other ranks, in the same refresh."""
        if name not in self.parts:
            (shape,) = self.part_shapes(name)
            self.parts[name] = (torch.zeros(shape, dtype=self.wide_dtype, device=self.device),)
        self.parts[name][0][0, start : start + len(rows)].copy_(rows)
        self.version += 1

    def _solve(self, names: set[str]) -> None:
        self.solved, self.ready = names, names.issuperset(self.decomposes)

    def fail(self) -> None:
        """A decomposition failed; the last good one stays."""
        self.failures += 1

    def stack(self, parts: dict[str, Parts]) -> None:
        """Keep the same parts as views of these, which are stacked with those of other blocks."""
        self.parts = parts

    def leave_stack(self) -> None:
        """Keep the same parts and moments by themselves, so that the stack's own can go."""
        self.parts = {n: tuple(part.clone() for part in one) for n, one in self.parts.items()}
        self.moments = {name: moment.clone() for name, moment in self.moments.items()}

    def keep_moments(self, moments: dict[str, Tensor]) -> None:
        """Keep these, or the same ones as views of what is stacked with those of other blocks."""
        self.moments = moments

    def decomposed_factors(self) -> dict[str, DecomposedFactor]:
        """The factors as they were last decomposed, as far as they are on this rank."""
        return self._decomposed_factors(self.parts)

    def decomposed(self, parts: dict[str, Parts] | None = None) -> Decomposed:
        """One object that applies the block, or a stack of such blocks with these ``parts``."""
        parts = self.parts if parts is None else parts
        values = {name: parts[name][0] for name in self.structure.in_basis}
        return self.structure.assemble(self._decomposed_factors(parts), values)

    def _decomposed_factors(self, parts: Mapping[str, Parts]) -> dict[str, DecomposedFactor]:
        return {
            name: DecomposedFactor(
                self.inverse, parts[name], form.dim, form.diagonal, form.sections
            )
            for name in self.decomposes
            if name in parts and (form := self.forms[name])
        }

    def _write(self, name: str, parts: Parts) -> None:
        """Keep parts, in place where there are some already: a stack may look at them."""
        found = tuple(tuple(part.shape) for part in parts)
        if found != (right := self.part_shapes(name)):
            raise SettingError(
                f"{self.inverse!r} decomposed factor {name} of {self.kind} {self.name!r} into "
                f"parts of shapes {found}, but its shapes() says {right}: correct one of the two."
            )
        self.version += 1
        old = self.parts.get(name)
        if old is None:
            self.parts[name] = parts
            return
        for a, b in zip(old, parts, strict=True):
            a.copy_(b)

    def error(self, name: str, damping: Damping) -> float:
        """How far the decomposition of a factor is from the factor now, relative."""
        matrices = self.structure.matrices(self.kept(), self.forms)
        if name not in matrices or name not in self.parts:
            return float("inf")
        own = self._dampings(matrices, damping)[name]
        form, parts = self.forms[name], self.parts[name]
        return factor_error(self.inverse, form, parts, matrices[name], own)

    def _dampings(self, matrices: dict[str, Tensor], damping: Damping) -> dict[str, Tensor]:
        return self.structure.factor_dampings(matrices, self.forms, self.inverse, damping)

    # State.

    def restore(
        self,
        averages: Mapping[tuple[str, str], Tensor],
        parts: dict[str, Parts],
        solved: Iterable[str],
        moments: dict[str, Tensor],
        counts: tuple[int, int],
        shares_input_with: "Block | None",
    ) -> None:
        """Be as a saved block was, and forget everything else. ``averages``: mean, weight and
        change by factor, not copied; ``counts``: updates dropped, and decompositions failed."""
        self.sums, self.running, self.parts, self.moments = {}, {}, parts, moments
        for (name, field), tensor in averages.items():
            if name not in self.running:
                self.running[name] = RunningFactor(self.forms[name], self.dtype, self.device)
            setattr(self.running[name], field, tensor)
        self._solve(set(solved))
        self.dropped.fill_(counts[0])
        self.failures = counts[1]
        self.shares_input_with = shares_input_with
        self.version += 1

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything kept between steps, by what it is for."""
        for running in self.running.values():
            yield "factors", running.mean
        for total in self.sums.values():
            yield "sums", total.kept
        for parts in self.parts.values():
            for part in parts:
                yield "inverses", part
        for moment in self.moments.values():
            yield "momentum", moment
