"""What a plan says about itself: bytes, memory, work, exchanges, fingerprint."""

import os
import subprocess
import sys
from dataclasses import astuple, replace
from itertools import pairwise, product
from pathlib import Path
from time import perf_counter

import pytest

from natgrad import Cholesky
from natgrad.placement import (
    Agreement,
    CommOpt,
    Gather,
    Hybrid,
    Local,
    MemOpt,
    Memory,
    Reduce,
    ReduceScatter,
    Return,
    Route,
    Share,
    Work,
    World,
)
from natgrad.placement.memory import _in_basis
from natgrad.specs import AppliedRoom
from unit.placement.networks import (
    LAYOUTS,
    diagonal,
    ekfac,
    linear,
    mixed,
    mlp,
    norm,
    replicated,
    resnet50,
    sharded,
    tied,
    triangle,
)
from unit.placement.oracle import counted, messages, of, run_messages
from unit.placement.test_cost import costing

STRATEGIES = (MemOpt(), Hybrid(0.5), CommOpt(), ReduceScatter(), Local())


def plans(size=4, **world):
    for strategy, layout in product(STRATEGIES, LAYOUTS):
        if size % 2 and strategy == Hybrid(0.5):
            strategy = Hybrid(1 / size)
        yield strategy(mixed(size, layout), World(size, **world))
        if layout is replicated:
            yield strategy(mixed(size), World(size, gradients_are_local=True, **world))


