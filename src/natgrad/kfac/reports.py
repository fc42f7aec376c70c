"""What is covered, how large it is, how long it takes and how fast it moves, as tables.

Each table carries its numbers as fields beside the text, for programs to read.
"""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import FROZEN, Uncovered, clean
from natgrad.capture.stopwatch import Stopwatch
from natgrad.comm import Communicator
from natgrad.kfac.settings import Values
from natgrad.kfac.stacks import Stack
from natgrad.layers import SharedInput
from natgrad.layers.experts import Expert
from natgrad.linalg.forms import Form
from natgrad.linalg.workspace import held
from natgrad.tables import Column, Table, bytes_text, seconds_text


@dataclass(frozen=True)
class Coverage(Table):
    """``covered`` and ``uncovered``: structure, or reason, by parameter name."""

    covered: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory(Table):
    """``total``: bytes by purpose."""

    total: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Timings(Table):
    """``seconds`` and ``calls`` by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DriftTable(Table):
    """By ``(block, factor)``: last ``change`` (Osawa 2019, eq. 19), ``error`` of its parts."""

    change: dict[tuple[str, str], float] = field(default_factory=dict)
    error: dict[tuple[str, str], float] = field(default_factory=dict)


def coverage(model: nn.Module, blocks: list[Block], uncovered: dict[str, Uncovered]) -> Coverage:
    owners: dict[int, list[Block]] = {}
    for one in blocks:
        for p in one.parameters:
            owners.setdefault(id(p), []).append(one)
    owner = {key: _spokesman(own) for key, own in owners.items()}
    rows, done, left = [], {}, {}
    numbers: Counter[str] = Counter()
    for raw, parameter in model.named_parameters():
        name, block = clean(raw), owner.get(id(parameter))
        shape = " x ".join(map(str, parameter.shape)) or "1"
        if block is not None and not block.lost and (block.ready or not block.refused):
            done[name] = repr(block.structure)
            state = _state(block) + _waiting(owners[id(parameter)])
            rows.append((name, shape, block.kind, repr(block.structure), state))
            numbers["covered"] += parameter.numel()
        else:
            kind, reason = _left(parameter, block, uncovered.get(name))
            left[name] = reason
            # No optimizer touches what is frozen.
            state = FROZEN if reason == FROZEN else f"left to the optimizer: {reason}"
            rows.append((name, shape, kind, "", state))
            numbers[FROZEN if reason == FROZEN else "left"] += parameter.numel()
    trained = numbers["covered"] + numbers["left"]
    share = 100 * numbers["covered"] / max(1, trained)
    footer = (
        f"{numbers['covered']:,} of {trained:,} trained parameters preconditioned ({share:.1f}%)"
    )
    if narrow := _narrowed(blocks):
        footer += f"\n{narrow}"
    columns = ("parameter", "shape", "layer", "structure", "state")
    return Coverage(
        "Coverage", tuple(map(Column, columns)), tuple(rows), footer, covered=done, uncovered=left
    )


def _spokesman(blocks: list[Block]) -> Block:
    """Of those that a parameter is divided among, one that is ready, if any is."""
    return next((block for block in reversed(blocks) if block.ready), blocks[-1])


def _waiting(blocks: list[Block]) -> str:
    """How many experts have not seen enough to begin, where others have."""
    idle = {b.layers[0].index for b in blocks if isinstance(b.layers[0], Expert) and not b.ready}
    every = {b.layers[0].index for b in blocks if isinstance(b.layers[0], Expert)}
    if not idle or idle == every:
        return ""
    return f", {len(idle)} of {len(every)} experts wait for rows"


def _narrowed(blocks: list[Block]) -> str:
    """What is kept in part for its width, and what to do about it."""
    wide = sum(bool(_in_part(block)) for block in blocks)
    if not wide:
        return ""
    return (
        f"{wide} block{' keeps' if wide == 1 else 's keep'} only diagonal blocks, or the diagonal "
        "(size 1), of factors that are wide: max_dim=None keeps all of them whole, "
        "structure=Kronecker(input_block=...) larger blocks"
    )


def _in_part(block: Block) -> list[Form]:
    """Factors of which blocks are kept, or a diagonal where the layer itself has more."""
    layer = block.layers[0]
    if not isinstance(layer, SharedInput):
        return []
    own = {"A": layer.input_form(), "G": layer.gradient_form()}
    kept = {name: form for name, form in block.forms.items() if name in own}
    return [f for n, f in kept.items() if f.sections or (f.diagonal and not own[n].diagonal)]


def _left(parameter: Tensor, block: Block | None, why: Uncovered | None) -> tuple[str, str]:
    """Kind of layer and reason, as the model is now: it may have changed since."""
    kind = block.kind if block is not None else why.kind if why is not None else ""
    if not parameter.requires_grad:
        return kind, FROZEN
    if block is not None and not block.lost:
        return kind, block.refused
    if block is not None:
        return kind, f"a parameter of the block was {block.lost} after KFAC was made"
    if why is None:
        return kind, "not there when KFAC was made"
    return kind, "frozen when KFAC was made" if why.reason == FROZEN else why.reason


def _state(block: Block) -> str:
    if not block.ready:
        return "no statistics yet"
    notes = ["preconditioned" if block.factors else "steps without curvature"]
    if dropped := int(block.dropped):
        notes.append(f"{dropped} updates dropped")
    if block.failures:
        notes.append(f"{block.failures} decompositions failed")
    return ", ".join(notes)


def memory(blocks: list[Block], stacks: list[Stack], buffers: list[Tensor]) -> Memory:
    purposes = ["factors", "inverses", "sums"]
    if any(block.moments for block in blocks):
        purposes.append("momentum")
    rows = []
    total: Counter[str] = Counter()
    for block in blocks:
        own: Counter[str] = Counter()
        for purpose, tensor in block.tensors():
            own[purpose] += _size(tensor)
        total.update(own)
        rows.append((block.name, *(bytes_text(own[p]) for p in purposes), bytes_text(own.total())))
    total["scales"] = sum(_size(t) for stack in stacks for t in stack.decomposed.tensors())
    total["workspace"] = held() + sum(map(_size, buffers))
    footer = (
        f"{bytes_text(total.total())} in all, of it {bytes_text(total['scales'])} damped "
        f"eigenvalues of all blocks and {bytes_text(total['workspace'])} workspace"
    )
    columns = (Column("block"), *(Column(p, "right") for p in (*purposes, "all")))
    return Memory("Memory", columns, tuple(rows), footer, total=dict(total))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def timings(watch: Stopwatch, steps: int) -> Timings:
    rows = tuple(
        (stage, seconds_text(s), str(watch.calls[stage]), seconds_text(s / max(1, steps)))
        for stage, s in watch.seconds.items()
    )
    columns = (Column("stage"), *(Column(c, "right") for c in ("seconds", "calls", "a step")))
    spent = sum(watch.seconds.values())
    return Timings(
        "Timings",
        columns,
        rows,
        f"{seconds_text(spent)} in {steps} steps, measured on the host",
        seconds=dict(watch.seconds),
        calls=dict(watch.calls),
    )


@dataclass(frozen=True)
class TrafficTable(Table):
    """``sent`` bytes and ``calls`` by purpose."""

    sent: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


def traffic(comm: Communicator, steps: int) -> TrafficTable:
    sent, calls = dict(comm.traffic.sent), dict(comm.traffic.calls)
    rows = tuple(
        (purpose, bytes_text(n), str(calls[purpose]), bytes_text(n / max(1, steps)))
        for purpose, n in sent.items()
    )
    columns = (Column("purpose"), *(Column(c, "right") for c in ("sent", "calls", "a step")))
    footer = f"{bytes_text(sum(sent.values()))} sent by rank {comm.rank} of {comm.size}"
    return TrafficTable(
        "Traffic", columns, rows, f"{footer} in {steps} steps", sent=sent, calls=calls
    )


def drift(blocks: list[Block], now: Values) -> DriftTable:
    rows, changes, errors = [], {}, {}
    for block in blocks:
        for name, running in block.running.items():
            key = (block.name, name)
            changes[key] = float(running.change)
            cells = [block.name, name, f"{changes[key]:.3g}", ""]
            if name in block.parts and name not in block.structure.in_basis:
                errors[key] = block.error(name, now.damping_of(block))
                cells[3] = f"{errors[key]:.3g}"
            rows.append(tuple(cells))
    columns = (
        Column("block"),
        Column("factor"),
        Column("change in last update", "right"),
        Column("error of decomposition", "right"),
    )
    return DriftTable("Drift", columns, tuple(rows), change=changes, error=errors)
