"""Spectral complexity, ``R = Π ‖A_i‖_σ · (Σ_i (‖A_iᵀ - M_iᵀ‖_{2,1} / ‖A_i‖_σ)^⅔)^{3/2}``.

Bartlett et al. 2017.

``A_i`` are the linear maps of the layers, ``M_i`` zero or those of a reference such as the initial
weights. With margins of at least ``γ`` on the data ``X``, the error on other data is bounded by
``‖X‖ R / (γ N)`` up to logarithms. The bound itself is far above 1; what counts is that it
follows the excess risk over training and between data sets.

Everything between the layers is taken to be 1-Lipschitz, as ReLU, tanh and pooling without overlap
are, and the layers to follow each other; with shortcuts it is a measure and no bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.checks import Range, number
from natgrad.errors import SettingError
from natgrad.measures.classes import margin_quantile
from natgrad.measures.displaced_parameters import Weights, named_weights
from natgrad.measures.inputs import single_input
from natgrad.measures.linear_maps import LinearMap, is_map, is_norm, map_of, norm_scale
from natgrad.operators import Problem
from natgrad.tables import Column, Table


@dataclass(frozen=True)
class SpectralLayer:
    """One layer's share of the bound.

    Arguments:
        name: of the module, with the number of the call from the second call on.
        norm: ``‖A‖_σ``, the largest singular value.
        rows: ``‖Aᵀ - Mᵀ‖_{2,1}``, the sum of the lengths of all rows.
        converged: whether the norm was found to its tolerance; if not, it is a lower bound.
    """

    name: str
    norm: float
    rows: float
    converged: bool


@dataclass(frozen=True)
class SpectralBound:
    """Spectral complexity, and what it is made of.

    Arguments:
        layers: in the order in which they are called.
        inputs: ``‖X‖ = (Σ |x_n|²)^½``.
        samples: ``N``.
        margin: ``γ``, if a quantile was asked for, else ``None``.
    """

    layers: tuple[SpectralLayer, ...]
    inputs: float
    samples: int
    margin: float | None = None

    @property
    def lipschitz(self) -> float:
        """``Π ‖A_i‖_σ``."""
        return exp(self._log_lipschitz) if self._log_lipschitz < 700 else float("inf")

    @property
    def correction(self) -> float:
        total = sum((one.rows / one.norm) ** (2 / 3) for one in self.layers if one.norm)
        return float(total**1.5)

    @property
    def complexity(self) -> float:
        """``R``."""
        return self.lipschitz * self.correction

    @property
    def normalised(self) -> float:
        """``‖X‖ R / (γ N)``."""
        if self.margin is None:
            raise SettingError(
                "The spectral bound was measured without a margin: give quantile=0.1, for the "
                "margin that 90% of the samples have."
            )
        return self.inputs * self.complexity / (self.margin * self.samples)

    @property
    def _log_lipschitz(self) -> float:
        return sum(log(one.norm) if one.norm else float("-inf") for one in self.layers)

    def table(self) -> Table:
        columns = (Column("layer"), Column("‖A‖_σ", "right"), Column("‖Aᵀ-Mᵀ‖₂₁", "right"))
        rows = tuple(
            (one.name, f"{one.norm:.4g}" + "+" * (not one.converged), f"{one.rows:.4g}")
            for one in self.layers
        )
        footer = f"R = {self.lipschitz:.4g} · {self.correction:.4g} = {self.complexity:.4g}"
        if self.margin is not None:
            footer += f"; with margin {self.margin:.4g}: {self.normalised:.4g}"
        return Table("Spectral complexity", columns, rows, footer)

    def __str__(self) -> str:
        return str(self.table())


def spectral_bound(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    reference: Weights = None,
    quantile: float | None = None,
) -> SpectralBound:
    """Of Linear layers and convolutions, each together with the BatchNorm that follows it; a module
    with other parameters raises.

    Arguments:
        model: the network, or a `Problem`, which brings loss, data and parameters along: leave
            these out then, since one given beside it raises `SettingError`. Dropout and BatchNorm
            must be in evaluation mode (``model.eval()``).
        loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits with
            ``reduction="mean"``, as a function, a module or a ``functools.partial``; or any
            function of (output, target) that returns the mean over the samples. With ``quantile`` a
            cross-entropy.
        data: one batch, or an iterable of batches that can be iterated again, such as a
            ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a tuple
            of inputs is passed as several arguments, or a mapping whose ``labels`` are the targets
            and whose other entries are keyword arguments of the model. Inputs must be one
            floating-point tensor.
        reference: ``M``, the initial weights as a model or a state dict with the same names;
            ``None`` is zeros.
        quantile: from 0 to 1: of the margins ``f_y - max_{c≠y} f_c`` over the data, to normalise
            by. 0.1 is usual; ``None`` leaves margins out. Needs all data on one process, and a
            positive margin there.
    """
    problem = Problem.of(model, loss, data)
    if quantile is not None:
        number(quantile, "quantile", Range(0, 1))
    initial = None if reference is None else named_weights(reference, "reference")
    layers = tuple(_measured(name, one, initial) for name, one in _layers(problem).items())
    square = torch.zeros(1, dtype=torch.float64)
    for batch in problem.batches("inputs"):
        square += float(single_input(batch).double().square().sum())
    inputs = float(problem.totals(square)) ** 0.5
    margin = None if quantile is None else margin_quantile(problem, quantile)
    return SpectralBound(layers, inputs, problem.samples, margin)


@dataclass
class _Layer:
    """A call of a module, and the norm that took its output."""

    module: nn.Module
    path: str
    inputs: tuple[int, ...]
    norm: nn.Module | None = None
    norm_path: str = ""

    def map(self, named: Mapping[str, Tensor] | None) -> LinearMap:
        """With the weights and statistics of ``named``, or the module's own."""
        if is_norm(self.module):
            return map_of(self.module, self.inputs, _scale(self.module, self.path, named))
        weight = _get(self.module, self.path, "weight", named)
        scale = None if self.norm is None else _scale(self.norm, self.norm_path, named)
        return map_of(self.module, self.inputs, weight, scale)


