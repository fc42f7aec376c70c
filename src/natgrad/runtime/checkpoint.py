"""The state of a preconditioner as plain tensors, numbers and strings.

Running averages say where the curvature is; the decompositions are saved too, as they belong to an
earlier step. A state is checked as a whole before anything is changed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from natgrad.errors import CheckpointError
from natgrad.runtime.blocks import Block
from natgrad.runtime.factors import RunningFactor

if TYPE_CHECKING:
    from natgrad.preconditioner import KFAC

VERSION = 1


def save(kfac: "KFAC") -> dict[str, Any]:
    generator = kfac.observation.generator
    return {
        "version": VERSION,
        "steps": kfac.steps,
        "adapted_damping": kfac.settings.adapted,
        "update_clocks": kfac.update_clocks.state_dict(),
        "refresh_clocks": kfac.refresh_clocks.state_dict(),
        "generator": None if generator is None else generator.get_state(),
        "zeroed": kfac.preconditioning.zeroed,
        "blocks": {block.name: _save_block(block) for block in kfac.blocks},
    }


def load(kfac: "KFAC", state: Mapping[str, Any]) -> None:
    _check(kfac, state)
    kfac.steps = int(state["steps"])
    kfac.settings.adapted = float(state["adapted_damping"])
    kfac.update_clocks.load_state_dict(state["update_clocks"])
    kfac.refresh_clocks.load_state_dict(state["refresh_clocks"])
    kfac.preconditioning.zeroed = int(state["zeroed"])
    kfac.observation.load(state["generator"], kfac.blocks[0].device)
    for block in kfac.blocks:
        _load_block(block, state["blocks"][block.name])
    kfac.preconditioning.invalidate()


def _identity(block: Block) -> dict[str, Any]:
    """What must be the same for a state to fit."""
    return {
        "layer": block.kind,
        "shape": list(block.shape),
        "structure": repr(block.structure),
        "inverse": repr(block.inverse),
        "numbers": {name: form.numel for name, form in block.forms.items()},
    }


def _save_block(block: Block) -> dict[str, Any]:
    return {
        **_identity(block),
        "factors": {
            name: {
                "mean": running.mean.clone(),
                "weight": running.weight.clone(),
                "change": running.change.clone(),
            }
            for name, running in block.running.items()
        },
        "parts": {name: [p.clone() for p in parts] for name, parts in block.parts.items()},
        "dropped": int(block.dropped),
        "failures": block.failures,
        "twin": block.twin.name if block.twin is not None else None,
    }


def _load_block(block: Block, state: Mapping[str, Any]) -> None:
    block.running = {}
    for name, saved in state["factors"].items():
        running = RunningFactor(block.forms[name], block.dtype, block.device)
        running.mean.copy_(saved["mean"])
        running.weight.copy_(saved["weight"])
        running.change.copy_(saved["change"])
        block.running[name] = running
    dtype = torch.promote_types(block.dtype, torch.float32)
    block.parts = {
        name: tuple(p.to(block.device, dtype, copy=True) for p in parts)
        for name, parts in state["parts"].items()
    }
    block.sums = {}
    block.version += 1
    block.dropped.fill_(state["dropped"])
    block.failures = int(state["failures"])


def _check(kfac: "KFAC", state: Any) -> None:
    """Raise, before anything is changed, if the state does not fit."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"The state is a {type(state).__name__} but must be what KFAC.state_dict() returned."
        )
    wanted = save_keys()
    if missing := sorted(wanted - set(state)):
        raise CheckpointError(
            f"The state has no {', '.join(missing)}: it is truncated, or not from "
            "KFAC.state_dict(). Use another checkpoint."
        )
    if state["version"] != VERSION:
        raise CheckpointError(
            f"The state has version {state['version']!r}, and this natgrad reads {VERSION}. Load it "
            "with the natgrad that wrote it."
        )
    blocks = state["blocks"]
    mine = {block.name: block for block in kfac.blocks}
    if set(mine) != set(blocks):
        extra, missing = sorted(set(blocks) - set(mine)), sorted(set(mine) - set(blocks))
        parts = [f"the model has no {', '.join(extra)}"] if extra else []
        parts += [f"the state has no {', '.join(missing)}"] if missing else []
        raise CheckpointError(
            f"The state is of another model: {'; '.join(parts)}. Build the same model, with the same "
            "include and exclude."
        )
    for name, block in mine.items():
        _check_block(block, blocks[name])


def save_keys() -> set[str]:
    return {
        "version",
        "steps",
        "adapted_damping",
        "update_clocks",
        "refresh_clocks",
        "generator",
        "zeroed",
        "blocks",
    }


def _check_block(block: Block, state: Mapping[str, Any]) -> None:
    where = f"block {block.name!r}"
    for key, value in _identity(block).items():
        if key not in state:
            raise CheckpointError(f"The state of {where} has no {key}: it is truncated.")
        if state[key] != value:
            raise CheckpointError(
                f"The state of {where} has {key} {state[key]!r}, but KFAC has {value!r}. Make KFAC "
                "with the settings that the state was saved with."
            )
    missing = {"factors", "parts", "dropped", "failures"} - set(state)
    if missing:
        raise CheckpointError(f"The state of {where} has no {sorted(missing)}: it is truncated.")
    for name, saved in state["factors"].items():
        if name not in block.forms:
            raise CheckpointError(f"The state of {where} has an unknown factor {name!r}.")
        for key in ("mean", "weight", "change"):
            if not isinstance(saved.get(key), Tensor):
                raise CheckpointError(
                    f"The state of {where} has no {key} of factor {name}: it is truncated."
                )
        if saved["mean"].shape != (block.forms[name].numel,):
            raise CheckpointError(
                f"The state of {where} has factor {name} of shape {tuple(saved['mean'].shape)}, but "
                f"{(block.forms[name].numel,)} is needed: it is of another model."
            )
    for name, parts in state["parts"].items():
        if not all(isinstance(part, Tensor) for part in parts):
            raise CheckpointError(f"The state of {where} has no tensors for part {name}.")
