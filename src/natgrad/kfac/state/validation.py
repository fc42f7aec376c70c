"""Whether a state fits a preconditioner, found out as a whole and by all ranks together.

A state that is refused changes nothing: all checks come before the first assignment. If one rank
refuses, all do, as a rank that has loaded and one that has not would train apart.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.comm.agreement import gather_or_fail
from natgrad.comm.base import Communicator
from natgrad.errors import CheckpointError
from natgrad.kfac.clocks import Clocks
from natgrad.kfac.motion import Motion
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import KFACSettings
from natgrad.schedules import LevenbergMarquardt

VERSION = 2
TENSORS = ("factors", "parts", "moments")
DAMAGED = "it is damaged, or not from KFAC.state_dict(). Use another checkpoint."
KEYS = {
    "version",
    "steps",
    "adapted_damping",
    "update_clocks",
    "refresh_clocks",
    "generator",
    "zeroed",
    "moments",
    "blocks",
}


class Checked(Protocol):
    """The attributes of a preconditioner that a state must fit."""

    settings: KFACSettings
    update_clocks: Clocks
    refresh_clocks: Clocks
    blocks: list[Block]
    comm: Communicator
    team: Team


def check_on_all_ranks(
    kfac: Checked,
    given: Callable[[], Any],
    tensors: Callable[[Mapping[str, Any]], None] | None = None,
) -> Mapping[str, Any]:
    """What ``given`` returns, if that fits and is the same on every rank; raises on all otherwise.

    ``tensors`` checks those of the state; without it, the state must be complete."""
    failure: Exception | None = None
    state, words = {}, ""
    try:
        state = given()
        check(kfac, state)
        if tensors is not None:
            tensors(state)
        else:
            for block in kfac.blocks:
                _check_tensors(block, state["blocks"][block.name], kfac.team.motion)
        words = _without_tensors(state)
    except Exception as error:
        failure = error
    refused = "The state was refused by"
    everyone = gather_or_fail(kfac.comm, words, failure, CheckpointError, refused)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            steps = [json.loads(text)["steps"] for text in (everyone[0], theirs)]
            raise CheckpointError(
                f"Rank {rank} was given another state, of step {steps[1]}, than rank 0, of step "
                f"{steps[0]}. Load the same checkpoint on every rank."
            )
    return state


def identity(block: Block) -> dict[str, Any]:
    """What must be the same for a state to fit."""
    return {
        "layer": block.kind,
        "shape": list(block.shape),
        "structure": repr(block.structure),
        "inverse": repr(block.inverse),
        "numbers": {name: form.numel for name, form in block.forms.items()},
    }


def check(kfac: Checked, state: Any) -> None:
    """Raise if anything but its tensors does not fit."""
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
    _need(state, KEYS, "The state")
    _check_count(state, "steps", "The state")
    _check_count(state, "zeroed", "The state")
    _check_damping(kfac, state["adapted_damping"])
    for clocks in ("update_clocks", "refresh_clocks"):
        _check_clocks(getattr(kfac, clocks), state[clocks], clocks)
    _check_generators(kfac, state["generator"])
    if state["moments"] != (kept := kfac.team.motion.names):
        raise CheckpointError(
            f"The state keeps {', '.join(map(str, state['moments'])) or 'no momentum'} between "
            f"steps, but KFAC {', '.join(kept) or 'no momentum'}: make KFAC with the geometry and "
            "momentum that the state was saved with."
        )
    blocks = state["blocks"]
    if not isinstance(blocks, Mapping):
        raise CheckpointError(
            f"The state has {type(blocks).__name__} for blocks but must have a mapping of names: "
            f"{DAMAGED}"
        )
    mine = {block.name: block for block in kfac.blocks}
    if set(mine) != set(blocks):
        extra, missing = sorted(set(blocks) - set(mine)), sorted(set(mine) - set(blocks))
        parts = [f"the model has no {', '.join(map(repr, extra))}"] if extra else []
        parts += [f"the state has no {', '.join(map(repr, missing))}"] if missing else []
        raise CheckpointError(
            f"The state is of another model: {'; '.join(parts)}. Build the same model, with the "
            "same include and exclude, and the same layers frozen, before KFAC is made."
        )
    born = state.get("born") or {}
    if not isinstance(born, Mapping) or not set(born) <= set(mine):
        raise CheckpointError(f"The state has {born!r} for born, which are blocks: {DAMAGED}")
    for name in born:
        _check_count(born, name, "The state, under born,")
    for name, block in mine.items():
        _check_block(block, blocks[name], set(mine) - {name})
        if not set(blocks[name]["saved"]["moments"]) <= set(kept):
            raise CheckpointError(f"The state of block {name!r} has unknown moments: {DAMAGED}")


def _without_tensors(state: Mapping[str, Any]) -> str:
    """The state without its tensors, as JSON, to be compared between ranks."""
    blocks = {
        name: {key: value for key, value in block.items() if key not in TENSORS}
        for name, block in state["blocks"].items()
    }
    whole = {**state, "blocks": blocks, "generator": None}
    return json.dumps(whole, sort_keys=True, default=str)


def _need(state: Any, keys: set[str], what: str) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{what} is a {type(state).__name__} and not a mapping: {DAMAGED}")
    if missing := sorted(keys - set(state)):
        raise CheckpointError(f"{what} has no {', '.join(missing)}: {DAMAGED}")


def _check_count(state: Mapping[str, Any], key: str, what: str) -> None:
    value = state[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{what} has {value!r} for {key}, which counts something: {DAMAGED}")


def _check_damping(kfac: Checked, value: Any) -> None:
    if not isinstance(value, float | int) or not isfinite(value) or value < 0:
        raise CheckpointError(f"The state has {value!r} for adapted_damping: {DAMAGED}")
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
            raise CheckpointError(f"The state of {what} has no last step for {key}: {DAMAGED}")


def _check_generators(kfac: Checked, states: Any) -> None:
    """One of each rank that there was."""
    if states is None:
        return
    try:
        if not isinstance(states, Sequence) or not states:
            raise TypeError
        for state in states:
            torch.Generator(kfac.blocks[0].device).set_state(state)
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(f"The state of the generator is not one: {DAMAGED}") from error


def _check_block(block: Block, state: Any, others: set[str]) -> None:
    where = f"The state of block {block.name!r}"
    same = identity(block)
    _need(
        state,
        {*same, *TENSORS, "saved", "dropped", "failures", "shares_input_with"},
        where,
    )
    for key, value in same.items():
        if state[key] != value:
            raise CheckpointError(
                f"{where} has {key} {state[key]!r}, but KFAC has {value!r}. Make KFAC with the "
                "settings that the state was saved with."
            )
    _check_count(state, "dropped", where)
    _check_count(state, "failures", where)
    other = state["shares_input_with"]
    if other is not None and other not in others:
        raise CheckpointError(f"{where} shares its input with {other!r}: {DAMAGED}")
    _need(state["saved"], set(TENSORS), f"{where}, under saved,")
    for kind in TENSORS:
        if not isinstance(names := state["saved"][kind], list):
            raise CheckpointError(f"{where} has {names!r} as its {kind} saved: {DAMAGED}")


def _check_tensors(block: Block, state: Mapping[str, Any], motion: Motion) -> None:
    where = f"The state of block {block.name!r}"
    factors, parts = state["factors"], state["parts"]
    if state["saved"]["factors"] and factors == {}:
        raise CheckpointError(
            f"{where} has none of its factors, as when torch.distributed.checkpoint reads into a "
            "new KFAC, which does not have them yet. Give it kfac.shards() instead of kfac."
        )
    _need(factors, set(state["saved"]["factors"]), f"{where}, among factors,")
    for name, saved in factors.items():
        if name not in block.forms:
            raise CheckpointError(f"{where} has an unknown factor {name!r}: {DAMAGED}")
        what = f"{where}, factor {name},"
        _need(saved, {"mean", "weight", "change"}, what)
        check_tensor(saved["mean"], (block.forms[name].numel,), f"{what} mean", block.dtype)
        check_tensor(saved["weight"], (), f"{what} weight", block.wide_dtype)
        check_tensor(saved["change"], (), f"{what} change", block.wide_dtype)
    _need(parts, set(state["saved"]["parts"]), f"{where}, among parts,")
    for name, saved in parts.items():
        if name not in block.structure.needs:
            raise CheckpointError(f"{where} has an unknown part {name!r}: {DAMAGED}")
        shapes = block.part_shapes(name)
        if not isinstance(saved, Sequence) or len(saved) != len(shapes):
            raise CheckpointError(
                f"{where} has not the {len(shapes)} tensors of the inverse of {name}: {DAMAGED}"
            )
        for part, shape in zip(saved, shapes, strict=True):
            check_tensor(part, shape, f"{where}, inverse of {name},", block.wide_dtype)
    _need(state["moments"], set(state["saved"]["moments"]), f"{where}, among moments,")
    kept = motion.kept(block.shape)
    for name, saved in state["moments"].items():
        check_tensor(saved, kept[name], f"{where}, {name},", block.wide_dtype)


def check_tensor(value: Any, shape: tuple[int, ...], what: str, dtype: torch.dtype) -> None:
    """``dtype``: in which it will be kept here."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{what} is {value!r:.40} and no tensor of numbers: {DAMAGED}")
    if value.shape != shape:
        raise CheckpointError(
            f"{what} has shape {tuple(value.shape)} but {shape} is needed: it is of another model, "
            "or damaged. Use another checkpoint."
        )
    largest = value.detach().abs().max() if value.numel() else value.new_zeros(())
    if not bool(largest.isfinite()):
        raise CheckpointError(f"{what} has numbers that are not finite: {DAMAGED}")
    if largest > torch.finfo(dtype).max:
        raise CheckpointError(
            f"{what} has numbers as large as {float(largest):.3g}, which {dtype} does not have: "
            "make KFAC with the factor_dtype that the state was saved with, or use another "
            "checkpoint."
        )
