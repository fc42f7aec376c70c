"""Decompositions that several ranks do together: where that is faster, and nowhere else."""

from dataclasses import replace
from itertools import pairwise

import pytest

from natgrad.errors import SettingError
from natgrad.placement import (
    Auto,
    Cluster,
    CommOpt,
    Decompose,
    Duty,
    Flops,
    Hybrid,
    Link,
    MemOpt,
    Reduce,
    Share,
    World,
    assemble,
    simulate,
)
from natgrad.placement.strategies.hybrid import grid
from natgrad.placement.strategies.sharing_out import Job, Sharing, _seconds, share_out
from natgrad.specs import FactorCost, Routine
from unit.placement.networks import linear, resnet50

SLOW = Cluster(flops=1e12)


def by_rows(block, ranks=None):
    """A block whose factors are inverted as `Cholesky` does."""

    def cost(spec):
        if spec.diagonal or spec.batch > 1:
            return replace(spec, cost=FactorCost(float(spec.batch * spec.dim**3), 2.0 * spec.dim))
        cube = float(spec.dim) ** 3
        work = FactorCost(2 * cube, 2.0 * spec.dim, Routine.CHOLESKY, cube / 3, 2 * cube)
        return replace(spec, cost=work, parts=spec.dim**2)

    pieces = block.pieces
    if ranks is not None:
        pieces = tuple(replace(piece, holders=range(ranks)) for piece in pieces)
    factors = tuple((name, cost(spec)) for name, spec in block.factors)
    return replace(block, factors=factors, pieces=pieces, together=True)


def network(ranks):
    return [by_rows(block, ranks) for block in resnet50()]


def unshared(blocks, world, workers, cluster):
    duties = grid(blocks, world, workers, Flops())
    return assemble("alone", blocks, world, duties, cluster=cluster)


