"""Runs a plan with sets in the place of tensors, and counts what a plain executor would send."""

from collections import Counter

from natgrad.placement import (
    Decompose,
    Gather,
    Precondition,
    Reduce,
    ReduceGradient,
    Return,
    Share,
    TotalGradients,
)


def of(ops, *kinds):
    return [op for op in ops if isinstance(op, kinds)]


def run_factors(plan, from_all=True):
    """Every factor is added up, decomposed and shared by ranks that have what this takes."""
    reduced = {op.factor: op.to for op in plan.update}
    assert len(reduced) == len(plan.update)
    assert set(reduced) == (set(plan.factors) if from_all and plan.world_size > 1 else set())
    decomposed = {op.factor: op.ranks for op in of(plan.refresh, Decompose)}
    assert len(decomposed) == len(of(plan.refresh, Decompose))
    assert set(decomposed) == {(b.name, name) for b in plan.blocks for name in b.decomposed}
    parts = {factor: set(ranks) for factor, ranks in decomposed.items()}
    for op in of(plan.refresh, Share):
        assert op.to
        assert op.source in decomposed[op.factor]
        assert not parts[op.factor] & set(op.to), "parts sent to a rank that has them"
        parts[op.factor] |= set(op.to)
    everyone = set(plan.world.ranks)
    for block in plan.blocks:
        workers = set(plan.workers[block.name])
        homes = [decomposed[block.name, name] for name in block.decomposed]
        assert all(home and set(home) <= everyone for home in homes)
        if block.together:
            assert len(set(homes)) == 1
        for name in block.decomposed:
            assert parts[block.name, name] >= workers
            if block.in_basis and from_all:
                assert parts[block.name, name] == everyone
            assert plan.keepers[block.name, name] == decomposed[block.name, name]
        for name in block.merged:
            assert plan.keepers[block.name, name] == homes[0]
        for name in block.in_basis:
            assert plan.keepers[block.name, name] == plan.workers[block.name]
    assert all(plan.keepers[factor] == to for factor, to in reduced.items())


def run_gradients(plan):
    """Whoever preconditions has the whole gradient, and every holder gets its pieces back, once."""
    local = plan.world.gradients_are_local and plan.world_size > 1
    has = {
        (block.name, i): set() if local else set(piece.holders)
        for block in plan.blocks
        for i, piece in enumerate(block.pieces)
    }
    done, clips = {}, {}
    for op in plan.apply:
        match op:
            case TotalGradients(blocks):
                assert local
                for key in has:
                    if key[0] in blocks:
                        has[key] = set(plan.world.ranks)
            case ReduceGradient(block, to):
                assert local
                for key in has:
                    if key[0] == block:
                        assert not has[key]
                        has[key] = set(to)
            case Gather(block, piece, source, to):
                assert source in has[block, piece]
                assert not has[block, piece] & set(to), "sent to a rank that has it"
                has[block, piece] |= set(to)
            case Precondition(block, ranks):
                for key in has:
                    if key[0] == block:
                        assert has[key] >= set(ranks)
                        done[key] = set(ranks)
                clips[block] = Counter(ranks)
            case Return(block, None, source, to):
                assert source in plan.workers[block]
            case Return(block, piece, source, to):
                assert source in plan.workers[block]
                assert not done[block, piece] & set(to), "sent to a rank that has it"
                done[block, piece] |= set(to)
    for block in plan.blocks:
        for i, piece in enumerate(block.pieces):
            assert done[block.name, i] >= set(piece.holders)
    for message in plan.messages(plan.apply):
        if message.clip:
            clips[message.op.block][message.to] += 1
    for block in plan.blocks:
        assert clips[block.name] == dict.fromkeys(plan.world.ranks, 1), "one share of the clip each"


def counted(plan, rank, other_numbers=0):
    """(factors, inverses, gradients): bytes that ``rank`` sends, op by op and receiver by
    receiver."""
    world, size = plan.world, plan.world_size
    factors = inverses = gradients = 0
    for op in plan.update:
        assert isinstance(op, Reduce)
        block, name = op.factor
        numel = plan.block[block].factor(name).numel
        factors += sum(numel * world.factor_bytes for to in op.to if to != rank)
    for op in of(plan.refresh, Share):
        if op.source == rank:
            block, name = op.factor
            inverses += len(op.to) * plan.block[block].factor(name).parts * world.inverse_bytes
    clipped = set()
    reduced = 0
    for op in plan.apply:
        match op:
            case ReduceGradient(block, to):
                numel = sum(piece.numel for piece in plan.block[block].pieces)
                gradients += sum(numel for other in to if other != rank)
            case Gather(block, piece, source, to) if source == rank:
                gradients += len(to) * plan.block[block].pieces[piece].numel
            case Return(block, piece, source, to) if source == rank:
                if piece is not None:
                    gradients += len(to) * plan.block[block].pieces[piece].numel
                clipped |= {(block, other) for other in to}
            case TotalGradients(blocks):
                reduced += sum(p.numel for name in blocks for p in plan.block[name].pieces)
    gradients += len(clipped)
    if world.gradients_are_local:
        reduced += other_numbers
    totals = 2 * (size - 1) * reduced * world.gradient_bytes / size
    return factors, inverses, gradients * world.gradient_bytes + totals
