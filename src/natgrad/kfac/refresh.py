"""The refresh clock: which factors are decomposed anew, where, and how their parts are shared.

A factor is due by the clock, by its turn (`Staggered`), or because its decomposition has measurably
drifted away from it (`Drift`), which the rank that decomposes it finds out and tells the others. A
rank decomposes what the plan gives to it. Then all of them agree on what has failed anywhere, so
that no block is applied with parts of two different steps, and the parts go to the ranks that
precondition with them.

Layers with one input have the same input factor and so the same decomposition of it, where nothing
of their own enters that; it is then done once.

On CPUs blocks are decomposed side by side, one thread each: LAPACK gains little from a second
thread. Factors larger than 2,048 go one after the other, for their memory.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.comm.wire import Plain
from natgrad.inverses import Parts
from natgrad.kfac.clocks import Clocks
from natgrad.kfac.forecast import Forecast
from natgrad.kfac.newcomers import Newcomers
from natgrad.kfac.ranks.copying import Copying
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import Values
from natgrad.kfac.step import Step
from natgrad.linalg.threads import spread
from natgrad.placement.ops import FactorId, Op, Rows, Share

Due = dict[Block, set[str]]
Made = dict[Block, dict[str, Parts | None]]
Done = dict[Block, dict[str, bool]]  # of what a rank has tried

# Two larger matrices at a time would take more memory than the time is worth.
_LARGE = 2048


class Refresh:
    """Called at every step; decomposes what is due by the clock or by its measured drift."""

    def __init__(self, team: Team, clocks: Clocks, newcomers: Newcomers) -> None:
        self.team, self.clocks, self.newcomers = team, clocks, newcomers
        self.forecast = Forecast(team)
        # A layer that shares its input with another comes after that one.
        self.blocks = list(team.blocks.values())
        # The dimension of the largest factor, and each factor's clock.
        self.largest = {
            b: max((form.spec.dim for form in b.forms.values()), default=0) for b in self.blocks
        }
        self._shares = [op for op in team.plan.refresh if isinstance(op, Share)]
        self._sent = {op.factor for op in self._shares if op.source == team.rank}
        # The rows that this rank makes of inverses that several ranks share out.
        self._rows: dict[FactorId, Rows] = {
            factor: rows for (factor, rank), rows in team.plan.rows.items() if rank == team.rank
        }
        self._rounds = team.inverse_wire != Plain(team.dtype)
        self._copying = Copying(team, self._shares, team.inverse_wire, "inverses")
        self.keys = {b: {name: clocks.key(name) for name in b.decomposes} for b in self.blocks}

    def __call__(self, step: Step) -> list[str]:
        """Returns what went wrong, a sentence each."""
        keys = self.clocks.due(step.index)
        if not (keys or step.updates or self.clocks.takes_turns or self.newcomers.born):
            return []
        due = {block: self._due(block, step, keys) for block in self.blocks}
        if step.updates and self.clocks.drifts:
            self._add_drifted(due, step.values)
        self.clocks.mark(step.index, keys)
        if not any(due.values()):
            return []
        failed: list[tuple[Block, str]] = []
        if self.team.alone:  # nobody waits for all of them: new ones replace old ones as they come
            for block, made in self._decompose_shown(due, step.values):
                solved = {n: parts for n, parts in made.items() if parts is not None}
                block.install(solved, solved, self.team.keeps[block])
                failed += [(block, name) for name in made if name not in solved]
                del made, solved  # before the next ones are made
        else:
            done: Done = {}
            waiting: dict[Block, dict[str, Parts]] = {}
            made_rows: dict[FactorId, Tensor] = {}
            for block, made in self._decompose_shown(due, step.values):
                done[block] = {name: parts is not None for name, parts in made.items()}
                self._take(block, made, waiting, made_rows)
                del made
            good, failed = self._agree(due, done)
            self._share(good, waiting, made_rows)
            for block, names in good.items():
                block.install(waiting.pop(block, {}), names, self.team.keeps[block])
        for block, _ in failed:
            block.fail()
        return [_sentence(block, name) for block, name in failed]

    def _due(self, block: Block, step: Step, keys: set[str]) -> set[str]:
        """The same on every rank."""
        own = self.keys[block]
        if not block.ready:
            return set(own) if step.updates or keys else set()
        due = {name for name, key in own.items() if key in keys}
        if self.clocks.takes_turns:
            index, count = self.team.order[block], len(self.blocks)
            due |= {name for name in own if self.clocks.turn(name, step.index, index, count)}
        if self.newcomers.born:
            due |= self.newcomers.refreshed(block, step.index)
        return due

    def _add_drifted(self, due: Due, now: Values) -> None:
        """What has measurably moved; the rank that decomposes a factor says so."""
        watched = [
            (block, name, tolerance)
            for block in self.blocks
            for name in block.decomposes
            if (tolerance := self.clocks.tolerance(name)) is not None
            and block.ready
            and name not in due[block]
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

    def _decompose_shown(
        self, due: Due, now: Values
    ) -> Iterator[tuple[Block, dict[str, Parts | None]]]:
        """With a word before the first ones, and a bar, if they are going to be long."""
        mine = [
            (block, name)
            for block in self.blocks
            for name in sorted(due[block] & self.team.decomposes[block])
        ]
        bar = self.forecast.begin(mine) if self.forecast.matters else None
        for block, made in self._decompose(due, now):
            if bar is not None:
                bar.add(block, made)
            yield block, made
            del made
        if bar is not None:
            bar.end()

    def _decompose(self, due: Due, now: Values) -> Iterator[tuple[Block, dict[str, Parts | None]]]:
        """What this rank decomposes, of each block: first those whose input factors others share,
        then those others."""
        mine = {block: due[block] & self.team.decomposes[block] for block in self.blocks}
        second = {block: names for block, names in mine.items() if block.shares_input_with}
        first = {block: names for block, names in mine.items() if block not in second}
        shared = {block.shares_input_with for block in second}
        found: Made = {}  # what others copy, and no more: the rest is at its place by now
        for block, made in self._make(first, now):
            if block in shared:
                found[block] = made
            yield block, made
            del made
        copies = {
            block: {
                name: tuple(part.clone() for part in parts)
                for name in names
                if (parts := _of_same_input(block, name, found)) is not None
            }
            for block, names in second.items()
        }
        rest = {block: names - copies[block].keys() for block, names in second.items()}
        for block, made in self._make(rest, now):
            yield block, {**made, **copies.pop(block)}
            del made

    def _make(self, wanted: Due, now: Values) -> Iterator[tuple[Block, dict[str, Parts | None]]]:
        """Decompose these factors; on a CPU several blocks at a time, unless they are large."""

        calls = {
            block: partial(block.decompose, sorted(names), damping, self._rows_of(block, names))
            for (block, names), damping in zip(wanted.items(), now.dampings(wanted), strict=True)
        }
        small = []
        for block, names in wanted.items():
            if names and block.device.type == "cpu" and self.largest[block] <= _LARGE:
                small.append(block)
            else:
                yield block, calls[block]() if names else {}
        small.sort(key=self.largest.__getitem__, reverse=True)
        results = spread([calls[block] for block in small])
        for block in small:
            yield block, next(results)

    def _take(
        self,
        block: Block,
        made: dict[str, Parts | None],
        waiting: dict[Block, dict[str, Parts]],
        made_rows: dict[FactorId, Tensor],
    ) -> None:
        """Bring what this rank has decomposed to its place at once: nobody else decomposes it, so
        that others can only agree. What is in the basis of several factors waits for all of them,
        and rows for those of other ranks.
        """
        for name, parts in made.items():
            if parts is None:
                continue
            if (block.name, name) in self._sent and self._rounds:
                # As others get it, so that all ranks precondition with the same numbers.
                parts = tuple(self.team.inverse_wire.rounded(part) for part in parts)
            if block.structure.in_basis:
                waiting.setdefault(block, {})[name] = parts
            elif (block.name, name) in self._rows:
                made_rows[block.name, name] = parts[0][0]
            else:
                block.install({name: parts}, ())

    def _rows_of(self, block: Block, names: set[str]) -> dict[str, Rows]:
        if not self._rows:
            return {}
        return {n: rows for n in names if (rows := self._rows.get((block.name, n))) is not None}

    def _agree(self, due: Due, done: Done) -> tuple[Due, list[tuple[Block, str]]]:
        """What was decomposed by everyone who should have, and what failed at anybody."""
        asked = [(block, name) for block in self.blocks for name in sorted(due[block])]
        votes = []
        for block, name in asked:
            own = done[block].get(name)
            votes += [float(own is True), float(own is False)]
        totals = self.team.total(votes).view(-1, 2).tolist()
        good: Due = {}
        failed = []
        for (block, name), (successes, failures) in zip(asked, totals, strict=True):
            if failures:
                failed.append((block, name))
            elif successes:
                good.setdefault(block, set()).add(name)
        return good, failed

    def _share(
        self,
        good: Due,
        waiting: dict[Block, dict[str, Parts]],
        made_rows: dict[FactorId, Tensor],
    ) -> None:
        """Send what others precondition with, and bring what they send to its place."""
        ids: set[FactorId] = {(block.name, n) for block, names in good.items() for n in names}
        ops = [op for op in self._shares if op.factor in ids]

        def flat(op: Op, to: int, clip: bool) -> Tensor:
            block, name = self._of(op)
            assert isinstance(op, Share)
            if op.factor in made_rows:
                return made_rows[op.factor].flatten()
            parts = waiting[block][name] if block in waiting else block.parts[name]
            return torch.cat([part.flatten() for part in parts])

        for arrival in self._copying(ops, flat):
            op, (block, name) = arrival.op, self._of(arrival.op)
            assert isinstance(op, Share)
            if op.rows is not None:
                rows = arrival.data.view(op.rows[1] - op.rows[0], -1)
                block.install_rows(name, op.rows[0], rows)
                del rows
            elif block.structure.in_basis:
                waiting.setdefault(block, {})[name] = _parts(block, name, arrival.data, copy=True)
            else:
                new = name not in block.parts
                block.install({name: _parts(block, name, arrival.data, copy=new)}, ())
            del arrival  # with its buffer, before the next one is made
        for factor in ids & made_rows.keys():
            block, name = self.team.blocks[factor[0]], factor[1]
            block.install_rows(name, self._rows[factor][0], made_rows.pop(factor))

    def _of(self, op: Op) -> tuple[Block, str]:
        assert isinstance(op, Share)
        block, name = op.factor
        return self.team.blocks[block], name


def _parts(block: Block, name: str, data: Tensor, *, copy: bool) -> Parts:
    """``data [numbers]`` in the shapes that the inverse of a factor has. What is kept must be a
    ``copy``: the buffer holds the parts of other factors, too."""
    shapes = block.part_shapes(name)
    pieces = data.split([torch.Size(shape).numel() for shape in shapes])
    return tuple(
        piece.view(shape).to(block.wide_dtype, copy=True) if copy else piece.view(shape)
        for piece, shape in zip(pieces, shapes, strict=True)
    )


def _of_same_input(block: Block, name: str, made: Made) -> Parts | None:
    """The parts of the same factor of a layer with the same input, if there are any.

    The averages themselves are compared, so a layer that once saw another input is noticed. Where
    each factor is damped by itself, A's damping depends on the layer's own G.
    """
    other = block.shares_input_with
    if other is None or not block.factors[name].of_inputs or block.inverse != other.inverse:
        return None
    if block.decomposed_together or other.decomposed_together:
        return None
    mine, theirs = block.running.get(name), other.running.get(name)
    if mine is None or theirs is None or mine.mean.shape != theirs.mean.shape:
        return None
    return made.get(other, {}).get(name) if torch.equal(mine.mean, theirs.mean) else None


def _sentence(block: Block, name: str) -> str:
    kept = "its last good inverse stays" if block.ready else "its gradient stays as it is"
    return (
        f"Factor {name} of {block.kind} {block.name!r} could not be decomposed, so {kept}; "
        "training goes on. If this repeats, raise the damping."
    )
