"""The state of a preconditioner as plain tensors, numbers and strings, the same at any world size.

Running averages say where the curvature is; the decompositions are saved too, as they belong to an
earlier step: decomposing again while loading would give another run. A rank takes from a state what
its plan gives to it, so a run resumes on more or fewer ranks, and with another placement.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.capture.hooks import Capture
from natgrad.comm.base import Communicator
from natgrad.errors import CheckpointError
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.clocks import Clocks
from natgrad.kfac.newcomers import Newcomers
from natgrad.kfac.observation import Observation
from natgrad.kfac.prediction import QuadraticModel
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import FoundLoss, KFACSettings
from natgrad.kfac.state.entries import Entry, gathered, saved, tensors_of_block
from natgrad.kfac.state.validation import VERSION, check_on_all_ranks, identity


class Saveable(Protocol):
    """The attributes of a preconditioner that are saved."""

    steps: int
    settings: KFACSettings
    update_clocks: Clocks
    refresh_clocks: Clocks
    observation: Observation
    preconditioning: Preconditioning
    prediction: QuadraticModel
    blocks: list[Block]
    comm: Communicator
    team: Team
    newcomers: Newcomers
    capture: Capture


def save(kfac: Saveable) -> dict[str, Any]:
    """Everything, on every rank; all ranks must call it together."""
    state = summary(kfac)
    for entry, tensor in gathered(kfac.team, list(saved(state, kfac.team))):
        block = state["blocks"][entry.block.name]
        if entry.kind == "factors":
            block["factors"].setdefault(entry.factor, {})[entry.part] = tensor
        elif entry.kind == "moments":
            block["moments"][entry.factor] = tensor
        else:
            block["parts"].setdefault(entry.factor, []).append(tensor)
    return state


def load(kfac: Saveable, state: Mapping[str, Any]) -> None:
    """Take this rank's share of a complete state; all ranks must call it together."""
    check_on_all_ranks(kfac, lambda: state)
    tensors = {
        entry: entry.copy(_saved(state["blocks"][entry.block.name], entry))
        for entry in saved(state, kfac.team)
        if kfac.team.rank in entry.ranks
    }
    resume(kfac, state, tensors)


def summary(kfac: Saveable) -> dict[str, Any]:
    """The state without its tensors. A collective: only those who keep a factor know of it."""
    plan = kfac.team.plan
    ranks = kfac.comm.gather(
        (
            kfac.steps,
            kfac.observation.state(kfac.blocks[0].device),
            {
                b.name: (
                    set(b.running),
                    set(b.parts),
                    set(b.moments),
                    _name(b.shares_input_with),
                )
                for b in kfac.blocks
            },
            kfac.capture.place,
        )
    )
    for rank, (steps, *_) in enumerate(ranks):
        if steps != ranks[0][0]:
            raise CheckpointError(
                f"Rank {rank} has made {steps} steps and rank 0 {ranks[0][0]}: save on all ranks "
                "after the same step."
            )
    blocks = {}
    for block in kfac.blocks:
        found = [seen[block.name] for _, _, seen, _ in ranks]
        ids = [(block.name, name) for name in sorted(block.forms)]
        blocks[block.name] = {
            **identity(block),
            "factors": {},
            "parts": {},
            "moments": {},
            # What must be there: a truncated file has fewer.
            "saved": {
                "factors": [f[1] for f in ids if f[1] in found[plan.keepers[f][0]][0]],
                "parts": [
                    f[1] for f in ids if f in plan.holders and f[1] in found[plan.holders[f][0]][1]
                ],
                "moments": sorted(found[plan.workers[block.name][0]][2]),
            },
            "dropped": int(block.dropped),
            "failures": block.failures,
            # A rank without data has not seen which layers share an input.
            "shares_input_with": next((name for *_, name in found if name is not None), None),
        }
    generators = [generator for _, generator, *_ in ranks]
    return {
        "version": VERSION,
        "steps": kfac.steps,
        "adapted_damping": kfac.settings.adapted,
        "place": max((place for *_, place in ranks), key=abs),  # ranks without data have seen none
        "loss": list(kfac.settings.found or ()) or ["unknown"] * kfac.settings.unknown,
        "update_clocks": kfac.update_clocks.state_dict(),
        "refresh_clocks": kfac.refresh_clocks.state_dict(),
        "born": {block.name: step for block, step in kfac.newcomers.born.items()},
        "generator": None if generators[0] is None else generators,
        "zeroed": kfac.preconditioning.zeroed,
        "moments": kfac.team.motion.names,
        "blocks": blocks,
    }


def resume(kfac: Saveable, state: Mapping[str, Any], tensors: Mapping[Entry, Tensor]) -> None:
    """Continue from a state that fits, with the tensors of this rank."""
    kfac.steps = int(state["steps"])
    kfac.settings.adapted = float(state["adapted_damping"])
    kind, *numbers = state.get("loss") or [""]  # a list that older states do not have
    kfac.settings.found = FoundLoss(kind, *numbers) if numbers else None
    kfac.settings.unknown = kind == "unknown"
    kfac.capture.place = int(state.get("place") or 0)  # older states do not have it
    kfac.update_clocks.load_state_dict(state["update_clocks"])
    kfac.refresh_clocks.load_state_dict(state["refresh_clocks"])
    kfac.preconditioning.zeroed = int(state["zeroed"])
    kfac.observation.load(state["generator"], kfac.blocks[0].device, kfac.team.size)
    by_name = {block.name: block for block in kfac.blocks}
    for block in kfac.blocks:
        own = state["blocks"][block.name]
        block.restore(
            **tensors_of_block(block, tensors)._asdict(),
            solved=set(own["saved"]["parts"]) - set(block.structure.in_basis),
            counts=(int(own["dropped"]), int(own["failures"])),
            shares_input_with=by_name.get(own["shares_input_with"]),
        )
    born = state.get("born") or {}  # which older states do not have
    kfac.newcomers.born = {by_name[name]: int(step) for name, step in born.items()}
    kfac.preconditioning.invalidate()
    kfac.prediction.remembered = []


def _saved(block: Mapping[str, Any], entry: Entry) -> Tensor:
    """A tensor in the state of a block."""
    found = block[entry.kind][entry.factor]
    saved: Tensor = found if entry.kind == "moments" else found[entry.part]
    return saved


def _name(block: Block | None) -> str | None:
    return None if block is None else block.name
