"""Bytes of the buckets that a rank holds at a time, by either route, in arrays by rank.

    sums      a few buckets are under way (`may_leave`); what has come of one is added up before
              another leaves
    copies    one bucket after the other

Even slices are taken to travel as with gloo: a reduce-scatter receives all shares of its slice, and
an all-gather has a buffer of its own. Other backends take less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from natgrad.placement.collectives import Collective
from natgrad.placement.ops import Op, Reduce, ReduceGradient
from natgrad.placement.rank_arrays import Numbers, add, places
from natgrad.placement.routes import Route, may_leave
from natgrad.placement.slices import Slices

if TYPE_CHECKING:
    from natgrad.placement.travel import Travel


def none(plan: Travel) -> Numbers:
    """No bytes of any rank.

    Arguments:
        plan: what the ranks do.
    """
    return np.zeros(plan.world_size, np.int64)


def summed(
    plan: Travel,
    ops: Sequence[Op],
    before: int,
    kept: Callable[[Op], int],
    sum_bytes: int,
    *,
    again: bool,
) -> Numbers:
    """Bytes at the busiest moment of sums by either route.

    Arguments:
        plan: what the ranks do.
        ops: some of the plan's, in its order, all of one kind.
        before: bytes that are there at first.
        kept: bytes of these that leave with an op, and that its sum takes.
        sum_bytes: bytes of one number of a sum of direct messages.
        again: whether what was sent is held until all has come.
    """
    buckets = plan.cut(ops)
    calls = plan.calls(ops)
    balanced = plan.routes.of(ops[0]) is Route.BALANCED and plan.world_size > 1
    left = before
    # Of even slices every rank has as much as any other, and one number stands for all.
    zero: Numbers | int = 0 if balanced else none(plan)
    most, done, flying, held_again = zero + before, zero, zero, zero
    # Of a bucket in all, what becomes of it, what is gone as soon as it has come, and what is held.
    queue: deque[tuple[Numbers | int, ...]] = deque()
    sizes: deque[int] = deque()

    def settle() -> None:
        nonlocal most, done, flying, held_again
        size, becomes, send, held = queue.popleft()
        flying = flying - (0 if again else send)
        done = done + becomes
        most = _more(most, left + flying + done + held_again)
        flying = flying - size + (0 if again else send)
        held_again = held_again + (held if again else 0)

    for bucket, call in zip(buckets, calls, strict=False):
        one_copy = sum(map(plan.copy_bytes, bucket))
        while not may_leave(one_copy, sizes):
            settle()
            sizes.popleft()
        sizes.append(one_copy)
        share = max(map(plan.copy_bytes, bucket))
        send: Numbers | int
        held: Numbers | int
        if balanced:
            slices = Slices([plan.numbers(op) for op in bucket], plan.world_size)
            send = held = plan.wire_bytes(bucket[0], slices.padded)
            size: Numbers | int = 2 * send
            becomes: Numbers | int = slices.each * plan.finished_bytes(bucket[0])
        else:
            assert call.flows is not None
            own, becomes = _owned(plan, bucket, sum_bytes)
            send, held = call.flows.sent, call.flows.sent + own
            size = held + call.flows.received
        most = _more(most, left + flying + done + held_again + send + share)
        left -= sum(map(kept, bucket))
        queue.append((size, becomes, send, held))
        flying = flying + size
        most = _more(most, left + flying + done + held_again)
    while queue:
        settle()
    if balanced:
        finished = _finished(plan, ops, calls[-1], done + left, kept, sum_bytes)
        return np.maximum(most, finished)
    # Packed sums become kept ones, op by op.
    for bucket in buckets:
        _, packed = _owned(plan, bucket, sum_bytes)
        unpacked = _kept_by(plan, bucket, kept)
        largest = max(map(kept, bucket)) * (unpacked > 0)
        most = _more(most, left + done + np.minimum(unpacked, largest + packed))
        done = done + unpacked - packed
    return none(plan) + most


def _more(one: Numbers | int, other: Numbers | int) -> Numbers | int:
    """The more of both, rank by rank, or of all alike."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    found: Numbers = np.maximum(one, other)
    return found


def _finished(
    plan: Travel,
    ops: Sequence[Op],
    call: Collective,
    slices: Numbers | int,
    kept: Callable[[Op], int],
    sum_bytes: int,
) -> Numbers:
    """Bytes while finished slices travel to the ranks that keep them, and are put together."""
    assert call.flows is not None
    sent, received = call.flows
    together = _kept_by(plan, ops, kept)
    largest = max(plan.numbers(op) * sum_bytes for op in ops) * (together > 0)
    most: Numbers = np.maximum(slices + sent + received, slices + received + together + largest)
    return most


def _owned(plan: Travel, bucket: Sequence[Op], sum_bytes: int) -> tuple[Numbers, Numbers]:
    """Bytes of the shares of what a rank keeps of a bucket, and of their sums."""
    own, sums = none(plan), none(plan)
    for op in bucket:
        assert isinstance(op, Reduce | ReduceGradient)
        add(own, op.to, plan.copy_bytes(op))
        add(sums, op.to, plan.numbers(op) * sum_bytes)
    return own, sums


def _kept_by(plan: Travel, ops: Sequence[Op], kept: Callable[[Op], int]) -> Numbers:
    found = none(plan)
    for op in ops:
        assert isinstance(op, Reduce | ReduceGradient)
        add(found, op.to, kept(op))
    return found


def copied(plan: Travel, ops: Sequence[Op], kept_bytes: int) -> tuple[Numbers, Numbers]:
    """Bytes at the busiest moment of copies by either route, one bucket after the other; and of the
    buffer, at most, out of which they are taken.

    Arguments:
        plan: what the ranks do.
        ops: some of the plan's, in its order.
        kept_bytes: bytes of one number of what is copied in memory.
    """
    most, taken = none(plan), none(plan)
    if not ops or plan.world_size == 1:
        return most, taken
    direct, _, spread_over = plan.sorted_by_route(ops)
    calls = plan.calls(ops)
    buckets = plan.cut(direct) if direct else ()
    alike: dict[int, int] = {}  # the largest op of all-to-alls that are one object
    for bucket, call in zip(buckets, calls, strict=False):
        assert call.flows is not None
        largest = _largest(plan, bucket, kept_bytes)
        if alike.get(id(call), -1) >= largest:
            continue
        alike[id(call)] = largest
        sent, received = call.flows
        whole = np.minimum(sent, largest)
        np.maximum(most, sent + np.maximum(received, whole), out=most)
        np.maximum(taken, received, out=taken)
    if not spread_over:
        return most, taken
    spread = next(call for call in calls[len(buckets) :] if call.flows is not None)
    assert spread.flows is not None
    sent, received = spread.flows
    moved = [op for some in spread_over.values() for op in some]
    whole = np.minimum(sent, _largest(plan, moved, kept_bytes))
    np.maximum(most, sent + received + whole, out=most)
    for groups, some in spread_over.items():
        size = found = 0  # of the largest bucket
        for bucket in plan.cut(some):
            slices = Slices([plan.copied_numbers(op) for op in bucket], groups.size)
            size = max(size, plan.wire_bytes(bucket[0], slices.each + 2 * slices.padded))
            found = max(found, plan.wire_bytes(bucket[0], slices.padded))
        here = places(groups.members)
        most[here] = np.maximum(most[here], received[here] + size)
        taken[here] = np.maximum(taken[here], received[here] + found)
    return most, taken


def _largest(plan: Travel, ops: Iterable[Op], kept_bytes: int) -> int:
    return kept_bytes * max((plan.numbers(op) for op in ops), default=0)
