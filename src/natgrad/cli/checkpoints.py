"""Weights and arrays from files, none of which is ever unpickled."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from natgrad.errors import SettingError
from natgrad.lab.models import weights

_PAIRS = (("inputs", "targets"), ("x", "y"), ("images", "labels"))


def load_into(model: nn.Module, file: Path) -> None:
    """The weights of a checkpoint, which must be those of the model, neither more nor fewer."""
    weights.load_into(model, file, "--checkpoint")


def pair(file: Path) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    if file.suffix == ".npz":
        held: Any = _arrays(file)
    else:
        held = weights.read(file, "DATA")
    if isinstance(held, Mapping):
        for names in _PAIRS:
            if set(names) <= set(held):
                held = tuple(held[name] for name in names)
                break
    if not (
        isinstance(held, tuple | list)
        and len(held) == 2
        and all(isinstance(one, Tensor) and one.ndim > 0 for one in held)
    ):
        what = f"the names {sorted(map(str, held))}" if isinstance(held, Mapping) else "no pair"
        raise SettingError(
            f"{file} holds {what} but must hold the tensors 'inputs' and 'targets': write such a "
            "file."
        )
    inputs, targets = held
    if len(inputs) != len(targets) or not len(inputs):
        raise SettingError(
            f"{file} holds {len(inputs)} inputs and {len(targets)} targets but must hold as many "
            "of both, and some: write a row for each sample."
        )
    return inputs, targets


def _arrays(file: Path) -> dict[str, Tensor]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise weights.unreadable(file, "DATA", error) from error
