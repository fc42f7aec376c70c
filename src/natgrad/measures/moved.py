"""Parameters elsewhere for a while, ``θ + d``, and weights that are given to compare with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError
from natgrad.measures.swapping import swapped
from natgrad.operators import Problem

Weights = nn.Module | Mapping[str, Tensor] | None


@contextmanager
def moved(problem: Problem, change: Tensor) -> Iterator[None]:
    """The parameters are ``θ + change [P]`` inside, and bit for bit what they were afterwards."""
    own = problem.parameters
    by_name = problem.space.named(change)
    with swapped(own, {name: own[name].detach() + d.to(own[name]) for name, d in by_name.items()}):
        yield


def position(problem: Problem) -> Tensor:
    """``θ [P]``, a copy."""
    return problem.flat([p.detach() for p in problem.parameters.values()])


def flat_weights(given: Weights | Any, problem: Problem, what: str) -> Tensor:
    """``[P]`` of a model or a dict with the names of the parameters; zeros for ``None``."""
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
    if isinstance(given, nn.Module):
        return given.state_dict(keep_vars=True)
    if not isinstance(given, Mapping):
        raise SettingError(
            f"The {what} is an object of type {type(given).__name__} but must be a model, a dict "
            "of tensors by name, or None for zeros: give one of them."
        )
    return given
