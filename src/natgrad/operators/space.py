"""Parameters as one flat vector: in the order of ``named_parameters()``, each row-major."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError

Vector = Tensor | Mapping[str, Tensor]


class ParameterSpace:
    """``names`` with their ``shapes``; ``slices`` says where each lies in a vector ``[size]``.

    Arguments:
        parameters: tensors by name; only their shapes and order are used.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.names = tuple(parameters)
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.slices: dict[str, slice] = {}
        start = 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(start, start + prod(shape))
            start += prod(shape)
        self.size = start

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """``[size]`` of tensors by name, all of them and no others.

        Arguments:
            named: a tensor in the parameter's shape for every name, in any order; a missing,
                further or wrongly shaped one raises.
        """
        if set(named) != set(self.names):
            missing = [name for name in self.names if name not in named]
            other = [name for name in named if name not in self.slices]
            what = f"lacks {missing[0]!r}" if missing else f"has {other[0]!r}, which is no such one"
            raise SettingError(
                f"A vector of {len(self.names)} parameters was given as a dict that {what}: give a "
                "tensor for each of operator.space.names."
            )
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise SettingError(
                    f"The vector's part {name!r} is of type {type(tensor).__name__} but must be a "
                    "tensor: convert it."
                )
            if tuple(tensor.shape) != self.shapes[name]:
                raise SettingError(
                    f"The vector's part {name!r} has shape {list(tensor.shape)} but the parameter "
                    f"has {list(self.shapes[name])}: give a tensor of that shape."
                )
        return torch.cat([named[name].flatten() for name in self.names])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of ``flat [size]`` in the shapes of the parameters.

        Arguments:
            flat: ``[size]``.
        """
        return {name: flat[part].view(self.shapes[name]) for name, part in self.slices.items()}

    def split(self, rows: Tensor) -> list[Tensor]:
        """``rows [k, size]`` -> ``[k, *shape]`` for each parameter.

        Arguments:
            rows: ``[k, size]``, one flat vector a row.
        """
        return [rows[:, self.slices[n]].view(len(rows), *self.shapes[n]) for n in self.names]


def chosen(model: nn.Module, patterns: Iterable[str] | str | None) -> dict[str, nn.Parameter]:
    """The trainable parameters, those whose names match if there are patterns (fnmatch).

    Arguments:
        model: whose parameters are looked at.
        patterns: one pattern of names or several, each of which must match a trainable parameter;
            ``None`` takes all that require gradients.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # A shared parameter is in the space once, under its first name, and found under all of them.
    called = {
        name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    if not trainable:
        raise SettingError(
            f"{type(model).__name__} has no parameter with requires_grad=True, so there is no "
            "matrix: turn it on for those that are wanted."
        )
    if patterns is None:
        return trainable
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in called):
            raise SettingError(
                f"parameters has {pattern!r}, which matches none of the trainable parameters of "
                f"{type(model).__name__}: use patterns of names such as {next(iter(trainable))!r}."
            )
    wanted = {
        id(p) for name, p in called.items() if any(fnmatchcase(name, one) for one in patterns)
    }
    return {name: p for name, p in trainable.items() if id(p) in wanted}
