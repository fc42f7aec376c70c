"""Runs a plan with sets in the place of tensors, and counts what a plain executor would send."""

from collections import Counter
from functools import lru_cache
from math import ceil

from natgrad.placement import (
    Decompose,
    Gather,
    Precondition,
    Reduce,
    ReduceGradient,
    Return,
    Route,
    Share,
    TotalGradients,
)
from natgrad.specs import server


def of(ops, *kinds):
    return [op for op in ops if isinstance(op, kinds)]


def run_factors(plan, from_all=True):
    """Every factor is added up, decomposed and shared by ranks that have what this takes."""
    reduced = {op.factor: op.to for op in plan.update}
    assert len(reduced) == len(plan.update)
    assert set(reduced) == (set(plan.factors) if from_all and plan.world_size > 1 else set())
    decomposed = {op.factor: op.rank for op in of(plan.refresh, Decompose)}
    assert len(decomposed) == len(of(plan.refresh, Decompose))
    assert set(decomposed) == {(b.name, name) for b in plan.blocks for name in b.decomposed}
    parts = {factor: {rank} for factor, rank in decomposed.items()}
    for op in of(plan.refresh, Share):
        assert op.source == decomposed[op.factor]
        assert op.source in op.to
        assert len(op.to) > 1
        assert parts[op.factor] == {op.source}, "parts sent to a rank that has them"
        parts[op.factor] |= set(op.to)
    everyone = set(plan.world.ranks)
    for block in plan.blocks:
        workers = set(plan.workers[block.name])
        homes = [decomposed[block.name, name] for name in block.decomposed]
        assert set(homes) <= everyone
        if block.together:
            assert len(set(homes)) == 1
        for name in block.decomposed:
            assert parts[block.name, name] >= workers
            if block.in_basis and from_all:
                assert parts[block.name, name] == everyone
            assert set(plan.keepers[block.name, name]) == {decomposed[block.name, name]}
        for name in block.merged:
            assert set(plan.keepers[block.name, name]) == {homes[0]}
        for name in block.in_basis:
            assert plan.keepers[block.name, name] == plan.workers[block.name]
    assert all(plan.keepers[factor] == to for factor, to in reduced.items())


def cells(box):
    """All places of a box of a parameter, as tuples."""
    places = [()]
    for start, stop in box:
        places = [(*place, i) for place in places for i in range(start, stop)]
    return places


@lru_cache(maxsize=512)
def numbers(parameter, box):
    """All numbers of a box of a parameter, for which every plan of a network asks."""
    return frozenset((parameter, place) for place in cells(box))


def run_gradients(plan):
    """Whoever preconditions has the whole gradient, and every holder gets its part back, once."""
    size = plan.world_size
    local = plan.world.gradients_are_local and size > 1
    has, done, clips = {}, {}, {}  # numbers by block and rank
    for block in plan.blocks:
        for rank in plan.world.ranks:
            has[block.name, rank] = set() if local else _held(block, rank)
    everything = {block.name: _all(block) for block in plan.blocks}
    received = {op: [] for op in plan.apply}
    for rank in plan.world.ranks:
        for message in plan.incoming(plan.apply, rank):
            received[message.op].append(message)
    for op in plan.apply:
        match op:
            case TotalGradients(blocks):
                assert local
                for name in blocks:
                    for rank in plan.world.ranks:
                        has[name, rank] = everything[name]
            case ReduceGradient(block, to):
                assert local
                for rank in to:
                    assert not has[block, rank]
                    has[block, rank] = everything[block]
            case Gather(block, index, _):
                piece = plan.block[block].pieces[index]
                before = {rank: set(has[block, rank]) for rank in plan.world.ranks}
                for message in received[op]:
                    moved = numbers(piece.parameter, piece.part(message.source))
                    assert len(moved) == message.numel
                    assert moved <= before[message.source]
                    assert not has[block, message.to] & moved, "sent to a rank that has it"
                    has[block, message.to] |= moved
            case Precondition(block, ranks):
                for rank in ranks:
                    assert has[block, rank] == everything[block]
                    done[block, rank] = set(everything[block])
                clips[block] = Counter(ranks)
            case Return(block, index, sources, _):
                assert sources == plan.workers[block]
                for message in received[op]:
                    assert message.source in sources
                    clips[block][message.to] += message.clip
                    if index is not None:
                        piece = plan.block[block].pieces[index]
                        part = numbers(piece.parameter, piece.part(message.to))
                        assert message.numel == len(part) + message.clip
                        mine = done.setdefault((block, message.to), set())
                        assert not mine & part, "sent to a rank that has it"
                        mine |= part
    for block in plan.blocks:
        for rank in plan.world.ranks:
            held = _held(block, rank)
            assert done.get((block.name, rank), set()) >= held
        assert clips[block.name] == dict.fromkeys(plan.world.ranks, 1), "one share of the clip each"


