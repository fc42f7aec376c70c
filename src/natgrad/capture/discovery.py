"""Which parameters of a model are preconditioned, by which block, and why the others are not.

A module becomes one or more layers (`layers_of`), all layers of one weight become a block, and a
parameter in no block is listed with its reason. Nothing is left out silently: a model without any
block is an error, and so is a pattern of ``include`` or ``exclude`` that matches no module.

Tied weights are one block (`natgrad.capture.ties`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from natgrad.capture.blocks import Block
from natgrad.capture.ties import tied
from natgrad.comm.layouts import is_sharded
from natgrad.errors import CoverageError
from natgrad.inverses import Inverse
from natgrad.layers import Elementwise, Layer, layers_of, registered
from natgrad.layers.bare import Bare
from natgrad.layers.experts import Expert, experts_of
from natgrad.layers.registry import Unknown
from natgrad.layers.row_parts import Split, parts_of
from natgrad.structures import Diagonal, Identity, Kronecker, Structure, UnitWise
from natgrad.structures.per_sample import PerSample

L = TypeVar("L", bound=Layer[Any])
Pattern = str | nn.Module
EXCLUDED, NOT_INCLUDED = "excluded", "not among include"
FROZEN = "frozen"
BY_THE_USER = (EXCLUDED, NOT_INCLUDED)  # reasons that are no surprise
StructureOf = Structure | Callable[[Layer[Any]], Structure] | None


@dataclass(frozen=True)
class Uncovered:
    """A parameter that is left to the optimizer."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """What the user chose, as one value."""

    structure: StructureOf
    inverse: Inverse
    include: tuple[Pattern, ...] | None
    exclude: tuple[Pattern, ...]
    factor_dtype: torch.dtype | None
    batch_axis: int
    regions: Mapping[str, float] = field(default_factory=dict)
    half_products: bool | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    split: Split | None = None
    max_dim: int | None = None
    without_statistics: bool = False  # whether steps need no curvature
    in_basis: bool = False  # whether steps measure along the vectors of eigenbases
    # Whether a parameter that is no matrix of a layer has a block: not if steps are of matrices.
    bare: bool | None = None


def discover(
    root: nn.Module, choice: Choice, *, again: bool = False
) -> tuple[list[Block], dict[str, Uncovered]]:
    """The blocks of ``root`` in the order of its modules, and all other parameters by name.
    ``again``: what was there at first may have gone since, with all that a pattern matched."""
    uncovered: dict[str, Uncovered] = {}
    layers: list[Layer[Any]] = []
    bare: list[Bare] = []
    claimed: set[nn.Module] = set()
    if not again:
        _check_patterns(root, choice)
    for raw_name, module in root.named_modules():
        name = clean(raw_name)
        own = list(module.named_parameters(recurse=False))
        # A weight that is computed leaves a module without a bias no parameter of its own.
        if module in claimed or not (own or is_parametrized(module)):
            continue
        _refuse_lazy(name, module)
        excluded = _excluded(name, module, choice)
        views = excluded or layers_of(name, module)
        if isinstance(views, str):
            experts = [] if excluded else experts_of(name, module, choice.split)
            stacked = {id(p): layer for layer in experts for p in layer.parameters}
            for short, parameter in own:
                full = f"{name}.{short}" if name else short
                reason = views if parameter.requires_grad else FROZEN
                if id(parameter) in stacked:
                    found = of_experts(stacked[id(parameter)], choice)
                    reason = found if isinstance(found, str) else ""
                elif isinstance(reason, Unknown) and not is_sharded(parameter):
                    if choice.bare:
                        bare.append(_placed(Bare(full, module, short), name, choice))
                    elif choice.bare is not None:
                        reason = f"{reason}, and {_OF_MATRICES}"
                uncovered[full] = Uncovered(full, type(module).__name__, reason)
            layers += [
                expert
                for expert in experts
                if expert.parameters and isinstance(of_experts(expert, choice), Structure)
            ]
            continue
        parent = root.get_submodule(raw_name.rpartition(".")[0])
        views = [
            part
            for layer in views
            for part in (parts_of(layer, choice.split, parent) if layer.call is None else [layer])
        ]
        for layer in views:
            claimed.update(_placed(layer, name, choice).claims)
        layers += [layer for layer in views if layer.parameters]
    biases = {id(layer.bias) for layer in layers}  # before ties part some from their weights
    seen = {id(p) for layer in layers for p in layer.parameters}
    layers += [u for u in bare if u.weight is not None and id(u.weight) not in seen]
    blocks = [
        Block(
            group[0].name,
            group,
            _structure(group, choice),
            choice.inverse,
            choice.factor_dtype,
            _region_terms(group, choice),
            choice.half_products,
            choice.in_basis,
        )
        for group in tied(layers, biases=bool(choice.bare))
    ]
    covered = {id(p) for block in blocks for p in block.parameters}
    for full, parameter in root.named_parameters():
        full = clean(full)
        if id(parameter) in covered:
            uncovered.pop(full, None)
        elif full not in uncovered or id(parameter) in biases:
            reason = "a bias of a tied weight"
            if id(parameter) not in biases:
                reason = "its module computes its weight from it, and KFAC steps weights themselves"
            uncovered[full] = Uncovered(full, "", reason if parameter.requires_grad else FROZEN)
    if not again and all(isinstance(block.layers[0], Bare) for block in blocks):
        kinds = [(block.name, type(block.layers[0].module).__name__) for block in blocks]
        alone = [
            Uncovered(name, kind, f"no layer is registered for {kind}") for name, kind in kinds
        ]
        raise CoverageError(
            f"{type(root).__name__} has no layer that KFAC can precondition "
            f"({_reasons([*uncovered.values(), *alone])}). Supported are "
            f"{', '.join(registered())}; add your own with @natgrad.register."
        )
    return blocks, uncovered


def _reasons(uncovered: Iterable[Uncovered]) -> str:
    """Why nothing is covered: of what is trained, kind by kind. What an adapter leaves frozen would
    be hundreds of names."""
    uncovered = list(uncovered)
    if not uncovered:
        return "it has no parameters"
    trained = sorted({f"{u.kind or u.name}: {u.reason}" for u in uncovered if u.reason != FROZEN})
    parts = trained[:_REASONS]
    if len(trained) > _REASONS:
        parts.append(f"{len(trained) - _REASONS} more")
    if frozen := sum(u.reason == FROZEN for u in uncovered):
        others = "other " if trained else ""
        parts.append(f"{frozen} {others}parameter{' is' if frozen == 1 else 's are'} {FROZEN}")
    return "; ".join(parts)


_REASONS = 8  # that an error lists
_OF_MATRICES = "steps of this geometry are of matrices"
_OF_OPERATORS = "a stack of experts has blocks in steps alone, not in matrices"
_OF_EXPERTS = (
    "it is a stack of experts, whose rows are told apart but not the samples that they are of, so "
    "that {!r} cannot be kept of it: pass a function as structure=, which returns "
    "natgrad.Kronecker() for natgrad.layers.Expert"
)


def clean(name: str) -> str:
    """A module's or parameter's name without the wrappers of torch.compile."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def default_structure(layer: Layer[Any]) -> Structure:
    if layer.prefers_diagonal:
        return Diagonal()
    return UnitWise() if isinstance(layer, Elementwise) else Kronecker()