class TestSent:
    def test_by_hand(self):
        """2 ranks, one layer 3 x 2 with a bias, one owner."""
        world = World(2, factor_bytes=2, inverse_bytes=8, gradient_bytes=4)
        plan = MemOpt()([linear("one", 3, 2, 2)], world)
        assert plan.sent(0).factors == 0  # the owner
        assert plan.sent(1).factors == (6 + 6) * 2  # triangles of 3 x 3
        assert plan.sent(0).gradients == (3 * 2 + 3 + 1) * 4  # weight, bias, KL clip
        assert plan.sent(1).gradients == 0
        shared = CommOpt()([linear("one", 3, 2, 2)], world)
        assert [shared.sent(r).inverses for r in (0, 1)] == [(9 + 3) * 8] * 2

    def test_by_hand_of_three_numbers_in_a_word(self):
        """Each message has words of its own: 10 numbers with the KL clip's are 4 words, not 3."""
        each = {"factors_per_word": 3, "inverses_per_word": 3, "gradients_per_word": 3}
        world = World(2, factor_bytes=8, inverse_bytes=8, gradient_bytes=8, **each)
        plan = MemOpt()([linear("one", 3, 2, 2)], world)
        assert plan.sent(1).factors == (2 + 2) * 8  # triangles of 3 x 3
        # A weight of 6 numbers with the KL clip's, and a bias of 3.
        assert plan.sent(0).gradients == (3 + 1) * 8
        shared = CommOpt()([linear("one", 3, 2, 2)], world)
        assert [shared.sent(r).inverses for r in (0, 1)] == [(9 + 3) // 3 * 8] * 2

    def test_by_hand_if_sharded(self):
        """Two rows at rank 0, one row at rank 1, and the owner is rank 0."""
        plan = MemOpt()([linear("one", 3, 2, 2, sharded, bias=False)], World(2))
        assert plan.workers["one"] == range(1)
        assert plan.sent(1).gradients == 2 * 4  # gathered
        assert plan.sent(0).gradients == (2 + 1) * 4  # returned, with the KL clip

    def test_local_gradients_are_all_reduced_first(self):
        blocks = mlp(4)
        numbers = sum(b.numel for b in blocks)
        plan = CommOpt()(blocks, World(4, gradients_are_local=True))
        assert plan.sent(2).gradients == 2 * 3 * numbers * 4 / 4
        assert plan.sent(2, other_numbers=5).gradients == 2 * 3 * (numbers + 5) * 4 / 4

    def test_others_are_left_alone_if_their_gradients_are_not_local(self):
        assert CommOpt()(mlp(4), World(4)).sent(0, other_numbers=5).gradients == 0

    def test_agreement_by_hand(self):
        """2 ranks, one layer with A and G: sums of float64, which each rank sends once."""
        blocks = [linear("one", 3, 2, 2)]
        plan = MemOpt()(blocks, World(2))
        update = 11 + 2 + 2  # of the step, of the block, of the factors
        assert plan.sent(0).agreement == Agreement(8 * update, 8 * 4, 8 * 4)
        assert plan.sent(0) != plan.sent(1)
        assert plan.sent(0).agreement == plan.sent(1).agreement
        stays = CommOpt()(blocks, World(2))
        assert stays.sent(0).agreement == Agreement(8 * update, 8 * 4, 0)
        units = MemOpt()(blocks, World(2, units=True))
        assert units.sent(0).agreement.update == 8 * (update + 2)
        alone = MemOpt()([linear("one", 3, 2, 1)], World(1))
        assert alone.sent(0).agreement == Agreement(0, 0, 0)

    def test_gradients_that_nobody_has_whole_are_asked_for_at_every_step(self):
        plan = MemOpt()([linear("one", 3, 2, 2, sharded)], World(2, sharded=True))
        assert plan.sent(0).agreement.apply == 8 * 4  # those of blocks show in the KL clip
        assert plan.sent(0, other_numbers=7).agreement.apply == 8 * 5

    def test_packed_factors_weigh_half(self):
        """Osawa 2019, sec. 3.4."""
        blocks = [linear("one", 100, 100, 2, bias=False)]
        plan = CommOpt()(blocks, World(2))
        assert sum(plan.sent(r).factors for r in (0, 1)) == 2 * 100 * 101 // 2 * 4


class TestMessages:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
    @pytest.mark.parametrize("route", Route)
    def test_are_what_is_sent(self, size, route):
        """By either route, number by number."""
        plain = {"gradient_bytes": 2, "inverse_bytes": 8, "sum_bytes": 16, "route": route}
        short = dict.fromkeys(("factors", "inverses", "gradients"), 3)
        words = {f"{name}_per_word": each for name, each in short.items()}
        for plan in (*plans(size, **plain), *plans(size, **plain, **words)):
            assert all(way is route for way in astuple(plan.routes)) or size == 1
            for ops in (plan.update, plan.refresh, plan.apply):
                sent, received = counted(plan, ops)
                flows = plan.flows(ops)
                assert (flows.sent.tolist(), flows.received.tolist()) == (sent, received)

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
    def test_arrive_where_they_are_expected(self, size):
        for plan in plans(size):
            run_messages(plan)

    def test_come_in_the_order_of_the_ops(self):
        for plan in plans():
            for ops in (plan.update, plan.refresh, plan.apply):
                for rank in range(4):
                    for some in (plan.outgoing, plan.incoming):
                        order = [ops.index(message.op) for message in some(ops, rank)]
                        assert order == sorted(order)

    def test_the_clip_rides_with_the_first_piece_of_a_block_that_a_rank_gets(self):
        plan = MemOpt()([linear("one", 8, 2, 4)], World(4))
        weight, bias = of(plan.apply, Return)
        first, second = (list(messages(plan, [op])) for op in (weight, bias))
        assert [(m.numel, m.clip) for m in first] == [(17, True)] * 3
        assert [(m.numel, m.clip) for m in second] == [(8, False)] * 3  # also by itself
        both = list(messages(plan, [weight, bias]))
        assert [(m.numel, m.clip) for m in both] == [(17, True)] * 3 + [(8, False)] * 3

    def test_a_rank_that_holds_nothing_gets_the_clip_alone(self):
        plan = MemOpt()([norm("one", 2, 4, sharded)], World(4))  # ranks 2 and 3 hold nothing
        assert [op for op in of(plan.apply, Return) if op.piece is None] == [
            Return("one", None, (0,), (2, 3))
        ]
        last = list(messages(plan, plan.apply))[-2:]
        assert [(m.to, m.numel, m.clip) for m in last] == [(2, 1, True), (3, 1, True)]


class TestCut:
    @pytest.mark.parametrize("limit", [1, 500, 2000, 1 << 30])
    def test_loses_nothing_and_keeps_to_the_limit(self, limit):
        for plan in plans(bucket_bytes=limit):
            for kind in (Reduce, Share, Gather, Return):
                ops = of((*plan.update, *plan.refresh, *plan.apply), kind)
                cuts = plan.cut(ops)
                assert [op for cut in cuts for op in cut] == ops
                sizes = [[plan.copy_bytes(op) for op in cut] for cut in cuts]
                assert all(sum(cut) <= limit or len(cut) == 1 for cut in sizes)
                for one, two in pairwise(sizes):
                    assert sum(one) + two[0] > limit, "cut too early"

    def test_of_nothing_is_nothing(self):
        assert MemOpt()(mlp(2), World(2)).cut([]) == ()

    def test_buckets_follow_the_backward_pass(self):
        blocks = mlp(2, depth=3)
        one = MemOpt()(blocks, World(2))
        assert one.buckets == (
            tuple((name, factor) for name in ("l2", "l1", "l0") for factor in "AG"),
        )
        each = MemOpt()(blocks, World(2, bucket_bytes=1))
        assert each.buckets == tuple((factor,) for factor in one.buckets[0])

    def test_bytes_on_the_wire_count(self):
        blocks = [linear(f"l{i}", 3, 3, 2, bias=False) for i in range(4)]  # 4 x 2 x 6 numbers
        counts = [
            len(MemOpt()(blocks, World(2, bucket_bytes=96, factor_bytes=size)).buckets)
            for size in (2, 4, 8)
        ]
        assert counts == [1, 2, 4]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_an_average_step_sends_its_share_of_every_clock(strategy, local):
    """Of the rank that sends most in all, be it at updates, at refreshes or at every step."""
    world = World(4, local, update_every=5, refresh_every=20)
    plan = strategy(mlp(4), world)
    each = [plan.sent(rank, 11) for rank in range(4)]
    expected = [
        sent.gradients
        + sent.agreement.apply
        + (sent.factors + sent.agreement.update) / 5
        + (sent.inverses + sent.agreement.refresh) / 20
        for sent in each
    ]
    assert plan.average_sent(11) == pytest.approx(max(expected), rel=1e-12)


def most_of_an_update(plan):
    return max(plan.memory(rank).update for rank in plan.world.ranks)


class TestMemory:
    def test_by_hand(self):
        world = World(2, kept_factor_bytes=2, kept_inverse_bytes=8)
        plan = MemOpt()([linear("one", 3, 2, 2)], world)
        assert (plan.memory(0).factors, plan.memory(0).inverses) == (12 * 2, 24 * 8)
        assert plan.memory(1).kept == 0

    def test_what_is_prepared_is_there_for_every_block(self):
        """Each block keeps its own; what passes in products is of one stack after the other."""
        rooms = [AppliedRoom(prepared=7), AppliedRoom(prepared=9), AppliedRoom(prepared=9)]
        blocks = [
            replace(linear(f"l{i}", 3 + i, 2, 1), applied=room) for i, room in enumerate(rooms)
        ]
        plan = MemOpt()(blocks, World(1, kept_inverse_bytes=8))
        assert plan.memory(0).prepared == 8 * (7 + 9 + 9)

    def test_alone_no_parts_wait_for_those_of_others(self):
        """Of EKFAC, whose second moments follow once both bases are there."""
        blocks = [ekfac("one", 6, 5, 1), ekfac("two", 4, 3, 1)]
        own, every, followed = _in_basis(MemOpt()(blocks, World(1)))
        assert (own.tolist(), every.tolist()) == ([0], [0])
        assert followed[0] > 0
        own, every, _ = _in_basis(CommOpt()([ekfac("one", 6, 5, 2)], World(2)))
        parts = 4 * sum(ekfac("one", 6, 5, 2).factor(name).parts for name in "AG")
        assert own.sum() == parts  # each where it is made
        assert every.tolist() == [parts, parts]

    def test_of_every_kind_by_hand(self):
        """One layer 3 x 3 on two ranks: two factors of 6 numbers, with parts of 12 each."""
        plan = MemOpt()([linear("one", 3, 3, 2, bias=False)], World(2, route=Route.DIRECT))
        room = 2 * 9 + 3 + 2 * 9 + 11 * 3  # of an eigendecomposition
        owner = Memory(
            factors=4 * 12,
            inverses=4 * 24,
            stacks=4 * 2 * 9,
            sums=4 * 12,
            update=4 * (12 + 12 + 12) - 4 * 12,  # what came, what it had itself, and the sum
            workspace=4 * (12 + room),  # that of G, when the parts of A are there
            apply=4 * 10 + 4 * 9,  # nine numbers and the clip, made of nine
        )
        assert plan.memory(0) == owner
        assert owner.kept == 4 * (12 + 24 + 18)
        assert owner.total == owner.kept + owner.workspace
        # All sums are there while a buffer for both is filled with a first one.
        other = Memory(0, 0, sums=4 * 12, update=4 * (12 + 6), apply=4 * 10)
        assert plan.memory(1) == other
        assert other.total == other.sums + other.update

    @pytest.mark.parametrize("local", [False, True])
    def test_even_slices_take_no_more_room_on_more_ranks(self, local):
        worlds = [World(size, local, bucket_bytes=1 << 20) for size in (4, 16, 64, 256)]
        plans = [MemOpt()(resnet50(world.size), world) for world in worlds]
        even, direct = (
            [most_of_an_update(plan.routed(route)) for plan in plans]
            for route in (Route.BALANCED, Route.DIRECT)
        )
        assert max(even) <= 1.05 * even[0]
        assert direct[-1] > 10 * even[-1]

    def test_of_thousands_of_ranks_takes_no_longer(self):
        def seconds(size):
            plan = Hybrid(0.25)(resnet50(size), World(size))
            begin = perf_counter()
            plan.most_memory  # noqa: B018
            return perf_counter() - begin

        few, many = (min(seconds(size) for _ in range(3)) for size in (8, 8192))
        assert many < 20 * few + 0.2

    @pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
    def test_a_factor_is_kept_by_whoever_decomposes_it_only(self, strategy):
        plan = strategy(mlp(4), World(4))
        numbers = sum(spec.numel for spec in plan.factors.values())
        assert sum(plan.memory(r).factors for r in range(4)) == 4 * numbers

    def test_inverses_are_held_by_whoever_preconditions(self):
        for workers in (1, 2, 4):
            plan = Hybrid(workers / 4)(mlp(4), World(4))
            parts = sum(spec.parts for spec in plan.factors.values())
            assert sum(plan.memory(r).inverses for r in range(4)) == 4 * workers * parts

    def test_of_one_rank_is_everything(self):
        blocks = [ekfac("one", 6, 5, 1), tied("two", 9, 4, 1)]
        plan = MemOpt()(blocks, World(1))
        kept = plan.memory(0)
        assert kept.factors == 4 * sum(spec.numel for spec in plan.factors.values())
        needed = [("one", "A"), ("one", "G"), ("one", "S"), ("two", "A"), ("two", "G")]
        assert kept.inverses == 4 * sum(plan.factors[factor].parts for factor in needed)


def test_work_by_hand():
    plan = MemOpt()([linear("one", 3, 2, 2)], World(2))
    two_sided = 2 * 9 * (3 + 3)
    assert plan.work(0) == Work(25 * (27 + 27), 2 * two_sided)
    assert plan.work(1) == Work(0, 0)
    cheaper = costing(linear("one", 3, 2, 2), Cholesky())
    assert MemOpt()([cheaper], World(2)).work(0) == Work(2 * (27 + 27), two_sided)


class TestFingerprint:
    def test_fits_an_int64(self):
        assert all(0 <= plan.fingerprint() < 2**63 for plan in plans())

    def test_tells_plans_apart(self):
        base = MemOpt()(mlp(4), World(4))
        others = [
            base,
            replace(base, update=base.update[::-1]),
            replace(base, world=World(4, factor_bytes=2)),
            replace(base, world=World(4, factors_per_word=3)),
            replace(base, strategy="other"),
            Hybrid(0.5)(mlp(4), World(4)),
            MemOpt()(mlp(4, sharded), World(4)),
            MemOpt()(mlp(4, depth=11), World(4)),
        ]
        assert len({plan.fingerprint() for plan in others}) == len(others)

    @pytest.mark.slow
    def test_is_the_same_in_every_process(self):
        """No set or hash of a string decides anything."""
        code = (
            "from natgrad.placement import Hybrid, World; from unit.placement.networks import *; "
            "print(Hybrid(0.5)(mixed(6, sharded), World(6)).fingerprint())"
        )
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "12345"}
        run = [sys.executable, "-c", code]
        printed = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
        plan = Hybrid(0.5)(mixed(6, sharded), World(6))
        assert int(printed.stdout) == plan.fingerprint()


class TestResNet50:
    """From shapes alone."""

    def numbers(self, count):
        blocks = resnet50()
        assert len(blocks) == 107
        return round(4 * sum(count(spec) for b in blocks for _, spec in b.factors) / 2**20)

    def test_fisher_with_full_and_with_diagonal_batch_norm(self):
        """Osawa 2019, sec. 5.4."""
        assert self.numbers(lambda spec: spec.dim**2) == 1017
        assert self.numbers(lambda s: s.dim if s.diagonal else s.dim**2) == 587

    def test_triangles_are_half_of_it(self):
        """Osawa 2019, sec. 3.4."""
        assert self.numbers(lambda spec: spec.numel) == 294
        plan = ReduceScatter()(resnet50(4), World(4, route=Route.DIRECT))
        assert round(sum(plan.sent(r).factors for r in range(4)) / 3 / 2**20) == 294


def test_specs_of_the_networks_are_packed():
    assert triangle(5).numel == 15
    assert diagonal(5).numel == 5
