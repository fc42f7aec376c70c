"""The state of a preconditioner as plain tensors, numbers and strings.

Running averages say where the curvature is; the decompositions are saved too, as they belong to an
earlier step. A state is checked as a whole before anything is changed.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.errors import CheckpointError
from natgrad.runtime.adaptive import Prediction
from natgrad.runtime.apply import Preconditioning
from natgrad.runtime.blocks import Block
from natgrad.runtime.factors import RunningFactor
from natgrad.runtime.observation import Observation
from natgrad.runtime.scaling import LevenbergMarquardt
from natgrad.runtime.settings import Clocks, Settings

VERSION = 1


class Kept(Protocol):
    """What of a preconditioner is saved."""

    steps: int
    settings: Settings
    update_clocks: Clocks
    refresh_clocks: Clocks
    observation: Observation
    preconditioning: Preconditioning
    prediction: Prediction
    blocks: list[Block]


def save(kfac: Kept) -> dict[str, Any]:
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


def load(kfac: Kept, state: Mapping[str, Any]) -> None:
    _check(kfac, state)
    kfac.steps = int(state["steps"])
    kfac.settings.adapted = float(state["adapted_damping"])
    kfac.update_clocks.load_state_dict(state["update_clocks"])
    kfac.refresh_clocks.load_state_dict(state["refresh_clocks"])
    kfac.preconditioning.zeroed = int(state["zeroed"])
    kfac.observation.load(state["generator"], kfac.blocks[0].device)
    by_name = {block.name: block for block in kfac.blocks}
    for name, block in by_name.items():
        _load_block(block, state["blocks"][name], by_name)
    kfac.preconditioning.invalidate()
    kfac.prediction.remembered = []


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
        # What must be there: a truncated file has fewer.
        "saved": {"factors": sorted(block.running), "parts": sorted(block.parts)},
        "dropped": int(block.dropped),
        "failures": block.failures,
        "twin": block.twin.name if block.twin is not None else None,
    }


def _load_block(block: Block, state: Mapping[str, Any], by_name: Mapping[str, Block]) -> None:
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
    block.solved = set(block.parts)
    block.sums = {}
    block.version += 1
    block.dropped.fill_(state["dropped"])
    block.failures = int(state["failures"])
    block.twin = by_name.get(state["twin"])


def _check(kfac: Kept, state: Any) -> None:
    """Raise, before anything is changed, if the state does not fit."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"The state is a {type(state).__name__} but must be what KFAC.state_dict() returned: "
            "pass that."
        )
    if "version" in state and state["version"] != VERSION:
        raise CheckpointError(
            f"The state has version {state['version']!r}, and this natgrad reads {VERSION}. Load "
            "it with the natgrad that wrote it."
        )
    _need(state, _KEYS, "The state")
    _check_count(state, "steps", "The state")
    _check_count(state, "zeroed", "The state")
    _check_damping(kfac, state["adapted_damping"])
    for clocks in ("update_clocks", "refresh_clocks"):
        _check_clocks(getattr(kfac, clocks), state[clocks], clocks)
    _check_generator(kfac, state["generator"])
    blocks = state["blocks"]
    if not isinstance(blocks, Mapping):
        raise CheckpointError(
            f"The state has {type(blocks).__name__} for blocks but must have a mapping of names: "
            f"{_DAMAGED}"
        )
    mine = {block.name: block for block in kfac.blocks}
    if set(mine) != set(blocks):
        extra, missing = sorted(set(blocks) - set(mine)), sorted(set(mine) - set(blocks))
        parts = [f"the model has no {', '.join(map(repr, extra))}"] if extra else []
        parts += [f"the state has no {', '.join(map(repr, missing))}"] if missing else []
        raise CheckpointError(
            f"The state is of another model: {'; '.join(parts)}. Build the same model, with the "
            "same include and exclude."
        )
    for name, block in mine.items():
        _check_block(block, blocks[name], set(mine) - {name})


_DAMAGED = "it is damaged, or not from KFAC.state_dict(). Use another checkpoint."
_KEYS = {
    "version",
    "steps",
    "adapted_damping",
    "update_clocks",
    "refresh_clocks",
    "generator",
    "zeroed",
    "blocks",
}


