"""What K-FAC takes of every rank's memory, by kind, at the busiest moment of each clock.

    update     sums of the step, which become buckets; a few of them are under way, each as large
               as what is sent and received; then what they add up to
    refresh    the workspace of a decomposition, whose parts go to their place at once; then, bucket
               by bucket, what is sent and received of them
    apply      gradients that are gathered, buckets of them, and what a product leaves behind

Bytes are those of tensors. As in `flows`, numbers are kept by rank in arrays, and ranks that do the
same are counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from natgrad.placement.amounts import Memory
from natgrad.placement.bucket_memory import copied, none, summed
from natgrad.placement.ops import Gather, Op, Reduce, ReduceGradient, Return, Share
from natgrad.placement.rank_arrays import Numbers, add, places
from natgrad.specs import BlockSpec, Ranks

if TYPE_CHECKING:
    from natgrad.placement.plan import Plan

_LARGE = 2048  # larger factors are decomposed one after the other (`natgrad.kfac.refresh`)
_SCRATCH = 10 << 20  # bytes of scratch that are always kept (`natgrad.linalg.workspace`)


KEPT = ("factors", "inverses", "prepared", "stacks", "momentum")


def by_rank(plan: Plan) -> dict[str, Numbers]:
    """Bytes of rank 0, 1, …, by the fields of `Memory`.

    Arguments:
        plan: what the ranks do.
    """
    found = {one.name: none(plan) for one in fields(Memory)}
    _kept(plan, found)
    sums = all_sums(plan)
    found["sums"] += sums
    found["update"][:] = plan.update_room - sums
    own, waiting, followed = _in_basis(plan)
    own = own + _rows(plan)
    found["workspace"][:] = _workspace(plan) + own
    travelling, taken = plan.share_room
    found["refresh"][:] = np.maximum.reduce([own + travelling, waiting + taken, followed])
    found["apply"][:] = np.maximum(_apply(plan, found["apply"]), all_reduced(plan, 0))
    plan.forget_calls()
    return found


def totals(found: Mapping[str, Numbers]) -> Numbers:
    """Bytes of rank 0, 1, … at the busiest moment of a step.

    Arguments:
        found: what `by_rank` has.
    """
    kept: Numbers = sum(found[name] for name in KEPT)  # type: ignore[assignment]
    moments = (found["sums"] + found["update"], found["workspace"], found["refresh"])
    most: Numbers = kept + np.maximum.reduce([*moments, found["apply"]])
    return most


def all_reduced(plan: Plan, other_numbers: int) -> int:
    """Bytes of local gradients in one buffer, and of their sum.

    Arguments:
        plan: what the ranks do.
        other_numbers: how many numbers are in the gradients of parameters without a block.
    """
    return 2 * plan.all_reduced(other_numbers)


# What is kept.


def _kept(plan: Plan, found: dict[str, Numbers]) -> None:
    world = plan.world
    for factor, spec in plan.factors.items():
        add(found["factors"], plan.keepers[factor], spec.numel * world.kept_factor_bytes)
        held = plan.holders.get(factor, range(0))
        add(found["inverses"], held, spec.parts * world.kept_inverse_bytes)
    for block in plan.blocks:
        add(found["momentum"], plan.workers[block.name], block.moments * world.kept_inverse_bytes)
    for ranks, blocks in _together(plan):
        prepared, stacks, passing = _applied(plan, blocks)
        for name, size in (("prepared", prepared), ("stacks", stacks), ("apply", passing)):
            found[name][places(ranks)] = size


def _together(plan: Plan) -> Iterator[tuple[Ranks, list[BlockSpec]]]:
    """Ranks that precondition the same blocks, and these."""
    of: dict[Ranks, list[BlockSpec]] = {}
    count = none(plan)
    for block in plan.blocks:
        workers = plan.workers[block.name]
        if workers not in of:
            add(count, workers, 1)
        of.setdefault(workers, []).append(block)
    if count.max(initial=0) <= 1:  # columns of a grid
        yield from of.items()
        return
    for rank in plan.world.ranks:
        mine = [block for block in plan.blocks if rank in plan.workers[block.name]]
        yield range(rank, rank + 1), mine


def _applied(plan: Plan, blocks: Sequence[BlockSpec]) -> tuple[int, int, int]:
    """Bytes that the stacks of some blocks keep prepared, of their buffers, and of what passes when
    they are applied, or made."""
    each = plan.world.kept_inverse_bytes
    stacks: dict[object, list[BlockSpec]] = {}
    for block in blocks:
        sizes = [(n, s.dim, s.batch, s.diagonal, s.parts) for n, s in block.factors]
        alone = block.name if block.applied.at_once else ""
        stacks.setdefault((block.shape, tuple(sizes), block.decomposed, alone), []).append(block)
    prepared = each * sum(block.applied.prepared for block in blocks)
    numbers = [len(own) * (own[0].applied.at_once or prod(own[0].shape)) for own in stacks.values()]
    largest = each * max(numbers, default=0)
    scratch = [each * len(own) * own[0].applied.scratch for own in stacks.values()]
    buffers = 2 * largest + _scratch(scratch, _SCRATCH + 2 * largest)
    pairs = zip(numbers, stacks.values(), strict=True)
    # The products with the gradients, of which the KL clip is the sum, are as many numbers.
    passing = max(
        (max(len(own) * own[0].applied.passing, n) for n, own in pairs),
        default=0,
    )
    # Stacks are made once, of parts that are there already.
    copied = [
        len(own) * sum(own[0].factor(n).parts for n in (*own[0].decomposed, *own[0].in_basis))
        for own in stacks.values()
        if len(own) > 1
    ]
    made = each * max(copied, default=0) - prepared - buffers
    return prepared, buffers, max(each * passing, made)


def _scratch(sizes: Iterable[int], limit: int) -> int:
    """Bytes of the buffers that are kept, those that were used last, up to a limit; one that is too
    large is made anew at every step."""
    different = set(sizes)
    kept = 0
    for size in sorted(different):
        if kept + size <= limit:
            kept += size
    return max([kept, *different])


# The three clocks.


def all_sums(plan: Plan) -> int:
    """Bytes of a step's statistics.

    Arguments:
        plan: what the ranks do.
    """
    return sum(spec.numel for spec in plan.factors.values()) * plan.world.kept_sum_bytes


def update_room(plan: Plan) -> Numbers:
    """Bytes of the statistics, and of buckets of them, at the busiest moment of an update.

    Arguments:
        plan: what the ranks do.
    """
    sums = all_sums(plan)
    if not plan.update:
        return none(plan) + sums
    world = plan.world

    def kept(op: Op) -> int:
        assert isinstance(op, Reduce)
        return plan.factors[op.factor].numel * world.kept_sum_bytes

    # A backward pass that overlaps may yet learn of more samples.
    again = not world.gradients_are_local and not world.units
    return summed(plan, plan.update, sums, kept, world.kept_sum_bytes, again=again)


def _workspace(plan: Plan) -> Numbers:
    """Bytes of the decompositions that a rank does at a time."""
    each, at_once = plan.world.kept_inverse_bytes, plan.world.at_once
    needs: dict[int, list[tuple[int, bool]]] = {}
    for block in plan.blocks:
        here: dict[int, list[str]] = {}
        for name in sorted(block.decomposed):
            for rank in plan.decomposers[block.name, name]:
                here.setdefault(rank, []).append(name)
        large = max((spec.dim for _, spec in block.factors), default=0) > _LARGE
        sizes: dict[tuple[str, ...], int] = {}  # ranks that share a factor out do the same
        for rank, some in here.items():
            names = tuple(some)
            if names not in sizes:
                sizes[names] = _decomposed(plan, block, names)
            needs.setdefault(rank, []).append((sizes[names], large))
    found = none(plan)
    for rank, own in needs.items():
        small = sorted((size for size, large in own if not large), reverse=True)
        most = max([0, *(size for size, large in own if large)])
        found[rank] = each * max(most, sum(small[:at_once]))
    return found


def _decomposed(plan: Plan, block: BlockSpec, names: Sequence[str]) -> int:
    """Numbers at the busiest moment of a block's decomposition."""
    world, specs = plan.world, dict(block.factors)
    done = most = 0
    if world.kept_factor_bytes != world.kept_inverse_bytes or block.merged:
        done = sum(spec.numel for name, spec in specs.items() if name not in block.in_basis)
    for name in names:
        spec = specs[name].split(len(plan.decomposers[block.name, name]))
        most = max(most, done + spec.room)
        done += spec.parts
    return most