def of_experts(layer: Expert, choice: Choice) -> Structure | str:
    """What is kept of an expert's block, or why it has none."""
    if choice.bare is None:
        return _OF_OPERATORS
    given = choice.structure
    wanted = given(layer) if callable(given) and not isinstance(given, Structure) else given
    wanted = Kronecker() if wanted is None else wanted
    if isinstance(wanted, Kronecker) and wanted.sharing == "expand":
        return wanted
    # Steps that make sense without curvature are made without it.
    return Identity() if choice.without_statistics else _OF_EXPERTS.format(wanted)


def _structure(group: Sequence[Layer[Any]], choice: Choice) -> Structure:
    layer, wanted = group[0], choice.structure
    if isinstance(layer, Expert):
        of_stack = of_experts(layer, choice)
        assert isinstance(of_stack, Structure)
        of_stack.check(choice.inverse)
        return of_stack if choice.max_dim is None else of_stack.narrowed(group, choice.max_dim)
    if wanted is None:
        chosen = default_structure(layer)
    elif layer.prefers_diagonal and isinstance(wanted, Structure):
        chosen = wanted if isinstance(wanted, PerSample) else Diagonal()
    elif isinstance(wanted, Structure):
        # One structure for the whole model leaves norm layers alone where it cannot hold for them.
        chosen = wanted if wanted.fits(layer) or not isinstance(layer, Elementwise) else UnitWise()
    else:
        chosen = wanted(layer)
        if not isinstance(chosen, Structure):
            raise CoverageError(
                f"The function passed as structure returned {chosen!r} for {layer.kind} "
                f"{layer.name!r}; return a structure such as natgrad.Kronecker()."
            )
        if layer.prefers_diagonal and not chosen.fits(layer):
            chosen = Diagonal()
    chosen.check(choice.inverse)
    return chosen if choice.max_dim is None else chosen.narrowed(group, choice.max_dim)


