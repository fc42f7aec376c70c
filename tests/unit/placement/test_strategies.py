"""Every plan of every strategy can be carried out; and what sets the strategies apart."""

import random
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from natgrad.errors import SettingError
from natgrad.placement import (
    Auto,
    CommOpt,
    Decompose,
    Flops,
    Gather,
    Hybrid,
    Local,
    MemOpt,
    Precondition,
    ReduceGradient,
    ReduceScatter,
    Return,
    Route,
    Share,
    TotalGradients,
    World,
)
from natgrad.placement.strategies.base import longest_first
from natgrad.placement.strategies.hybrid import divisors
from natgrad.specs import Piece, server
from unit.placement.networks import (
    LAYOUTS,
    block,
    ekfac,
    few,
    linear,
    mixed,
    mlp,
    replicated,
    resnet50,
    sharded,
    tensor_parallel,
    tied,
    triangle,
    worlds,
)
from unit.placement.oracle import counted, messages, of, run_factors, run_gradients


def strategies(size):
    grids = [Hybrid(k / size) for k in divisors(size)]
    return [*grids, MemOpt(), CommOpt(), ReduceScatter(), Local(), Auto()]


@pytest.mark.parametrize(("size", "network", "layout"), worlds())
def test_every_plan_can_be_carried_out_and_sends_what_it_says(size, network, layout):
    blocks = network(size, layout)
    for strategy in strategies(size):
        plan = strategy(blocks, World(size, factor_bytes=2))
        run_factors(plan, from_all=not isinstance(strategy, Local))
        run_gradients(plan)
        check_sent(plan)


def check_sent(plan):
    """By every rank."""
    reduced = 0
    if plan.world.gradients_are_local and plan.world_size > 1:
        reduced = 17 + sum(plan.numbers(op) for op in of(plan.apply, TotalGradients))
    ring = 2 * (plan.world_size - 1) * reduced * plan.world.gradient_bytes / plan.world_size
    by_rank = [counted(plan, ops)[0] for ops in (plan.update, plan.refresh, plan.apply)]
    for rank, (factors, inverses, gradients) in enumerate(zip(*by_rank, strict=True)):
        sent = plan.sent(rank, other_numbers=17)
        expected = (factors, inverses, gradients + ring)
        assert (sent.factors, sent.inverses, sent.gradients) == expected, rank


@pytest.mark.parametrize(("size", "network"), list(product(range(1, 9), (mixed, few, mlp))))
def test_so_does_every_plan_for_local_gradients(size, network):
    for strategy in strategies(size):
        plan = strategy(network(size), World(size, gradients_are_local=True))
        run_factors(plan, from_all=not isinstance(strategy, Local))
        run_gradients(plan)
        check_sent(plan)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_is_the_same_every_time(layout):
    for strategy in strategies(6):
        one, two = (strategy(mixed(6, layout), World(6)) for _ in range(2))
        assert one == two
        assert one.fingerprint() == two.fingerprint()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("strategy", strategies(1), ids=repr)
def test_one_rank_only_decomposes_and_preconditions(strategy, local):
    plan = strategy(mixed(1), World(1, gradients_are_local=local))
    assert plan.update == ()
    assert {type(op) for op in plan.refresh} == {Decompose}
    assert {type(op) for op in plan.apply} == {Precondition}
    assert {op.rank for op in plan.refresh} == {0}
    assert {op.ranks for op in plan.apply} == {range(1)}


def test_no_blocks_make_an_empty_plan():
    for strategy in strategies(4):
        plan = strategy([], World(4, gradients_are_local=True))
        assert plan.update == plan.refresh == plan.apply == ()
        assert plan.sent(0, other_numbers=8).gradients == 2 * 3 * 32 / 4