def _rows(plan: Plan) -> Numbers:
    """Bytes of rows of inverses that a rank has made, which wait for those of other ranks."""
    found, each = none(plan), plan.world.kept_inverse_bytes
    for (factor, rank), (start, stop) in plan.rows.items():
        found[rank] += each * (stop - start) * plan.factors[factor].dim
    return found


def _in_basis(plan: Plan) -> tuple[Numbers, Numbers, Numbers]:
    """Bytes of new parts that wait for the others of their block, as numbers are in their basis:
    those that a rank makes, and all; and what is there while the numbers of one block after the
    other follow."""
    own, every, followed = (none(plan) for _ in range(3))
    blocks = [block for block in plan.blocks if block.in_basis]
    each, alone = plan.world.kept_inverse_bytes, plan.world_size == 1
    for block in blocks:
        for name in block.decomposed:
            size = each * block.factor(name).parts
            add(own, plan.decomposers[block.name, name], 0 if alone else size)
            add(every, plan.holders[block.name, name], size)
    left = every.copy()
    for block in blocks:
        here = none(plan)
        for name, spec in block.factors:  # the parts of before
            add(here, plan.holders.get((block.name, name), range(0)), each * spec.parts)
        # And products of both bases, and with them.
        parts = {name: each * spec.parts for name, spec in block.factors}
        room = 2 * max(parts[name] for name in block.decomposed)
        room += sum(parts[name] for name in block.in_basis)
        new = none(plan)
        for name in block.decomposed:
            add(new, plan.holders[block.name, name], parts[name])
        there = new + here + room if alone else left + here + room
        np.maximum(followed, there * (here > 0), out=followed)
        left -= new
    return own, none(plan) if alone else every, followed


