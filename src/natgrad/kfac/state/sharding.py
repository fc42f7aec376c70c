"""A state in shards: each rank saves what it keeps and loads what its plan calls for.

No rank ever holds the state of all. Resharding, for another number of ranks or another placement,
is done by ``torch.distributed.checkpoint``, which reads by name; that is why names and shapes must
not depend on the number of ranks. Everything that is no tensor is one header, as JSON.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.comm.checkpoints import Folder, names, read, verify, write
from natgrad.errors import CheckpointError, SettingError
from natgrad.kfac.state.checkpoint import Saveable, resume, summary
from natgrad.kfac.state.entries import Entry, entries, saved
from natgrad.kfac.state.validation import DAMAGED, check_on_all_ranks, check_tensor

NAME = "kfac"
HEADER = "header"


class Shards:
    """This rank's share of a preconditioner's state, as ``torch.distributed.checkpoint`` takes it::

        dcp.save({"model": model, "kfac": kfac.shards()}, checkpoint_id=folder)
        dcp.load({"model": model, "kfac": kfac.shards()}, checkpoint_id=folder)

    Its keys and sizes follow from the model and the settings alone, zeros stand for what is not
    there yet: so a new KFAC knows what to ask a checkpoint for, at any world size and placement.
    All ranks must call its methods together.
    """

    def __init__(self, kfac: Saveable, after_load: Callable[[], None]) -> None:
        self.kfac, self.after_load = kfac, after_load

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that this rank keeps. ``header``: everything else, as JSON."""
        header = json.dumps(_to_json(summary(self.kfac)))
        return {HEADER: header, **{e.key: e.copy(e.here) for e in self._entries()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, here or elsewhere. One that does not fit changes nothing."""
        header = check_on_all_ranks(
            self.kfac,
            lambda: _from_json(state.get(HEADER)),
            lambda header: self._check(header, state),
        )
        found = {entry: entry.copy(state[entry.key]) for entry in self._saved(header)}
        resume(self.kfac, header, found)
        self.after_load()

    def check(self, header: Any) -> None:
        """Raise, on all ranks, if a header is that of a state that does not fit."""
        check_on_all_ranks(self.kfac, lambda: _from_json(header), lambda _: None)

    def _check(self, header: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        for entry in self._saved(header):
            what = f"The state of block {entry.block.name!r}, {entry.kind} {entry.factor},"
            check_tensor(state.get(entry.key), entry.shape, what, entry.dtype)

    def _entries(self) -> list[Entry]:
        rank = self.kfac.team.rank
        return [entry for entry in entries(self.kfac.team) if rank in entry.ranks]

    def _saved(self, header: Mapping[str, Any]) -> list[Entry]:
        rank = self.kfac.team.rank
        return [entry for entry in saved(header, self.kfac.team) if rank in entry.ranks]


def save(shards: Shards, folder: Folder, beside: Mapping[str, Any]) -> None:
    _check_names(beside)
    state = {name: _value(item) for name, item in {**beside, NAME: shards}.items()}
    write(shards.kfac.comm, folder, state)


def load(shards: Shards, folder: Folder, beside: dict[str, Any]) -> None:
    _check_names(beside)
    comm = shards.kfac.comm
    verify(comm, folder)
    known = names(comm, folder)
    header: dict[str, Any] = {NAME: {HEADER: ""}}
    read(comm, folder, header)
    shards.check(header[NAME][HEADER])  # before anything is read into the model
    items = {**beside, NAME: shards}
    stateless = {
        name: item
        for name, item in beside.items()
        if isinstance(item, Optimizer)
        and not item.state
        and any(one.startswith(f"{name}.state.") for one in known)
    }
    try:
        for item in stateless.values():
            _create_state(item)
        state = {name: _value(item) for name, item in items.items()}
        read(comm, folder, state)
    except BaseException:
        for item in stateless.values():
            item.state.clear()
        raise
    for name, item in items.items():
        if _has_state(item):
            item.load_state_dict(state[name])
        else:
            beside[name] = state[name]


def _create_state(optimizer: Optimizer) -> None:
    """A step with learning rate 0: before its first step an optimizer has no state, and reading a
    checkpoint into nothing would lose what was saved."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _check_names(beside: Mapping[str, Any]) -> None:
    if NAME in beside:
        raise SettingError(
            f"beside has a {NAME!r}, which is what the state of K-FAC itself is saved as: give it "
            "another name."
        )


def _has_state(item: Any) -> bool:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _value(item: Any) -> Any:
    return item.state_dict() if _has_state(item) else item


def _to_json(state: dict[str, Any]) -> dict[str, Any]:
    generators = state["generator"]
    if generators is not None:
        generators = [bytes(one.tolist()).hex() for one in generators]
    return {**state, "generator": generators}


def _from_json(text: Any) -> Any:
    try:
        state = json.loads(text)
        if state["generator"] is not None:
            state["generator"] = [_generator(one) for one in state["generator"]]
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"The header of the state cannot be read: {DAMAGED}") from error
    return state


def _generator(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
