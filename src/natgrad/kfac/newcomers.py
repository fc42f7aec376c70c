"""Blocks that were made while a training goes on: their statistics begin at once.

Everybody else's clocks may be at an interval of a hundred steps by then. A newcomer is due at its
first step whatever the clocks say, and, where intervals grow with the steps, at steps 1, 2, 4, 8, …
of its own until that would be rarer than what all others do. All of it follows from the step at
which a block was made, which is all that a checkpoint needs.
"""

from collections.abc import Iterable, Mapping, Sequence

from natgrad.capture.blocks import Block
from natgrad.capture.passes import Pass
from natgrad.checks import AT_LEAST_ONE
from natgrad.kfac.clocks import Clock, Clocks
from natgrad.schedules import value_at


class Newcomers:
    """``born``: the step at which each was made, of those that are not yet like all others."""

    def __init__(self, updates: Clocks, refreshes: Clocks) -> None:
        self.updates, self.refreshes = updates, refreshes
        self.born: dict[Block, int] = {}
        self._missed: list[Pass] = []  # of the step at which they were made, before that
        self.untried: list[Block] = []  # nobody has looked whether their gradients are averaged

    def welcome(self, blocks: Iterable[Block], step: int, passes: Sequence[Pass]) -> None:
        """New blocks, at a step that has had these passes."""
        self.untried = list(blocks)
        self.born |= dict.fromkeys(self.untried, step)
        self._missed = list(passes)

    def follow(self, blocks: Iterable[Block]) -> None:
        """Forget those that are none of the model's ``blocks`` any more."""
        self.born = {block: self.born[block] for block in blocks if block in self.born}

    def join(self, step: int) -> None:
        """Those whose own intervals are as long as everybody's join the others."""
        both = (self.updates, self.refreshes)
        clocks = [clock for each in both for clock in each.clocks.values()]
        longest = max(_interval(clock, step) for clock in clocks)
        self.born = {b: born for b, born in self.born.items() if step - born <= longest}

    def updated(self, due: Mapping[Block, list[str]], step: int) -> dict[Block, list[str]]:
        """The factors of ``due``, by everybody's clocks, and those of newcomers."""
        found = dict(due)
        for block in self.born:
            keys = self._keys(self.updates, block, step)
            also = {name for name in block.factors if self.updates.key(name) in keys}
            if also := also.union(found.get(block, ())):
                found[block] = [name for name in block.factors if name in also]
        return found

    def refreshed(self, block: Block, step: int) -> set[str]:
        """The factors of a block that are decomposed for its youth."""
        if block not in self.born:
            return set()
        keys = self._keys(self.refreshes, block, step)
        return {name for name in block.decomposes if self.refreshes.key(name) in keys}

    def late(self, passes: Sequence[Pass], step: int) -> set[Block]:
        """Newcomers in the middle of an accumulation have not seen all of its samples: they begin
        at the next step. (Where the passes before were thrown away, they have.)"""
        missed, self._missed = self._missed, []
        if not any(this in passes for this in missed):
            return set()
        found = {block for block, born in self.born.items() if born == step}
        for block in found:
            block.take_sums()
            self.born[block] = step + 1
        return found

    def _keys(self, clocks: Clocks, block: Block, step: int) -> set[str]:
        age = step - self.born[block]
        return {key for key, clock in clocks.clocks.items() if _is_due(clock, age, step)}


def _is_due(clock: Clock, age: int, step: int) -> bool:
    if age <= 0:
        return age == 0
    power_of_two = age & (age - 1) == 0
    return callable(clock.interval) and power_of_two and age <= _interval(clock, step)


def _interval(clock: Clock, step: int) -> float:
    """Of everybody, now; 0 where it does not grow with the steps."""
    if not callable(clock.interval):
        return 0.0
    return value_at(clock.interval, step, clock.name, AT_LEAST_ONE)
