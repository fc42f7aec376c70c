"""Weights and arrays from files, none of which is ever unpickled."""

import pickle
import zipfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from natgrad.errors import SettingError

_INSIDE = ("model", "state_dict", "model_state_dict")  # where training loops keep the weights
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_PAIRS = (("inputs", "targets"), ("x", "y"), ("images", "labels"))


def load_into(model: nn.Module, file: Path) -> None:
    """The weights of a checkpoint, which must be those of the model, neither more nor fewer."""
    state = _state(_read(file, "--checkpoint"), file)
    own = model.state_dict()
    for name in own:
        if name not in state:
            raise SettingError(
                f"--checkpoint {file} lacks {name!r}, which the model has: give a checkpoint of "
                "this model."
            )
        if own[name].shape != state[name].shape:
            raise SettingError(
                f"--checkpoint {file} has {name!r} of shape {list(state[name].shape)} but the "
                f"model's has {list(own[name].shape)}: give a checkpoint of this model."
            )
    if others := [name for name in state if name not in own]:
        raise SettingError(
            f"--checkpoint {file} has {others[0]!r}, which the model has not: give a checkpoint of "
            "this model."
        )
    model.load_state_dict(state)


def pair(file: Path) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    if file.suffix == ".npz":
        held: Any = _arrays(file)
    else:
        held = _read(file, "DATA")
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
        raise _unreadable(file, "DATA", error) from error


def _read(file: Path, what: str) -> Any:
    """Tensors and plain containers alone."""
    if file.suffix == ".safetensors":
        return _safetensors(file, what)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SettingError(
            f"{what} {file} cannot be read without running code that is inside of it, which is not "
            "done: write tensors alone, such as torch.save(model.state_dict(), path)."
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise _unreadable(file, what, error) from error


def _safetensors(file: Path, what: str) -> dict[str, Tensor]:
    try:
        load_file = import_module("safetensors.torch").load_file
    except ImportError:
        raise SettingError(
            f"{file} needs the package safetensors, which is not installed: pip install "
            "safetensors."
        ) from None
    try:
        found: dict[str, Tensor] = load_file(file)
    except Exception as error:  # the package has a class of its own for it
        raise _unreadable(file, what, error) from error
    return found


def _unreadable(file: Path, what: str, error: Exception) -> SettingError:
    why = "there is no such file" if isinstance(error, FileNotFoundError) else _first_line(error)
    return SettingError(f"{what} {file} cannot be read ({why}): name a file that torch can read.")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _state(held: Any, file: Path) -> dict[str, Tensor]:
    for name in _INSIDE:
        if isinstance(held, Mapping) and isinstance(held.get(name), Mapping):
            held = held[name]
            break
    if not isinstance(held, Mapping) or not all(isinstance(v, Tensor) for v in held.values()):
        raise SettingError(
            f"--checkpoint {file} holds no state_dict, by itself or as 'model': write one with "
            "torch.save(model.state_dict(), path)."
        )
    return {_unwrapped(str(name)): value for name, value in held.items()}


def _unwrapped(name: str) -> str:
    while any(name.startswith(wrapper) for wrapper in _WRAPPERS):
        name = name.removeprefix("module.").removeprefix("_orig_mod.")
    return name