def _scale(norm: nn.Module, path: str, named: Mapping[str, Tensor] | None) -> Tensor:
    eps: Any = norm.eps
    weight = None if norm.weight is None else _get(norm, path, "weight", named)
    return norm_scale(_get(norm, path, "running_var", named), weight, eps)


def _get(module: nn.Module, path: str, what: str, named: Mapping[str, Tensor] | None) -> Tensor:
    name = f"{path}.{what}" if path else what
    if named is not None and name not in named:
        raise SettingError(
            f"The reference has no {name!r}, which the model has: give a model of the same kind or "
            "its state_dict(), or None for zeros."
        )
    found: Tensor = getattr(module, what) if named is None else named[name]
    return found


@torch.no_grad()
def _layers(problem: Problem) -> dict[str, _Layer]:
    """In the order of their calls, by name."""
    found: dict[str, _Layer] = {}
    outputs: list[tuple[Tensor, _Layer]] = []  # kept, so that no other tensor takes their place

    def hook(module: nn.Module, args: Any, output: Any, path: str) -> None:
        x = args[0]
        if is_norm(module):
            before = next((one for y, one in reversed(outputs) if y is x), None)
            if before is not None and before.norm is None and not is_norm(before.module):
                before.norm, before.norm_path = module, path
                return
        calls = sum(one.module is module for one in found.values())
        layer = _Layer(module, path, tuple(x.shape[1:]))
        found[path + f" (call {calls + 1})" * (calls > 0)] = layer
        outputs.append((output, layer))

    handles = []
    try:
        for path, module in problem.model.named_modules():
            if is_map(module):

                def seen(m: nn.Module, args: Any, out: Any, path: str = path) -> None:
                    hook(m, args, out, path)

                handles.append(module.register_forward_hook(seen))
            elif "parametrizations" in path.split("."):
                continue  # what a weight is made of, as in weight_norm
            elif any(True for _ in module.parameters(recurse=False)):
                raise SettingError(
                    f"The spectral bound is of Linear layers, convolutions and BatchNorm, and "
                    f"{type(module).__name__} {path!r} is none of them: measure a part of the "
                    "model without it."
                )
        problem.output(next(iter(problem.data)))
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise SettingError(
            "The model called no Linear layer and no convolution, so there is no spectral bound: "
            "give a model with layers."
        )
    return found


def _measured(name: str, layer: _Layer, initial: Mapping[str, Tensor] | None) -> SpectralLayer:
    found = layer.map(None)
    norm = found.spectral_norm()
    if initial is not None:
        found = replace(found, weight=found.weight - layer.map(initial).weight.to(found.weight))
    return SpectralLayer(name, float(norm), found.row_norms(), norm.method[:3] != "NOT")
