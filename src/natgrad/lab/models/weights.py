"""Weights of a network from a file, which is never unpickled."""

import pickle
import zipfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError, first_line

_INSIDE = ("model", "state_dict", "model_state_dict")  # where training loops keep the weights
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


def load_into(
    model: nn.Module, file: Path, what: str, remedy: str = "give a checkpoint of this model"
) -> None:
    """Those of a checkpoint, which must be the model's, neither more nor fewer; ``what`` the file
    is, and the ``remedy``, are for what is said otherwise."""
    state = _state(read(file, what, mapped=True), file, what)
    own = model.state_dict()
    for name in own:
        if name not in state:
            raise SettingError(f"{what} {file} lacks {name!r}, which the model has: {remedy}.")
        if own[name].shape != state[name].shape:
            raise SettingError(
                f"{what} {file} has {name!r} of shape {list(state[name].shape)} but the model's "
                f"has {list(own[name].shape)}: {remedy}."
            )
    if others := [name for name in state if name not in own]:
        raise SettingError(f"{what} {file} has {others[0]!r}, which the model has not: {remedy}.")
    model.load_state_dict(state)


def read(file: Path, what: str, *, mapped: bool = False) -> Any:
    """Tensors and plain containers alone; ``mapped`` ones are read only when they are used."""
    if file.suffix == ".safetensors":
        return _safetensors(file, what)
    try:
        # Files in the form of old versions cannot be mapped.
        mapped = mapped and zipfile.is_zipfile(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise SettingError(
            f"{what} {file} cannot be read without running code that is inside of it, which is not "
            "done: write tensors alone, such as torch.save(model.state_dict(), path)."
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise unreadable(file, what, error) from error


def unreadable(file: Path, what: str, error: Exception) -> SettingError:
    why = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    if isinstance(error, FileNotFoundError):
        why = "there is no such file"
    return SettingError(f"{what} {file} cannot be read ({why}): name a file that torch can read.")


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
        raise unreadable(file, what, error) from error
    return found


def _state(held: Any, file: Path, what: str) -> dict[str, Tensor]:
    for name in _INSIDE:
        if isinstance(held, Mapping) and isinstance(held.get(name), Mapping):
            held = held[name]
            break
    if not isinstance(held, Mapping) or not all(isinstance(v, Tensor) for v in held.values()):
        raise SettingError(
            f"{what} {file} holds no state_dict, by itself or as 'model': write one with "
            "torch.save(model.state_dict(), path)."
        )
    return {_unwrapped(str(name)): value for name, value in held.items()}


def _unwrapped(name: str) -> str:
    while any(name.startswith(wrapper) for wrapper in _WRAPPERS):
        name = name.removeprefix("module.").removeprefix("_orig_mod.")
    return name
