"""Which factors are decomposed anew, doing so where the plan says, and sharing the parts."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from natgrad.inverses import Parts
from natgrad.linalg.threads import spread
from natgrad.placement.ops import FactorId, Message, Share
from natgrad.runtime.blocks import Block
from natgrad.runtime.settings import Clocks, Values
from natgrad.runtime.team import Shipment, Team

Due = dict[Block, set[str]]
Made = dict[Block, dict[str, Parts | None]]

# Two larger matrices at a time would take more memory than the time is worth.
_LARGE = 2048


class Refresh:
    """Called at every step; decomposes what is due by the clock or by its measured drift."""

    def __init__(self, team: Team, clocks: Clocks) -> None:
        self.team, self.clocks = team, clocks
        # A layer that shares its input with another comes after that one.
        self.blocks = list(team.blocks.values())

    def __call__(self, step: int, now: Values, updated: bool) -> list[str]:
        """Returns what went wrong, a sentence each."""
        keys = self.clocks.due(step)
        due = {block: self._due(block, step, keys, updated) for block in self.blocks}
        if updated:
            self._add_drifted(due, now)
        self.clocks.mark(step, keys)
        if not any(due.values()):
            return []
        failed: list[tuple[Block, str]] = []
        if self.team.alone:  # nobody waits for all of them: new ones replace old ones as they come
            for block, made in self._decompose(due, now):
                solved = {n: parts for n, parts in made.items() if parts is not None}
                self._install(block, solved, solved.keys())
                failed += [(block, name) for name in made if name not in solved]
        else:
            found = dict(self._decompose(due, now))
            good, failed = self._agree(due, found)
            for block, parts in self._share(found, good).items():
                self._install(block, parts, good[block])
        for block, _ in failed:
            block.failures += 1
        return [_sentence(block, name) for block, name in failed]

    def _install(self, block: Block, parts: dict[str, Parts], solved: Iterable[str]) -> None:
        """``solved``: what is decomposed now, here or elsewhere."""
        block.install(parts, self.team.keeps[block])
        block.solved |= set(solved)

    def _due(self, block: Block, step: int, keys: set[str], updated: bool) -> set[str]:
        """The same on every rank."""
        names = self.team.plan.block[block.name].decomposed
        if not block.ready:
            return set(names) if updated or keys else set()
        return {
            name
            for name in names
            if self.clocks.key(name) in keys
            or self.clocks.turn(name, step, self.team.order[block], len(self.blocks))
        }

    def _add_drifted(self, due: Due, now: Values) -> None:
        """What has measurably moved; the rank that decomposes a factor says so."""
        watched = [
            (block, name, tolerance)
            for block in self.blocks
            for name in self.team.plan.block[block.name].decomposed
            if block.ready
            and name not in due[block]
            and (tolerance := self.clocks.tolerance(name)) is not None
        ]
        if not watched:
            return
        moved = self.team.total(
            [
                float(
                    name in self.team.decomposes[block]
                    and not block.error(name, now.damping_of(block)) <= tolerance
                )
                for block, name, tolerance in watched
            ]
        )
        for (block, name, _), votes in zip(watched, moved.tolist(), strict=True):
            if votes:
                due[block].add(name)

    def _decompose(self, due: Due, now: Values) -> Iterator[tuple[Block, dict[str, Parts | None]]]:
        """What this rank decomposes, of each block."""
        mine = {block: due[block] & self.team.decomposes[block] for block in self.blocks}
        twins = {block.twin for block in self.blocks}
        inputs: dict[Block | None, Parts | None] = {}
        first = {block: names for block, names in mine.items() if block.twin is None}
        for block, made in self._make(first, now):
            if block in twins:
                inputs[block] = made.get("A")
            yield block, made
        ready_made = {}
        for block in mine.keys() - first.keys():
            parts = inputs.get(block.twin)
            if "A" in mine[block] and parts is not None and _same_inputs(block):
                ready_made[block] = tuple(part.clone() for part in parts)
        rest = {
            block: mine[block] - ({"A"} if block in ready_made else set())
            for block in self.blocks
            if block.twin is not None
        }
        for block, made in self._make(rest, now):
            yield block, made | ({"A": ready_made[block]} if block in ready_made else {})

    def _make(self, wanted: Due, now: Values) -> Iterator[tuple[Block, dict[str, Parts | None]]]:
        """Decompose these factors; on a CPU several blocks at a time, unless they are large."""

        def call(block: Block) -> Callable[[], dict[str, Parts | None]]:
            return lambda: block.decompose(sorted(wanted[block]), now.damping_of(block))

        small = []
        for block, names in wanted.items():
            if names and block.device.type == "cpu" and _largest(block) <= _LARGE:
                small.append(block)
            else:
                yield block, call(block)() if names else {}
        small.sort(key=_largest, reverse=True)
        yield from zip(small, spread([call(block) for block in small]), strict=True)

    def _agree(self, due: Due, made: Made) -> tuple[Due, list[tuple[Block, str]]]:
        """What was decomposed by everyone who should have, and what failed at anybody."""
        asked = [(block, name) for block in self.blocks for name in sorted(due[block])]
        votes = []
        for block, name in asked:
            own = made[block]
            votes += [float(own.get(name) is not None), float(name in own and own[name] is None)]
        totals = self.team.total(votes).view(-1, 2).tolist()
        good: Due = {}
        failed = []
        for (block, name), (done, not_done) in zip(asked, totals, strict=True):
            if not_done:
                failed.append((block, name))
            elif done == len(self.team.plan.decomposers[block.name, name]):
                good.setdefault(block, set()).add(name)
        return good, failed

    def _share(self, made: Made, good: Due) -> dict[Block, dict[str, Parts]]:
        """The parts that this rank preconditions with, its own ones and those of others."""
        found: dict[Block, dict[str, Parts]] = {
            block: {n: parts for n in names if (parts := made[block].get(n)) is not None}
            for block, names in good.items()
        }
        ids: set[FactorId] = {(block.name, n) for block, names in good.items() for n in names}
        plan = self.team.plan
        ops = [op for op in plan.refresh if isinstance(op, Share) and op.factor in ids]

        def payload(message: Message) -> Tensor:
            block, name = self._of(message)
            return torch.cat([part.flatten() for part in found[block][name]])

        for some in plan.cut(ops):
            shipment = Shipment(self.team, some)
            for message, data in shipment.arrived(
                shipment.send(payload, self.team.dtype, "inverses")
            ):
                block, name = self._of(message)
                found[block][name] = _parts(block, name, data)
        return found

    def _of(self, message: Message) -> tuple[Block, str]:
        assert isinstance(message.op, Share)
        block, name = message.op.factor
        return self.team.blocks[block], name


def _largest(block: Block) -> int:
    """The dimension of its largest factor."""
    return max(form.dim for form in block.forms.values())


def _parts(block: Block, name: str, data: Tensor) -> Parts:
    """``data [numbers]`` in the shapes that the inverse of a factor has."""
    shapes = block.part_shapes(name)
    pieces = data.split([torch.Size(shape).numel() for shape in shapes])
    dtype = torch.promote_types(block.dtype, torch.float32)
    return tuple(
        piece.view(shape).to(dtype, copy=True)  # the buffer holds those of others, too
        for piece, shape in zip(pieces, shapes, strict=True)
    )


def _same_inputs(block: Block) -> bool:
    """Whether A of a layer and of its twin is the same, so that one decomposition serves both.

    The averages themselves are compared, so a layer that once saw another input is noticed. Where
    each factor is damped by itself A's damping depends on the layer's own G.
    """
    if block.twin is None:
        return False
    mine, other = block.running.get("A"), block.twin.running.get("A")
    return (
        block.inverse.joint
        and mine is not None
        and other is not None
        and mine.mean.shape == other.mean.shape
        and torch.equal(mine.mean, other.mean)
    )


def _sentence(block: Block, name: str) -> str:
    kept = "its last good inverse stays" if block.ready else "its gradient stays as it is"
    return (
        f"Factor {name} of {block.kind} {block.name!r} could not be decomposed, so {kept}; "
        "training goes on. If this repeats, raise the damping."
    )