def test_no_rank_is_sent_a_piece_that_it_holds():
    """Neither before preconditioning, nor is a piece fetched from elsewhere than its holders."""
    for size, layout in product((2, 4, 6, 8), LAYOUTS):
        for strategy in strategies(size):
            plan = strategy(mixed(size, layout), World(size))
            for message in messages(plan, of(plan.apply, Gather)):
                piece = plan.block[message.op.block].pieces[message.op.piece]
                assert message.source in piece.holders
                assert piece.chunk is not None or message.to not in piece.holders


class TestHybrid:
    def test_the_grid_has_rows_and_columns(self):
        """KAISA: 8 ranks, 2 workers a block: columns {c, c + 4}, rows of 4."""
        plan = Hybrid(1 / 4)(mlp(8), World(8))
        assert {plan.workers[b.name] for b in plan.blocks} == {range(c, 8, 4) for c in range(4)}
        for op in of(plan.apply, Return):
            sent = list(messages(plan, [op]))
            assert all(m.to // 4 == m.source // 4 for m in sent)
            assert Counter(m.source for m in sent) == dict.fromkeys(op.sources, 3)

    @pytest.mark.parametrize("fraction", [1 / 8, 1 / 4, 1 / 2, 1])
    def test_fraction_of_the_ranks_precondition(self, fraction):
        plan = Hybrid(fraction)(mixed(8), World(8))
        assert {len(ranks) for ranks in plan.workers.values()} == {8 * fraction}
        assert plan.strategy == f"Hybrid({Fraction(fraction)})"

    def test_any_small_fraction_is_one_worker(self):
        assert Hybrid(0.001)(mlp(4), World(4)).strategy == "Hybrid(1/4)"

    def test_the_ends_are_the_other_two(self):
        blocks, world = mixed(8, sharded), World(8)
        for end, workers in ((MemOpt(), 1), (CommOpt(), 8)):
            one, two = end(blocks, world), Hybrid(workers / 8)(blocks, world)
            assert (one.update, one.refresh, one.apply) == (two.update, two.refresh, two.apply)

    @pytest.mark.parametrize("size", [4, 6, 8, 12])
    @pytest.mark.parametrize("layout", [replicated, sharded])
    def test_memory_falls_and_gradient_bytes_rise_from_comm_opt_to_mem_opt(self, size, layout):
        plans = [Hybrid(k / size)(resnet50(size, layout), World(size)) for k in divisors(size)]
        memory = [sum(plan.memory(r).total for r in range(size)) for plan in plans]
        assert memory == sorted(set(memory))
        returned = [sum(plan.flows(of(plan.apply, Return)).sent) for plan in plans]
        assert returned == sorted(set(returned), reverse=True)

    def test_gradients_of_sharded_models_are_gathered_more_the_more_workers_there_are(self):
        plans = [Hybrid(k / 8)(mlp(8, sharded), World(8)) for k in divisors(8)]
        gathered = [sum(plan.flows(of(plan.apply, Gather)).sent) for plan in plans]
        assert gathered == sorted(set(gathered))

    def test_a_and_g_of_a_block_may_lie_apart(self):
        """Pauloski 2022, sec. 4.3: one layer, two ranks, each with one factor."""
        plan = CommOpt()([linear("one", 8, 7, 2)], World(2))
        assert plan.decomposers == {("one", "A"): range(1), ("one", "G"): range(1, 2)}

    def test_factors_that_are_merged_stay_together(self):
        plan = CommOpt()([tied("one", 30, 8, 2)], World(2))
        assert len(set(plan.keepers.values())) == 1

    def test_ranks_that_outnumber_factors_repeat_nothing(self):
        """Each share is sent to one rank, each factor decomposed once."""
        for strategy in (CommOpt(), MemOpt(), ReduceScatter()):
            plan = strategy([linear("one", 8, 7, 5)], World(5))
            assert {len(ranks) for ranks in plan.decomposers.values()} == {1}
            assert {op.factor: op.to for op in plan.update} == plan.decomposers

    def test_merged_factors_are_decomposed_once_as_well(self):
        plan = CommOpt()([tied("one", 30, 8, 3)], World(3))
        assert set(plan.keepers.values()) == {range(1)}
        assert {op.to for op in of(plan.refresh, Share)} == {range(3)}


class TestCommOpt:
    def test_sends_nothing_on_a_stale_step_if_all_have_the_gradients(self):
        """Pauloski 2022, sec. 4.3."""
        plan = CommOpt()(resnet50(8), World(8))
        assert all(plan.sent(rank).gradients == 0 for rank in range(8))

    def test_gathers_sharded_gradients_and_returns_nothing(self):
        plan = CommOpt()(mixed(8, sharded), World(8))
        assert of(plan.apply, Gather)
        assert not of(plan.apply, Return)


class TestMemOpt:
    def test_no_parts_travel_but_those_of_a_basis(self):
        plan = MemOpt()(mixed(4), World(4))
        assert {op.factor[0] for op in of(plan.refresh, Share)} == {"rotated", "both"}

    def test_one_rank_has_everything_of_a_block(self):
        plan = MemOpt()(mlp(4), World(4))
        for b in plan.blocks:
            (owner,) = plan.workers[b.name]
            for name in ("A", "G"):
                assert set(plan.keepers[b.name, name]) == {owner}
                assert set(plan.holders[b.name, name]) == {owner}


class TestReduceScatter:
    def test_sends_half_the_bytes_of_an_all_reduce_of_factors(self):
        """Osawa 2019, sec. 3.3."""
        plan = ReduceScatter()(resnet50(8), World(8, route=Route.DIRECT))
        numbers = sum(spec.numel for spec in plan.factors.values())
        assert 2 * sum(plan.sent(r).factors for r in range(8)) == 2 * (8 - 1) * numbers * 4

    def test_local_gradients_take_the_bytes_of_an_all_reduce_and_are_preconditioned_on_the_way(
        self,
    ):
        """To the owner, and back with one number a block for the KL clip (Osawa 2019, sec. 3.3)."""
        size = 8
        world = World(size, gradients_are_local=True, route=Route.DIRECT)
        plan = ReduceScatter()(resnet50(size), world)
        numbers = sum(b.numel for b in plan.blocks)
        there, back = (sum(plan.flows(of(plan.apply, op)).sent) for op in (ReduceGradient, Return))
        assert there == (size - 1) * numbers * 4
        assert back == (size - 1) * (numbers + len(plan.blocks)) * 4
        assert not of(plan.apply, TotalGradients)

    def test_everyone_but_the_owner_gets_the_result(self):
        plan = ReduceScatter()(mlp(4), World(4, gradients_are_local=True))
        for b in plan.blocks:
            (owner,) = plan.workers[b.name]
            for op in of(plan.apply, Return):
                if op.block == b.name:
                    sent = [(m.source, m.to) for m in messages(plan, [op])]
                    assert sent == [(owner, r) for r in range(4) if r != owner]

    def test_without_local_gradients_it_is_mem_opt(self):
        for layout in LAYOUTS:
            one, two = (s(mlp(4, layout), World(4)) for s in (ReduceScatter(), MemOpt()))
            assert (one.update, one.refresh, one.apply) == (two.update, two.refresh, two.apply)

    def test_uncovered_gradients_are_still_all_reduced(self):
        plan = ReduceScatter()(mlp(4), World(4, gradients_are_local=True))
        more = plan.sent(1, other_numbers=10).gradients - plan.sent(1).gradients
        assert more == 2 * 3 * 40 / 4


class TestLocal:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_sends_no_factor_and_no_inverse(self, layout):
        plan = Local()(mixed(4, layout), World(4))
        assert plan.update == plan.buckets == ()
        assert not of(plan.refresh, Share)
        assert all(plan.sent(r).factors == plan.sent(r).inverses == 0 for r in range(4))

    def test_owners_are_those_of_mem_opt(self):
        one, two = (s(mixed(4), World(4)) for s in (Local(), MemOpt()))
        assert one.workers == two.workers
        assert one.keepers == two.keepers


class TestLoads:
    def optimum(self, costs, machines):
        loads = []
        for places in product(range(machines), repeat=len(costs)):
            load = [0.0] * machines
            for cost, place in zip(costs, places, strict=True):
                load[place] += cost
            loads.append(max(load))
        return min(loads)

    def bound(self, machines):
        return 4 / 3 - 1 / (3 * machines)

    @pytest.mark.parametrize("machines", [1, 2, 3, 4])
    def test_the_longest_is_within_grahams_bound(self, machines):
        numbers = random.Random(machines)
        for _ in range(30):
            costs = [float(numbers.choice((1, 2, 3, 5, 8, 40))) for _ in range(6)]
            load = [0.0] * machines
            for cost, machine in zip(costs, longest_first(costs, machines), strict=True):
                load[machine] += cost
            assert max(load) <= self.bound(machines) * self.optimum(costs, machines)

    @pytest.mark.parametrize("machines", [1, 3, 6, 10_000])
    def test_each_goes_to_the_first_of_the_least_loaded(self, machines):
        """Also where most machines get nothing, and where a job takes no time."""
        numbers = random.Random(machines)
        for _ in range(5):
            costs = [float(numbers.choice((0, 0, 1, 2, 40))) for _ in range(6)]
            load, found = [0.0] * machines, longest_first(costs, machines)
            for job in sorted(range(6), key=lambda job: -costs[job]):
                assert found[job] == load.index(min(load))
                load[found[job]] += costs[job]

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_so_are_the_decompositions_of_comm_opt(self, size):
        plan = CommOpt()(mlp(size, depth=4), World(size))
        costs = [Flops().decompose(spec) for spec in plan.factors.values()]
        longest = max(plan.work(rank).decompose for rank in range(size))
        assert longest <= self.bound(size) * self.optimum(costs, size)

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_and_all_work_of_mem_opt_from_one_refresh_to_the_next(self, size):
        plan = MemOpt()(mlp(size, depth=7), World(size, refresh_every=20))

        def cycle(work):
            return work.decompose + 20 * work.precondition

        alone = [cycle(MemOpt()([b], World(1, refresh_every=20)).work(0)) for b in mlp(1, depth=7)]
        longest = max(cycle(plan.work(rank)) for rank in range(size))
        assert longest <= self.bound(size) * self.optimum(alone, size)

    def test_the_work_of_every_step_counts_as_often_as_it_is_done(self):
        """Two blocks cost much to apply and little to decompose, one the other way round."""
        blocks = [tied("one", 5000, 8, 2), linear("three", 30, 29, 2), tied("two", 5000, 8, 2)]
        often, rarely = (MemOpt()(blocks, World(2, refresh_every=n)).workers for n in (1, 1000))
        assert often["one"] == often["two"] != often["three"]
        assert rarely["one"] != rarely["two"]

    def test_another_cost_makes_another_plan(self):
        class Eight:
            """Nothing counts but matrices of one size."""

            def decompose(self, spec):
                return float(spec.dim == 8)

            def precondition(self, block):
                return 0.0

        blocks = [linear("a", 4, 7, 2), linear("b", 50, 40, 2), linear("c", 4, 7, 2)]
        for strategy in (MemOpt, ReduceScatter, Local):
            usual, other = (
                s(blocks, World(2)).workers for s in (strategy(), strategy(cost=Eight()))
            )
            assert usual["a"] == usual["c"] != usual["b"]
            assert other["a"] != other["c"]

    def test_the_sources_of_gathers_take_turns(self):
        plan = CommOpt()(mlp(8, tensor_parallel), World(8))
        sent = plan.flows(of(plan.apply, Gather)).sent
        assert max(sent) <= 1.2 * min(sent)

    def test_ranks_are_served_evenly_and_from_their_own_row(self):
        assert [server((2, 5), rank, 8) for rank in range(8)] == [2] * 4 + [5] * 4
        column = range(1, 8, 2)  # of a grid with rows (0, 1), (2, 3), …
        assert [server(column, rank, 8) for rank in range(8)] == [1, 1, 3, 3, 5, 5, 7, 7]
        for world, count in product((3, 7, 12), (1, 2, 3)):
            served = Counter(server(range(count), rank, world) for rank in range(world))
            assert max(served.values()) - min(served.values()) <= 1

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_plan_has_as_many_ops_for_many_ranks_as_for_few(self, layout):
        """And sets of ranks that are no lists; shards that are no chunks are for small worlds."""
        if layout is sharded:
            return
        counts = []
        for size in (8, 800):
            plan = Hybrid(1 / 4)(mlp(size, layout), World(size))
            ops = (*plan.update, *plan.refresh, *plan.apply)
            counts.append(len(ops))
            sets = [
                getattr(op, name) for op in ops for name in ("to", "ranks") if hasattr(op, name)
            ]
            assert {type(one) for one in sets} == {range}
        assert counts[0] <= counts[1] <= counts[0] + 12


class TestBasis:
    """EKFAC's S is a statistic in the basis of A and G."""

    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_lives_where_the_block_is_preconditioned_and_the_basis_everywhere(self, workers):
        plan = Hybrid(workers / 4)([ekfac("one", 6, 5, 4)], World(4))
        assert plan.keepers["one", "S"] == plan.workers["one"]
        assert len(plan.workers["one"]) == workers
        assert plan.holders["one", "A"] == plan.holders["one", "G"] == range(4)
        assert plan.holders["one", "S"] == plan.workers["one"]

    def test_stays_at_the_owner_if_only_his_data_count(self):
        plan = Local()([ekfac("one", 6, 5, 4)], World(4))
        assert plan.holders["one", "A"] == plan.holders["one", "S"] == range(1)


class TestErrors:
    @pytest.mark.parametrize("given", [0, -0.5, 1.5, float("nan"), "all", True, None], ids=repr)
    def test_fraction(self, given):
        says = f"Hybrid.fraction is {given!r} but must be in (0, 1]: pass such a number."
        with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
            Hybrid(given)

    def test_fraction_that_does_not_divide(self):
        says = (
            "Hybrid.fraction is 0.375, which lets 3 of 8 ranks precondition a block, but that "
            "number must divide 8: pass one of 1/8, 1/4, 1/2, 1."
        )
        with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
            Hybrid(0.375)(mlp(8), World(8))

    def test_blocks_of_one_name(self):
        says = (
            "Two blocks are named 'a' but a plan tells blocks apart by their names: give each its "
            "own."
        )
        with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
            MemOpt()([linear("a", 2, 2, 2), linear("a", 2, 2, 2)], World(2))

    @pytest.mark.parametrize("holders", [(), (0, 2), (-1,)])
    def test_holders_outside_of_the_world(self, holders):
        says = (
            f"A piece of block 'a' is held by ranks {holders!r} but must be held by some of the "
            "ranks 0 to 1: pass the holders as ranks of the group that shares the work."
        )
        bad = block("a", "Linear", (1, 2, 2), {"A": triangle(2)}, [], 2)
        piece = Piece(0, ((0, 2), (0, 2)), holders)
        with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
            MemOpt()([replace(bad, pieces=(piece,))], World(2))

    def test_local_gradients_of_a_sharded_model(self):
        says = (
            "World.gradients_are_local is True but a piece of block 'l0' is held by only 1 of 4 "
            "ranks: local gradients are whole, so pass it for unsharded models only."
        )
        with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
            MemOpt()(mlp(4, sharded), World(4, gradients_are_local=True))