def _held(block, rank):
    held = (p for p in block.pieces if rank in p.holders)
    return set().union(*(numbers(piece.parameter, piece.part(rank)) for piece in held))


def _all(block):
    return set().union(*(numbers(piece.parameter, piece.box) for piece in block.pieces))


def run_messages(plan):
    """What a rank sends is what another expects from it, in the same order."""
    for ops in (plan.update, plan.refresh, plan.apply):
        sent = {rank: list(plan.outgoing(ops, rank)) for rank in plan.world.ranks}
        for rank in plan.world.ranks:
            incoming = list(plan.incoming(ops, rank))
            for other in plan.world.ranks:
                expected = [m for m in incoming if m.source == other]
                assert [m for m in sent[other] if m.to == rank] == expected
            assert all(m.source != rank == m.to for m in incoming)


def messages(plan, ops):
    """All messages, op by op."""
    for op in ops:
        for rank in plan.world.ranks:
            yield from plan.outgoing([op], rank)


def counted(plan, ops):
    """(sent, received): bytes by rank, number by number where slices are even."""
    sent, received = Counter(), Counter()

    def move(source, to, nbytes):
        if source != to:
            sent[source] += nbytes
            received[to] += nbytes

    sums, copies = [], {}
    for op in ops:
        groups = plan.groups(op)
        if plan.routes.of(op) is Route.DIRECT or plan.world_size == 1:
            _direct(plan, op, move)
        elif isinstance(op, Reduce | ReduceGradient):
            sums.append(op)
        elif groups is None:
            _direct(plan, op, move)
        else:
            copies.setdefault(groups, []).append(op)
    for bucket in plan.cut(sums):
        _sums(plan, bucket, move)
    for groups, some in copies.items():
        for bucket in plan.cut(some):
            for rank in range(groups.count):
                members = groups.members[rank * groups.size : (rank + 1) * groups.size]
                _copies(plan, bucket, members, move)
    ranks = plan.world.ranks
    return [sent[rank] for rank in ranks], [received[rank] for rank in ranks]


def _wire_bytes(plan, op, numbers):
    """Of a message: whole words."""
    world = plan.world
    word, each = world.gradient_bytes, world.gradients_per_word
    if isinstance(op, Reduce):
        word, each = world.factor_bytes, world.factors_per_word
    if isinstance(op, Share):
        word, each = world.inverse_bytes, world.inverses_per_word
    return ceil(numbers / each) * word


def _direct(plan, op, move):
    for rank in plan.world.ranks:
        for message in plan.outgoing([op], rank):
            move(rank, message.to, _wire_bytes(plan, op, message.numel))


def _sums(plan, bucket, move):
    """Every number of the bucket goes from all ranks to the one whose slice it is in, and from
    there to those that keep it."""
    ranks = plan.world.ranks
    keepers = [op.to for op in bucket for _ in range(plan.numbers(op))]
    each = ceil(len(keepers) / len(ranks))
    slices = Counter()
    for index in range(each * len(ranks)):
        adds = index // each
        for rank in ranks:
            slices[rank, adds] += 1
        if index < len(keepers):
            for keeper in keepers[index]:
                move(adds, keeper, plan.finished_bytes(bucket[0]))
    for (rank, adds), numbers in slices.items():
        move(rank, adds, _wire_bytes(plan, bucket[0], numbers))


def _copies(plan, bucket, members, move):
    """Every number goes from the rank that has it to the member whose slice it is in, and from
    there to all other members."""
    sources = []
    for op in bucket:
        share = isinstance(op, Share)
        source = op.source if share else server(op.sources, members[0], plan.world_size)
        clip = isinstance(op, Return) and any(rank in plan.clipped[op] for rank in members)
        sources += [(op, source)] * (plan.numbers(op) + clip)
    each = ceil(len(sources) / len(members))
    spread, gathered = Counter(), Counter()
    for index in range(each * len(members)):
        passes_on = members[index // each]
        if index < len(sources):
            spread[(*sources[index], passes_on)] += 1
        for member in members:
            gathered[passes_on, member] += 1
    for (op, source, passes_on), numbers in spread.items():
        move(source, passes_on, _wire_bytes(plan, op, numbers))
    for (passes_on, member), numbers in gathered.items():
        move(passes_on, member, _wire_bytes(plan, bucket[0], numbers))
