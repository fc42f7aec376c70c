"""Every plan of every strategy can be carried out; and what sets the strategies apart."""

import random
import re
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
    Share,
    TotalGradients,
    World,
)
from natgrad.placement.strategies.base import dealt, longest_first
from natgrad.placement.strategies.hybrid import divisors
from natgrad.specs import Piece
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
from unit.placement.oracle import counted, of, run_factors, run_gradients


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
        for rank in range(size):
            sent = plan.sent(rank, other_numbers=17)
            assert (sent.factors, sent.inverses, sent.gradients) == counted(plan, rank, 17)


@pytest.mark.parametrize(("size", "network"), list(product(range(1, 9), (mixed, few, mlp))))
def test_so_does_every_plan_for_local_gradients(size, network):
    for strategy in strategies(size):
        plan = strategy(network(size), World(size, gradients_are_local=True))
        run_factors(plan, from_all=not isinstance(strategy, Local))
        run_gradients(plan)
        for rank in range(size):
            sent = plan.sent(rank, other_numbers=17)
            assert (sent.factors, sent.inverses, sent.gradients) == counted(plan, rank, 17)


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
    assert {op.ranks for op in (*plan.refresh, *plan.apply)} == {(0,)}


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
            for op in of(plan.apply, Gather):
                holders = plan.block[op.block].pieces[op.piece].holders
                assert op.source in holders
                assert not set(op.to) & set(holders)