@pytest.mark.parametrize("ranks", [64, 256, 1024])
def test_a_refresh_no_longer_waits_for_the_largest_factor(ranks):
    blocks, world = network(ranks), World(ranks)
    for fraction, workers in ((1.0, ranks), (1 / 8, ranks // 8)):
        before = unshared(blocks, world, workers, SLOW)
        after = Hybrid(fraction, cluster=SLOW)(blocks, world)
        times = [simulate(plan, SLOW) for plan in (before, after)]
        assert times[1].stages.decompose < times[0].stages.decompose / 2.5
        assert max(times[1].refresh) < max(times[0].refresh)
        assert times[1].step_seconds(10, 100) < times[0].step_seconds(10, 100)


def test_nothing_is_shared_out_where_that_gains_nothing():
    """Every rank has a layer of its own: others would only repeat its Cholesky factor."""
    blocks, world = [by_rows(linear(f"l{i}", 90, 90, 16)) for i in range(16)], World(16)
    plan = CommOpt(cluster=SLOW)(blocks, world)
    assert plan == replace(unshared(blocks, world, 16, SLOW), strategy="CommOpt()")
    assert not plan.rows
    assert CommOpt(cluster=Cluster(flops=1e6))(blocks[:4], world).rows  # where ranks are left over


def test_nor_where_it_cannot_be():
    assert not CommOpt(cluster=SLOW)(network(1), World(1)).rows
    spread = [
        replace(b, pieces=tuple(replace(p, holders=range(64)) for p in b.pieces))
        for b in resnet50()
    ]
    assert not CommOpt(cluster=SLOW)(spread, World(64)).rows  # eigendecompositions
    assert not MemOpt(cluster=SLOW)(network(64), World(64)).rows  # one rank has the inverse


def test_auto_chooses_it():
    blocks, world = network(64), World(64)
    plan = Auto(cluster=SLOW)(blocks, world)
    assert plan.rows
    seconds = simulate(plan, SLOW).step_seconds(10, 100)
    for workers in (1, 8, 64):
        alone = simulate(unshared(blocks, world, workers, SLOW), SLOW)
        assert seconds < alone.step_seconds(10, 100)


def test_every_row_is_made_and_sent_once():
    plan = CommOpt(cluster=SLOW)(network(256), World(256))
    made, sent = {}, {}
    for op in plan.refresh:
        here = made if isinstance(op, Decompose) else sent
        here.setdefault(op.factor, []).append(op)
    kept = {op.factor: op for op in plan.update}
    shared = {factor for factor, _ in plan.rows}
    assert shared
    for factor in shared:
        dim = plan.factors[factor].dim
        rows = [op.rows for op in made[factor]]
        assert (rows[0][0], rows[-1][1]) == (0, dim)
        assert all(one[1] == other[0] for one, other in pairwise(rows))
        assert [(op.source, op.rows) for op in sent[factor]] == [
            (op.rank, op.rows) for op in made[factor]
        ]
        assert len({op.rank for op in made[factor]}) == len(rows)
        # Whoever makes rows of one factor has the other as well, whose mean enters its damping.
        ranks = {op.rank for op in made[factor]}
        for name in plan.block[factor[0]].decomposed:
            assert ranks <= set(kept[factor[0], name].to)
        assert isinstance(kept[factor], Reduce)
        assert all(isinstance(op, Share) and op.to == range(256) for op in sent[factor])
        assert sum(map(plan.numbers, sent[factor])) == plan.factors[factor].parts


@pytest.mark.parametrize("ranks", [2, 4, 16, 64, 1000, 10_000])
def test_the_busiest_rank_still_moves_no_more(ranks):
    """At most 2.5 times all factors, and all inverses, packed, although several ranks have one."""
    for fraction in {1 / (ranks // 2), 1.0}:
        plan = Hybrid(fraction, cluster=SLOW)(network(ranks), World(ranks))
        factors = 4 * sum(spec.on_wire for spec in plan.factors.values())
        inverses = 4 * sum(spec.parts for spec in plan.factors.values())
        assert plan.flows(plan.update).busiest <= 2.5 * factors
        assert plan.flows(plan.refresh).busiest <= 2.5 * inverses


def test_operations_of_a_rank():
    """A Cholesky factor each, and its rows: one of four needs 0.42 of the whole inverse."""
    blocks = [by_rows(linear("one", 8, 4000, 4, bias=False))]
    plan = CommOpt(cluster=Cluster(flops=1e6))(blocks, World(4))
    cubes = 4000**3 + 8**3
    for rank in range(4):
        assert plan.work(rank).decompose == pytest.approx((1 / 3 + 2 / 4) * cubes)


def test_jobs_get_as_few_ranks_as_they_need():
    job = Job(
        by_rows(linear("one", 8, 600, 64, bias=False)), ("A", "G"), Flops(), Cluster(flops=1.0), 64
    )
    assert job.splits == ("A", "G")
    most = 2.0 * (600**3 + 8**3)
    assert job.fewest(most) == 1
    assert job.fewest(0.7 * most) == 2
    assert job.fewest(0.0) == 8  # rows of G, the smaller one
    large = replace(job, names=("A",))
    assert large.fewest(0.0) == 32  # 64 would gain less than a tenth
    assert replace(large, most=10_000).fewest(0.0) == 32
    assert replace(large, most=12).fewest(0.0) == 8


def test_the_loads_of_a_column_are_even():
    jobs = [
        Job(
            by_rows(linear(f"l{i}", 8, 900 + i, 8, bias=False)),
            ("A",),
            Flops(),
            Cluster(flops=1e6),
            8,
        )
        for i in range(3)
    ]
    shared = share_out({0: jobs}, 8, World(8), Cluster(flops=1e6))[0]
    assert [len(ranks) for ranks in shared] == [2, 2, 2]
    assert len({rank for ranks in shared for rank in ranks}) == 6  # two are left, too few to help


@pytest.mark.parametrize("case", ["eigen", "not a worker", "too many"])
def test_a_duty_that_cannot_be_says_so(case):
    block = linear("one", 3, 3, 4, bias=False)
    block = block if case == "eigen" else by_rows(block)
    workers = range(1) if case == "not a worker" else range(4)
    ranks = range(4) if case == "too many" else range(2)
    duty = Duty(workers, {"A": ranks, "G": ranks})
    with pytest.raises(SettingError, match=r"Factor A of block 'one' is to be decomposed by ranks"):
        assemble("own", [block], World(4), [duty])


def test_the_seconds_by_which_shares_are_compared():
    """A refresh is as long as the slowest rank of any column, an update as what the fullest one
    gets over its part of the node's link; each at its own interval."""
    world = World(8, update_every=5, refresh_every=20)
    cluster = Cluster(flops=1e12, bandwidth=1e9, node=4, inside=Link(1e-6, 1e11))
    shared = {0: Sharing([], 3.0, 1000), 1: Sharing([], 7.0, 4000), 2: Sharing([], 2.0, 50)}
    sums = 4000 * world.sum_bytes / (1e9 / 4)
    assert _seconds(shared, world, cluster) == pytest.approx(7.0 / 20 + sums / 5)
