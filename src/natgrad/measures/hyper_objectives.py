"""A loss of parameters and hyperparameters, ``L(theta, lambda)``, and its derivatives by both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from natgrad.curvature.losses import CrossEntropy
from natgrad.errors import SettingError
from natgrad.operators import Problem, hessian
from natgrad.operators.space import ParameterSpace, chosen
from natgrad.operators.tape import batched_grad

Source = Problem | Callable[[], Tensor]
_UNITS = 1 << 24  # numbers of unit vectors at a time


class Objective:
    """``L = Σ_terms / weight``: one term of a function, one for each batch of a problem.

    Arguments:
        source: a `Problem`, or a function without arguments that computes the loss anew and returns
            it as one number.
        parameters: ``theta``, tensors by name; a problem must have all of them.
        name: ``"training"`` or ``"validation"``, for error sentences.
        hyper: ``lambda``, tensors with ``requires_grad=True``.
    """

    def __init__(
        self, source: Source, parameters: Mapping[str, Tensor], name: str, hyper: list[Tensor]
    ) -> None:
        self.source, self.parameters, self.name, self.hyper = source, parameters, name, hyper
        self.space = ParameterSpace(parameters)
        self.own = list(parameters.values())
        self.problem = source if isinstance(source, Problem) else None
        self._graph: list[Tensor | None] | None = None
        if self.problem is not None:
            self._check(self.problem)
            self._hessian = hessian(self.problem)

    # First derivatives.

    def gradients(self) -> tuple[Tensor, list[Tensor | None]]:
        """``∂L/∂theta [P]``, and ``∂L/∂lambda`` of every hyperparameter, ``None`` if not in it."""
        flat = torch.zeros_like(self._flat(self.own))
        direct: list[Tensor | None] = [None] * len(self.hyper)
        with self._ready():
            for term in self._terms():
                found = torch.autograd.grad(term, [*self.own, *self.hyper], allow_unused=True)
                flat += self._flat(found[: len(self.own)])
                direct = _added(direct, found[len(self.own) :])
        return self._mean(flat), [None if d is None else self._mean(d) for d in direct]

    # Second derivatives.

    def product(self, v: Tensor) -> Tensor:
        """``∂²L/∂theta² v`` for ``v [P, k]``.

        Arguments:
            v: ``[P, k]``.
        """
        if self.problem is not None:
            return self._hessian.product(v)
        if self._graph is None:
            with self._ready():
                (self._graph,) = self._graphs()
        used = [i for i, g in enumerate(self._graph) if g is not None]
        if not used:  # the loss is linear in every parameter
            return torch.zeros_like(v)
        outputs = [g for g in self._graph if g is not None]
        parts = self.space.split(v.mT.contiguous())
        found = batched_grad(outputs, self.own, [parts[i] for i in used])
        pairs = zip(found, self.own, strict=True)
        k = v.shape[1]
        rows = [p.new_zeros(k, p.numel()) if t is None else t.reshape(k, -1) for t, p in pairs]
        return torch.cat(rows, 1).mT

    def mixed(self, v: Tensor) -> list[Tensor | None]:
        """``∂²L/∂lambda∂theta v`` for ``v [P]``, in the shape of each hyperparameter.

        Arguments:
            v: ``[P]``.
        """
        out: list[Tensor | None] = [None] * len(self.hyper)
        parts = list(self.space.named(v).values())
        with self._ready():
            for grads in self._graphs():
                pairs = [(g, part) for g, part in zip(grads, parts, strict=True) if g is not None]
                if not pairs:
                    continue
                inner = sum((g * part).sum() for g, part in pairs)
                assert isinstance(inner, Tensor)
                found = torch.autograd.grad(inner, self.hyper, allow_unused=True, retain_graph=True)
                out = _added(out, found)
        return [None if one is None else self._mean(one) for one in out]

    def columns(self) -> Tensor:
        """``∂²L/∂theta∂lambda [P, h]``, all hyperparameters one after the other."""
        total = torch.zeros(self.space.size, sum(t.numel() for t in self.hyper)).to(self.own[0])
        with self._ready():
            for grads in self._graphs():
                probes = [torch.zeros_like(p, requires_grad=True) for p in self.own]
                pairs = zip(grads, probes, strict=True)
                inner = sum((g * w).sum() for g, w in pairs if g is not None)
                if not isinstance(inner, Tensor):
                    continue
                # Linear in the probes, so that its derivative by them is a column.
                found = torch.autograd.grad(inner, self.hyper, create_graph=True, allow_unused=True)
                start = 0
                for f, t in zip(found, self.hyper, strict=True):
                    if f is not None and f.requires_grad:
                        self._add_derivatives(f, probes, total[:, start : start + t.numel()])
                    start += t.numel()
        return self._mean(total)

    def _add_derivatives(self, f: Tensor, probes: list[Tensor], out: Tensor) -> None:
        """Add the derivative of every entry of ``f`` by the probes to ``out [P, entries]``."""
        width = max(1, _UNITS // f.numel())
        for start in range(0, f.numel(), width):
            which = torch.arange(start, min(start + width, f.numel()), device=f.device)
            units = f.new_zeros(len(which), f.numel())
            units[torch.arange(len(which), device=f.device), which] = 1.0
            pulled = batched_grad(f, probes, units.view(len(which), *f.shape))
            rows = [
                p.new_zeros(len(which), p.numel()) if r is None else r.reshape(len(which), -1)
                for r, p in zip(pulled, probes, strict=True)
            ]
            out[:, start : start + len(which)] += torch.cat(rows, 1).mT

    # Terms.

    @contextmanager
    def _ready(self) -> Iterator[None]:
        if self.problem is None:
            # Fused attention cannot be differentiated twice.
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                yield
            return
        with self.problem.ready(twice=True):
            for t in self.hyper:  # which may be a parameter of the model beside those of theta
                if t.is_leaf:
                    t.requires_grad_(True)
            yield

    def _terms(self) -> Iterator[Tensor]:
        if self.problem is not None:
            for batch in self.problem.batches(f"{self.name} loss"):
                yield self.problem.loss.total(self.problem.output(batch), batch.targets)
            return
        assert not isinstance(self.source, Problem)
        value: Any = self.source()
        if not isinstance(value, Tensor) or value.dim() != 0 or not value.requires_grad:
            given = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise SettingError(
                f"The {self.name} loss returned {given} but must return one number that depends "
                "on the parameters: compute it anew at every call, with gradients on."
            )
        yield value

    def _graphs(self) -> Iterator[list[Tensor | None]]:
        """The gradient of each term by the parameters, to be differentiated again."""
        for term in self._terms():
            found = torch.autograd.grad(term, self.own, create_graph=True, allow_unused=True)
            yield [g if g is not None and g.requires_grad else None for g in found]

    def _mean(self, t: Tensor) -> Tensor:
        return t if self.problem is None else self.problem.totals(t) / self.problem.weight

    def _flat(self, tensors: Any) -> Tensor:
        pairs = zip(tensors, self.own, strict=True)
        return torch.cat([(torch.zeros_like(p) if t is None else t).flatten() for t, p in pairs])

    def _check(self, problem: Problem) -> None:
        known = {id(p) for p in problem.parameters.values()}
        for name, p in self.parameters.items():
            if id(p) not in known:
                raise SettingError(
                    f"The {self.name} problem does not have the parameter {name!r}: make both "
                    "problems of one model, with the same parameters=."
                )
        loss = problem.loss
        weights = loss.class_weights if isinstance(loss, CrossEntropy) else None
        if weights is not None and weights.requires_grad:
            raise SettingError(
                "CrossEntropy.class_weights has requires_grad=True, but the mean is divided by "
                "these weights and a problem takes that number as a constant: give the loss as a "
                "function of no arguments instead of a problem."
            )


def check_source(source: object, name: str) -> None:
    """Refuse what is neither a problem nor a function.

    Arguments:
        source: what the user gave.
        name: ``"training"`` or ``"validation"``, for error sentences.
    """
    if isinstance(source, nn.Module) or not (isinstance(source, Problem) or callable(source)):
        raise SettingError(
            f"The {name} loss is of type {type(source).__name__} but must be a Problem or a "
            "function without arguments that returns the loss: give one of them."
        )


def parameters_of(source: Source, given: nn.Module | Mapping[str, Tensor] | None) -> Any:
    """The parameters that the training optimises, by name.

    Arguments:
        source: the training loss: a `Problem` or a function.
        given: for a function the model, whose trainable parameters are taken, or tensors by name;
            for a `Problem` it must be ``None``.
    """
    check_source(source, "training")
    if isinstance(source, Problem):
        if given is not None:
            raise SettingError(
                "The training problem has its parameters already: leave parameters= out here, and "
                "give it to Problem."
            )
        return source.parameters
    if isinstance(given, nn.Module):
        return chosen(given, None)
    if isinstance(given, Mapping) and given:
        return dict(given)
    raise SettingError(
        f"parameters is of type {type(given).__name__} but a loss that is a function needs the "
        "model, or a dict of tensors by name: give what the training has optimised."
    )


def _added(one: list[Tensor | None], two: Any) -> list[Tensor | None]:
    return [a if b is None else b if a is None else a + b for a, b in zip(one, two, strict=True)]