def _need(state: Any, keys: set[str], what: str) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{what} is a {type(state).__name__} and not a mapping: {_DAMAGED}")
    if missing := sorted(keys - set(state)):
        raise CheckpointError(f"{what} has no {', '.join(missing)}: {_DAMAGED}")


def _check_count(state: Mapping[str, Any], key: str, what: str) -> None:
    value = state[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{what} has {value!r} for {key}, which counts something: {_DAMAGED}")


def _check_damping(kfac: Kept, value: Any) -> None:
    if not isinstance(value, float | int) or not isfinite(value) or value < 0:
        raise CheckpointError(f"The state has {value!r} for adapted_damping: {_DAMAGED}")
    if isinstance(kfac.settings.damping, LevenbergMarquardt) and not value:
        raise CheckpointError(
            "The state has no adapted damping, so it was not saved with LevenbergMarquardt, but "
            f"KFAC has {kfac.settings.damping!r}. Make KFAC with the settings that the state was "
            "saved with."
        )


def _check_clocks(clocks: Clocks, state: Any, what: str) -> None:
    _need(state, set(clocks.clocks), f"The state of {what}")
    for key in clocks.clocks:
        last = state[key].get("last") if isinstance(state[key], Mapping) else None
        if not isinstance(last, int):
            raise CheckpointError(f"The state of {what} has no last step for {key}: {_DAMAGED}")


def _check_generator(kfac: Kept, state: Any) -> None:
    if state is None:
        return
    try:
        torch.Generator(kfac.blocks[0].device).set_state(state)
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(f"The state of the generator is not one: {_DAMAGED}") from error


def _check_block(block: Block, state: Any, others: set[str]) -> None:
    where = f"The state of block {block.name!r}"
    identity = _identity(block)
    _need(state, {*identity, "factors", "parts", "saved", "dropped", "failures", "twin"}, where)
    for key, value in identity.items():
        if state[key] != value:
            raise CheckpointError(
                f"{where} has {key} {state[key]!r}, but KFAC has {value!r}. Make KFAC with the "
                "settings that the state was saved with."
            )
    _check_count(state, "dropped", where)
    _check_count(state, "failures", where)
    if state["twin"] is not None and state["twin"] not in others:
        raise CheckpointError(f"{where} names {state['twin']!r} as its twin: {_DAMAGED}")
    _need(state["saved"], {"factors", "parts"}, f"{where}, under saved,")
    _check_factors(block, state, where)
    _check_parts(block, state, where)


def _check_factors(block: Block, state: Mapping[str, Any], where: str) -> None:
    factors = state["factors"]
    _need(factors, set(state["saved"]["factors"]), f"{where}, among factors,")
    for name, saved in factors.items():
        if name not in block.forms:
            raise CheckpointError(f"{where} has an unknown factor {name!r}: {_DAMAGED}")
        what = f"{where}, factor {name},"
        _need(saved, {"mean", "weight", "change"}, what)
        _check_tensor(saved["mean"], (block.forms[name].numel,), f"{what} mean")
        _check_tensor(saved["weight"], (), f"{what} weight")
        _check_tensor(saved["change"], (), f"{what} change")


def _check_parts(block: Block, state: Mapping[str, Any], where: str) -> None:
    parts = state["parts"]
    _need(parts, set(state["saved"]["parts"]), f"{where}, among parts,")
    for name, saved in parts.items():
        if name not in block.structure.needs:
            raise CheckpointError(f"{where} has an unknown part {name!r}: {_DAMAGED}")
        spec = block.forms[name].spec
        in_basis = name in block.structure.in_basis
        shapes = ((spec.batch, spec.dim),) if in_basis else block.inverse.shapes(spec)
        if not isinstance(saved, Sequence) or len(saved) != len(shapes):
            raise CheckpointError(
                f"{where} has not the {len(shapes)} tensors of the inverse of {name}: {_DAMAGED}"
            )
        for part, shape in zip(saved, shapes, strict=True):
            _check_tensor(part, shape, f"{where}, inverse of {name},")


def _check_tensor(value: Any, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{what} is {value!r:.40} and no tensor of numbers: {_DAMAGED}")
    if value.shape != shape:
        raise CheckpointError(
            f"{what} has shape {tuple(value.shape)} but {shape} is needed: it is of another model, "
            "or damaged. Use another checkpoint."
        )