def share_room(plan: Plan) -> tuple[Numbers, Numbers]:
    """Bytes of parts on their way, and of the buffer, at most, out of which they are taken.

    Arguments:
        plan: what the ranks do.
    """
    shares = [op for op in plan.refresh if isinstance(op, Share)]
    return copied(plan, shares, plan.world.kept_inverse_bytes)


def gather_room(plan: Plan) -> Numbers:
    """Bytes of gradients on their way to the ranks that precondition them.

    Arguments:
        plan: what the ranks do.
    """
    most = none(plan)
    sums = [op for op in plan.apply if isinstance(op, ReduceGradient)]
    if sums:
        each = plan.world.gradient_bytes
        most = summed(plan, sums, 0, lambda op: 0, each, again=False)
    gathers = [op for op in plan.apply if isinstance(op, Gather)]
    return np.maximum(most, copied(plan, gathers, plan.world.total_bytes)[0])


def return_room(plan: Plan) -> Numbers:
    """Bytes of preconditioned gradients on their way.

    Arguments:
        plan: what the ranks do.
    """
    returns = [op for op in plan.apply if isinstance(op, Return)]
    return copied(plan, returns, plan.world.total_bytes)[0]


def _apply(plan: Plan, products: Numbers) -> Numbers:
    """Bytes of gradients that are gathered, and beside them on their way, or in ``products``."""
    full = none(plan)
    for name in {op.block for op in plan.apply if isinstance(op, Gather)}:
        add(full, plan.workers[name], plan.block[name].numel * plan.world.total_bytes)
    most: Numbers = np.maximum.reduce([products, plan.gather_room, plan.return_room])
    return most + full