class TestHybrid:
    def test_the_grid_has_rows_and_columns(self):
        """KAISA: 8 ranks, 2 workers a block: columns {c, c + 4}, rows of 4."""
        plan = Hybrid(1 / 4)(mlp(8), World(8))
        assert {plan.workers[b.name] for b in plan.blocks} == {(0, 4), (1, 5), (2, 6), (3, 7)}
        for op in of(plan.apply, Return):
            assert {rank // 4 for rank in op.to} == {op.source // 4}
            assert len(op.to) == 3

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
        assert plan.decomposers == {("one", "A"): (0,), ("one", "G"): (1,)}

    def test_factors_that_are_merged_stay_together(self):
        plan = CommOpt()([tied("one", 30, 8, 2)], World(2))
        assert len(set(plan.keepers.values())) == 1

    def test_ranks_that_would_be_idle_decompose_what_others_do(self):
        plan = CommOpt()([linear("one", 8, 7, 5)], World(5))
        assert sorted(map(len, plan.decomposers.values())) == [2, 3]
        assert {r for ranks in plan.decomposers.values() for r in ranks} == set(range(5))
        assert {op.factor: op.to for op in plan.update} == plan.decomposers

    def test_they_do_so_for_merged_factors_as_a_whole(self):
        plan = CommOpt()([tied("one", 30, 8, 3)], World(3))
        assert set(plan.keepers.values()) == {(0, 1, 2)}
        assert not of(plan.refresh, Share)

    def test_only_if_they_precondition_it(self):
        plan = MemOpt()([linear("one", 8, 7, 5)], World(5))
        assert set(plan.decomposers.values()) == {(0,)}


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
                assert plan.keepers[b.name, name] == plan.holders[b.name, name] == (owner,)


class TestReduceScatter:
    def test_sends_half_the_bytes_of_an_all_reduce_of_factors(self):
        """Osawa 2019, sec. 3.3."""
        plan = ReduceScatter()(resnet50(8), World(8))
        numbers = sum(spec.numel for spec in plan.factors.values())
        assert 2 * sum(plan.sent(r).factors for r in range(8)) == 2 * (8 - 1) * numbers * 4

    def test_local_gradients_take_the_bytes_of_an_all_reduce_and_are_preconditioned_on_the_way(
        self,
    ):
        """To the owner, and back with one number a block for the KL clip (Osawa 2019, sec. 3.3)."""
        size = 8
        plan = ReduceScatter()(resnet50(size), World(size, gradients_are_local=True))
        numbers = sum(b.numel for b in plan.blocks)
        there, back = (sum(plan.flows(of(plan.apply, op)).sent) for op in (ReduceGradient, Return))
        assert there == (size - 1) * numbers * 4
        assert back == (size - 1) * (numbers + len(plan.blocks)) * 4
        assert not of(plan.apply, TotalGradients)

    def test_everyone_but_the_owner_gets_the_result(self):
        plan = ReduceScatter()(mlp(4), World(4, gradients_are_local=True))
        for b in plan.blocks:
            (owner,) = plan.workers[b.name]
            to = {op.to for op in of(plan.apply, Return) if op.block == b.name}
            assert to == {tuple(r for r in range(4) if r != owner)}

    def test_without_local_gradients_it_is_mem_opt(self):
        for layout in LAYOUTS:
            one, two = (s(mlp(4, layout), World(4)) for s in (ReduceScatter(), MemOpt()))
            assert (one.update, one.refresh, one.apply) == (two.update, two.refresh, two.apply)

    @pytest.mark.parametrize("size", range(3, 9))
    def test_blocks_are_owned_redundantly_by_ranks_that_outnumber_them(self, size):
        """Osawa 2019, sec. 3.3."""
        plan = ReduceScatter()(few(size), World(size))
        assert sorted(r for ranks in plan.workers.values() for r in ranks) == list(range(size))
        for b in plan.blocks:
            assert {plan.keepers[b.name, name] for name, _ in b.factors} == {plan.workers[b.name]}

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

    @pytest.mark.parametrize("workers", [1, 2, 3, 6])
    def test_each_gather_is_of_the_holder_that_has_sent_the_least(self, workers):
        chance = random.Random(workers)

        def anyhow(shape, size):
            return [
                (box, tuple(chance.sample(range(size), chance.choice((1, 1, 2, 4)))))
                for box, _ in sharded(shape, size)
            ]

        blocks = [linear(f"layer{i}", 5 + i, 3 + i, 6, anyhow) for i in range(6)]
        plan = Hybrid(workers / 6)(blocks, World(6))
        sent = dict.fromkeys(range(6), 0)
        expected = []
        for one in blocks:
            for index, piece in enumerate(one.pieces):
                served = {}
                for rank in sorted(set(plan.workers[one.name]).difference(piece.holders)):
                    source = min(piece.holders, key=lambda holder: (sent[holder], holder))
                    sent[source] += piece.numel
                    served.setdefault(source, []).append(rank)
                expected += [
                    Gather(one.name, index, source, tuple(ranks))
                    for source, ranks in sorted(served.items())
                ]
        assert of(plan.apply, Gather) == expected

    def test_pieces_of_one_holder_share_their_receivers(self):
        """Plans of large worlds would not fit into memory without that."""
        gathers = of(CommOpt()(mlp(8, sharded), World(8)).apply, Gather)
        assert len(gathers) > 8
        assert len({id(op.to) for op in gathers}) == 8

    def test_receivers_are_dealt_evenly(self):
        assert list(dealt([0, 1, 3, 4, 5], (2, 6))) == [(2, (0, 1)), (6, (3, 4, 5))]
        assert list(dealt([5], (1, 2, 3))) == [(3, (5,))]
        assert list(dealt([], (1,))) == []


class TestBasis:
    """EKFAC's S is a statistic in the basis of A and G."""

    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_lives_where_the_block_is_preconditioned_and_the_basis_everywhere(self, workers):
        plan = Hybrid(workers / 4)([ekfac("one", 6, 5, 4)], World(4))
        assert plan.keepers["one", "S"] == plan.workers["one"]
        assert len(plan.workers["one"]) == workers
        assert plan.holders["one", "A"] == plan.holders["one", "G"] == (0, 1, 2, 3)
        assert plan.holders["one", "S"] == plan.workers["one"]

    def test_stays_at_the_owner_if_only_his_data_count(self):
        plan = Local()([ekfac("one", 6, 5, 4)], World(4))
        assert plan.holders["one", "A"] == plan.holders["one", "S"] == (0,)


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
