"""Which factors are decomposed anew, and doing so."""

import torch

from natgrad.runtime.blocks import Block
from natgrad.runtime.settings import Clocks, Values


class Refresh:
    """Called at every step; decomposes what is due by the clock or by its measured drift."""

    def __init__(self, blocks: list[Block], clocks: Clocks) -> None:
        self.blocks, self.clocks = blocks, clocks

    def __call__(self, step: int, now: Values, updated: bool) -> list[str]:
        """Returns what went wrong, a sentence each."""
        keys = self.clocks.due(step)
        problems = []
        done: set[Block] = set()  # whose A is decomposed as of this step
        # A layer that shares its input with another comes after that one.
        for block in sorted(self.blocks, key=lambda block: block.twin is not None):
            damping = now.damping_of(block)
            names = self._due(block, keys, damping, updated)
            if block.twin in done and "A" in names and _same_inputs(block, block.twin):
                block.write("A", tuple(part.clone() for part in block.twin.parts["A"]))
                names.discard("A")
            if names:
                failed = block.refresh(names, damping)
                problems += [_sentence(block, name) for name in failed]
                if "A" in names and "A" not in failed and "A" in block.parts:
                    done.add(block)
        self.clocks.mark(step, keys)
        return problems

    def _due(self, block: Block, keys: set[str], damping: float, updated: bool) -> set[str]:
        if not block.running:
            return set()
        if not block.ready:
            return set(block.factors) if updated or keys else set()
        names = {name for name in block.factors if self.clocks.key(name) in keys}
        if updated:
            for name in set(block.structure.needs) - set(block.structure.in_basis) - names:
                tolerance = self.clocks.tolerance(name)
                if tolerance is not None and not block.error(name, damping) <= tolerance:
                    names.add(name)
        return names


def _same_inputs(block: Block, twin: Block) -> bool:
    """Whether A of two layers is the same, so that one decomposition serves both.

    The averages themselves are compared, so a layer that once saw another input is noticed. Where
    each factor is damped by itself A's damping depends on the layer's own G.
    """
    mine, other = block.running.get("A"), twin.running.get("A")
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
