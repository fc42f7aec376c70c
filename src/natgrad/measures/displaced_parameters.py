"""Parameters elsewhere for a while, ``θ + d``, and weights that are given to compare with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError
from natgrad.measures.temporary_weights import temporary_weights
from natgrad.operators import Problem

Weights = nn.Module | Mapping[str, Tensor] | None


@contextmanager
def displaced(problem: Problem, change: Tensor) -> Iterator[None]:
    """The parameters are ``θ + change [P]`` inside, and bit for bit what they were afterwards.

    Arguments:
        problem: whose parameters are moved.
        change: ``d [P]``, added to the parameters.
    """
    own = problem.parameters
    by_name = problem.space.named(change)
    with temporary_weights(
        own, {name: own[name].detach() + d.to(own[name]) for name, d in by_name.items()}
    ):
        yield


def position(problem: Problem) -> Tensor:
    """``θ [P]``, a copy.

    Arguments:
        problem: whose parameters are read.
    """
    return problem.flat([p.detach() for p in problem.parameters.values()])


def flat_weights(given: Weights | Any, problem: Problem, what: str) -> Tensor:
    """``[P]`` of a model or a dict with the names of the parameters; zeros for ``None``.

    Arguments:
        given: a model, a mapping of tensors by name that has at least the problem's parameters, or
            ``None`` for zeros.
        problem: whose parameters are read, in their order.
        what: what error sentences call it, such as ``"prior"``.
    """
    if given is None:
        return torch.zeros(problem.space.size, dtype=problem.dtype, device=problem.device)
    named = named_weights(given, what)
    for name in problem.space.names:
        if name not in named:
            raise SettingError(
                f"The {what} has no {name!r}, which is a parameter of the model: give a model of "
                "the same kind, its state_dict(), or None for zeros."
            )
    found = problem.space.flat({name: named[name].detach() for name in problem.space.names})
    return found.to(problem.device, problem.dtype)


def named_weights(given: nn.Module | Mapping[str, Tensor] | Any, what: str) -> Mapping[str, Tensor]:
    """Weights by name.

    Arguments:
        given: a model, whose state dict is taken, or a mapping of tensors by name.
        what: what error sentences call it, such as ``"reference"``.
    """
    if isinstance(given, nn.Module):
        return given.state_dict(keep_vars=True)
    if not isinstance(given, Mapping):
        raise SettingError(
            f"The {what} is an object of type {type(given).__name__} but must be a model, a dict "
            "of tensors by name, or None for zeros: give one of them."
        )
    return given