def _refuse_lazy(name: str, module: nn.Module) -> None:
    if any(is_lazy(p) for p in module.parameters(recurse=False)):
        raise CoverageError(
            f"{type(module).__name__} {name!r} has parameters without a shape yet. Run one batch "
            "through the model before making KFAC (and the optimizer)."
        )


def _matches(name: str, module: nn.Module, patterns: Iterable[Pattern]) -> bool:
    for pattern in patterns:
        if isinstance(pattern, nn.Module):
            if any(module is inner for inner in pattern.modules()):
                return True
        elif fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
            return True
    return False


def _excluded(name: str, module: nn.Module, choice: Choice) -> str:
    if choice.include is not None and not _matches(name, module, choice.include):
        return NOT_INCLUDED
    return EXCLUDED if _matches(name, module, choice.exclude) else ""


def _region_terms(uses: list[Layer[Any]], choice: Choice) -> float | None:
    """By the first pattern that has all uses of the weight."""
    for pattern, terms in choice.regions.items():
        if all(_matches(layer.name, layer.module, [pattern]) for layer in uses):
            if isinstance(uses[0], Expert):
                raise CoverageError(
                    f"regions has {pattern!r}, which matches the experts {uses[0].name!r}, of "
                    "which each sees regions of all samples: leave them out with exclude=[...]."
                )
            return terms
    return None


def _placed(layer: L, name: str, choice: Choice) -> L:
    """A layer that knows where its samples are."""
    axis = _axis(name, layer.module, choice)
    layer.axis_given = axis is not None
    layer.batch_axis = choice.batch_axis if axis is None else axis
    return layer


def _axis(name: str, module: nn.Module, choice: Choice) -> int | None:
    """Where the user says that the samples of a module are."""
    found = (axis for pattern, axis in choice.axes.items() if _matches(name, module, [pattern]))
    return next(found, None)


def _check_patterns(root: nn.Module, choice: Choice) -> None:
    """A pattern that matches nothing is a mistake, and would silently do nothing."""
    named = [(clean(name), module) for name, module in root.named_modules()]
    given: dict[str, Iterable[Pattern]] = {"include": choice.include or ()}
    given |= {
        "exclude": choice.exclude,
        "regions": choice.regions,
        "batch_axis": choice.axes,
        "split": choice.split or (),
    }
    stacks = [clean(name) for name, p in root.named_parameters() if p.ndim == 3]
    for label, patterns in given.items():
        for pattern in patterns:
            if label == "split" and any(fnmatchcase(name, str(pattern)) for name in stacks):
                continue
            if not any(_matches(name, module, [pattern]) for name, module in named):
                what = pattern if isinstance(pattern, str) else type(pattern).__name__
                raise CoverageError(
                    f"{label} has {what!r}, which matches no module of {type(root).__name__}. "
                    f"Names are those of named_modules(), such as {named[-1][0]!r}."
                )
