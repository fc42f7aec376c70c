"""Which entries of a layer's curvature block over ``vec(W)`` are kept, and how they are applied.

The block of a layer with ``P`` parameters has ``P^2`` entries, too many for all but small layers. A
structure keeps some of them as *factors*, sums over the data in a form of `natgrad.linalg.forms`. A
block's way through a structure:

    factors(layers)          which factors there are, as forms without numbers
    add, summaries, absorb   data -> sums of each factor, at every update
    matrices(kept)           running averages -> the factors that are decomposed
    dampings(...)            what is added to each of these, for an inverse that damps factors
    assemble(decomposed)     decomposed factors -> one object that applies the block (`Decomposed`)
    matrix(kept)             the same block in closed form, for operators and as an oracle

``add`` is for sums over positions, as each call comes. What needs the whole gradient of a sample
(``pooled``) is summarised by ``summaries``, combined over all calls of a pass, and then ``absorb``
squares it.

``decompose`` does the last steps at once; on several ranks each factor may be decomposed elsewhere.
A structure knows no layer type and no inverse, so that all of them combine: docs/own_structure.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from natgrad.damping import Damping, Relative
from natgrad.errors import CoverageError
from natgrad.inverses import Decomposed, DecomposedFactor, Inverse
from natgrad.inverses.functions import relative
from natgrad.layers import Layer
from natgrad.linalg.forms import Form, RowForm
from natgrad.linalg.symmetric import Symmetric
from natgrad.structures.decomposition import decompose_factor

AnyLayer = Layer[Any]
Shape = tuple[int, int, int]
Factors = Mapping[str, DecomposedFactor]


class Factor(NamedTuple):
    """A kept part of the block.

    Arguments:
        form: how its numbers are kept.
        of_gradients: a sum of products of two output gradients, so that the scale of the loss
            enters it squared; otherwise it is a mean over positions of the inputs.
        of_inputs: nothing but the layer's input, and nothing of its gradients, enters it. Layers
            that are called with the same input then share one sum and one decomposition.
    """

    form: Form
    of_gradients: bool
    of_inputs: bool = False


@dataclass
class Sum:
    """A factor's sum over the data since the last step.

    Arguments:
        form: how the factor's numbers are kept.
        kept: ``[form.numel]``, the sum.
        count: number of terms: for a mean over positions the divisor, and 0 as long as nothing was
            added.
    """

    form: Form
    kept: Tensor
    count: int = 0


Sums = dict[str, Sum]


class Structure(ABC):
    """``pooled``: the gradient of a sample is needed whole, so all calls of a module in one forward
    pass are brought together before anything is squared.

    ``needs``: the factors without which nothing can be preconditioned. ``in_basis``: those of them
    that are statistics in the eigenbasis of the others and are used as they are. ``whole``: nothing
    but whole gradients of samples enters, whatever products they are sums of.
    """

    pooled: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]]
    in_basis: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        """Every factor of the block, before any data is seen.

        Arguments:
            layers: all that use the weight; the first says how it is a matrix.
        """

    def fits(self, layer: AnyLayer) -> bool:
        """Whether a layer has what the structure needs. A norm layer that does not is left to
        `UnitWise` where one structure is given for a whole model.

        Arguments:
            layer: any layer of a model.
        """
        return True

    def narrowed(self, layers: Sequence[AnyLayer], max_dim: int) -> "Structure":
        """A structure that keeps less of factors that are wider than a limit; itself where none is.

        Arguments:
            layers: all that use the weight; the first says how it is a matrix.
            max_dim: widest factor that is kept whole.
        """
        return self

    def check(self, inverse: Inverse) -> None:
        """Raise CoverageError for an inverse that cannot be used with this structure.

        Arguments:
            inverse: the one that the user has chosen.
        """
        return

    def add(self, layer: AnyLayer, x: Any, g: Tensor, sums: Sums) -> None:
        """Add what is a sum over positions to those factors that are in ``sums``.

        Arguments:
            layer: the one that was called.
            x: what it kept of its input.
            g: the gradient of its output, samples in front.
            sums: those to add to, by the name of the factor; may hold some of the factors only.
        """
        return

    def summaries(
        self, layer: AnyLayer, x: Any, g: Tensor, samples: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """What is needed of whole samples, a piece of the samples at a time.

        Arguments:
            layer: the one that was called.
            x: what it kept of its input.
            g: the gradient of its output, samples in front.
            samples: number of samples that the model was called with, of which ``len(g)`` may be a
                multiple; ``None`` is not known.
        """
        return iter(())

    def combine(self, one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The summary of two calls on the same samples.

        Arguments:
            one: a summary of the first call.
            two: the summary of the same samples in the second.
        """
        return tuple(a + b for a, b in zip(one, two, strict=True))

    def folded(self, layer: AnyLayer, gs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Fewer gradients of one call that add as much to the factors as all of them do.

        Arguments:
            layer: the one that was called.
            gs: the gradients of its output for several vectors, samples in front.
        """
        return gs

    def role(self, layer: AnyLayer) -> str:
        """Calls are combined with those of the same role.

        Arguments:
            layer: one of those that use the weight.
        """
        return ""

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, decomposed: Factors
    ) -> None:
        """Add a summary to those factors that are in ``sums``.

        Arguments:
            role: of the layers whose calls were combined, as `role` names it.
            summary: of some samples, as `summaries` or `combine` gives it.
            sums: those to add to, by the name of the factor; may hold some of the factors only.
            decomposed: the factors as they were last decomposed; empty before the first refresh.
        """
        return

    def matrices(self, kept: dict[str, Tensor], forms: dict[str, Form]) -> dict[str, Tensor]:
        """The factors that are decomposed, by name, as buffers in their forms.

        Arguments:
            kept: the running averages of all factors that have seen data.
            forms: of all factors, by name.
        """
        return {name: mean for name, mean in kept.items() if name not in self.in_basis}

    def follow(self, kept: dict[str, Tensor], old: Factors, new: Factors) -> dict[str, Tensor]:
        """The factors of ``in_basis`` after a refresh.

        Arguments:
            kept: the running averages of all factors that have seen data.
            old: the decomposed factors before, whose basis those of ``in_basis`` are in; empty at
                the first refresh.
            new: the decomposed factors from now on.
        """
        return {}

    @abstractmethod
    def dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], damping: float
    ) -> dict[str, Tensor]:
        """What an inverse that damps each factor by itself adds: ``[batch]`` per factor.

        Arguments:
            kept: the factors that are decomposed, as `matrices` gives them.
            forms: of all factors.
            damping: of the whole block.
        """

    @abstractmethod
    def assemble(self, decomposed: Factors, in_basis: Mapping[str, Tensor]) -> Decomposed:
        """The decomposed block: its factors as ``blocks``, ``kronecker`` or ``rotated`` of their
        inverse.

        Arguments:
            decomposed: those factors of ``needs`` that are decomposed, of one block or of many that
                are stacked.
            in_basis: by name, the numbers ``[batch, dim]`` of the factors of ``in_basis``.
        """

    @abstractmethod
    def matrix(
        self, kept: dict[str, Tensor], forms: dict[str, Form], shape: Shape, decomposed: Factors
    ) -> Symmetric:
        """The block over ``vec(W)`` in the order ``(group, row, column)``, in closed form.

        Arguments:
            kept: the running averages of all factors.
            forms: of all factors.
            shape: ``(groups, rows, cols)`` of the weight as a matrix.
            decomposed: the factors whose eigenbasis those of ``in_basis`` are in; where it is
                empty, the eigenbasis of ``kept`` is computed.
        """

    def dense(self, kept: dict[str, Tensor], forms: dict[str, Form], shape: Shape) -> Tensor:
        """The same, ``[P, P]``.

        Arguments:
            kept: the running averages of all factors.
            forms: of all factors.
            shape: ``(groups, rows, cols)`` of the weight as a matrix.
        """
        return self.matrix(kept, forms, shape, {}).dense()

    def decompose(
        self,
        kept: dict[str, Tensor],
        forms: dict[str, Form],
        inverse: Inverse,
        damping: Damping,
    ) -> Decomposed:
        """One object for the block of these factors; raises ``torch.linalg.LinAlgError`` where one
        of them cannot be decomposed.

        Arguments:
            kept: the running averages of all factors.
            forms: of all factors.
            inverse: decomposes each factor.
            damping: of the block. An inverse that damps factors uses it now; others are told a
                damping when they are applied.
        """
        matrices = self.matrices(kept, forms)
        found = {}
        for name, damp in self.factor_dampings(matrices, forms, inverse, damping).items():
            parts = decompose_factor(inverse, forms[name], matrices[name], damp)
            if parts is None:
                raise torch.linalg.LinAlgError(f"Factor {name} cannot be decomposed.")  # type: ignore[attr-defined]
            form = forms[name]
            found[name] = DecomposedFactor(inverse, parts, form.dim, form.diagonal, form.sections)
        values = {name: kept[name].view(forms[name].batch, -1) for name in self.in_basis}
        return self.assemble(found, values)

    def factor_dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], inverse: Inverse, damping: Damping
    ) -> dict[str, Tensor]:
        """What is added to each factor before this inverse decomposes it, ``[batch]``.

        Arguments:
            kept: the factors that are decomposed, as `matrices` gives them.
            forms: of all factors.
            inverse: one that does not damp factors adds zeros.
            damping: of the whole block; a `Relative` one is a share of each factor's own mean
                eigenvalue, in every structure.
        """
        if not inverse.damps_factors:
            return {n: torch.zeros(forms[n].batch, device=kept[n].device) for n in kept}
        if isinstance(damping, Relative):
            return {n: relative(damping, forms[n].trace(kept[n]) / forms[n].dim) for n in kept}
        if not inverse.pi_corrected:
            return {n: kept[n].new_full((forms[n].batch,), damping) for n in kept}
        return self.dampings(kept, forms, damping)


def plain(layer: AnyLayer) -> str:
    """A layer in an error message.

    Arguments:
        layer: that the message is about.
    """
    return f"{layer.kind} {layer.name!r}"


def no_shared_input(layer: AnyLayer) -> CoverageError:
    """The error of a Kronecker product where there is none.

    Arguments:
        layer: whose rows have inputs of their own.
    """
    return CoverageError(
        f"Kronecker factors need an input shared by all output units, which {plain(layer)} does "
        "not have. Use UnitWise() for it."
    )


def add_vectors(total: Sum, rows: Tensor) -> None:
    """Add ``sum_n r r^T`` of ``rows [groups, n, d]``, or its diagonal where that is kept.

    Arguments:
        total: the sum that is added to.
        rows: ``[groups, n, d]``: ``n`` vectors for each of the form's matrices.
    """
    assert isinstance(total.form, RowForm)
    if total.form.diagonal:  # squares would lose the bits of 16-bit rows
        total.form.add_rows(total.kept, rows)
    else:
        dtype = total.form.operand_dtype(rows, total.kept)
        total.form.add_rows(total.kept, rows.to(dtype))
    total.count += rows.shape[1]
