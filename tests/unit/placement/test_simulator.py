"""Seconds by hand, and what they must do when the cluster changes."""

from dataclasses import replace

import numpy as np
import pytest

from natgrad.errors import SettingError
from natgrad.kfac.ranks import summing
from natgrad.placement import (
    Cluster,
    CommOpt,
    Flops,
    Flows,
    Hybrid,
    Link,
    Local,
    MemOpt,
    ReduceScatter,
    Timeline,
    World,
    routes,
    simulate,
    simulator,
)
from natgrad.specs import Routine
from unit.placement.networks import LAYOUTS, linear, mixed, mlp, resnet50

UNIT = Cluster(flops=1.0, bandwidth=1.0, latency=1000.0, overhead=1e-9)
STRATEGIES = (MemOpt(), Hybrid(0.5), CommOpt(), ReduceScatter(), Local())


def test_one_owner_by_hand():
    """2 ranks, one layer 3 x 3: rank 1 sends two triangles and gets the gradient back."""
    times = simulate(MemOpt()([linear("one", 3, 3, 2, bias=False)], World(2)), UNIT)
    assert times.update == (1000 + 48, 1000 + 48)
    assert times.refresh == (2 * 25 * 27, 0)
    start = 4 * 9 * 6 + 1000  # both wait for the owner's products
    assert times.apply == (start + 40, start + 40)
    assert times.memory == MemOpt()([linear("one", 3, 3, 2, bias=False)], World(2)).memory(0).total


def test_everyone_by_hand():
    """A at rank 0, G at rank 1, parts both ways, no gradient sent."""
    times = simulate(CommOpt()([linear("one", 3, 3, 2, bias=False)], World(2)), UNIT)
    assert times.update == (1000 + 24, 1000 + 24)
    assert times.refresh == (25 * 27 + 1000 + 48,) * 2
    assert times.apply == (4 * 9 * 6,) * 2


def test_every_bucket_waits_once():
    blocks = [linear("one", 3, 3, 2, bias=False)]
    times = simulate(MemOpt()(blocks, World(2, bucket_bytes=24)), UNIT)
    assert times.update == (2 * 1000 + 48,) * 2


def test_an_all_reduce_by_hand():
    blocks = [linear("one", 3, 3, 2, bias=False)]
    times = simulate(CommOpt()(blocks, World(2, gradients_are_local=True)), UNIT)
    assert times.apply == (2 * (1000 + 36 / 2) + 4 * 9 * 6,) * 2  # a reduce-scatter and a gather


def test_an_exchange_takes_as_long_as_the_longer_of_sending_and_receiving():
    """The owner receives three times what each of the others sends."""
    times = simulate(MemOpt()([linear("one", 3, 3, 4, bias=False)], World(4)), UNIT)
    assert times.update == pytest.approx((1000 + 3 * 48, *(1000 + 48,) * 3))


def test_one_rank_waits_for_nobody():
    times = simulate(MemOpt()(mixed(1), World(1)), UNIT)
    assert times.update == (0.0,)
    work = MemOpt()(mixed(1), World(1)).work(0)
    assert times.refresh == pytest.approx((work.decompose,))
    assert times.apply == pytest.approx((work.precondition,))


def test_an_average_step():
    times = Timeline((20.0, 10.0), (0.0, 100.0), (1.0, 2.0), 0)
    assert times.step_seconds(update_every=10, refresh_every=50) == 20 / 10 + 100 / 50 + 2


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_better_cluster_is_faster(strategy, layout):
    plan, cluster = strategy(mixed(4, layout), World(4)), Cluster(1e6, 1e6, 1e-3)
    before = simulate(plan, cluster).step_seconds(10, 100)
    for change in ({"flops": 2e6}, {"bandwidth": 2e6}, {"latency": 1e-4}):
        assert simulate(plan, replace(cluster, **change)).step_seconds(10, 100) < before


def test_more_workers_apply_faster_and_refresh_slower_on_a_slow_network():
    slow = Cluster(bandwidth=1e7)
    times = [simulate(Hybrid(k / 8)(resnet50(8), World(8)), slow) for k in (1, 2, 4, 8)]
    apply, refresh = ([max(getattr(t, name)) for t in times] for name in ("apply", "refresh"))
    assert apply == sorted(apply, reverse=True)
    assert refresh == sorted(refresh)


def test_decompositions_are_shared_out():
    one, four = (simulate(MemOpt()(mlp(n), World(n)), Cluster()) for n in (1, 4))
    assert max(four.refresh) < max(one.refresh) / 3


def test_costs_can_be_replaced():
    class Measured(Flops):
        def decompose(self, spec):
            return 2 * super().decompose(spec)

    plan = MemOpt()(mlp(1), World(1))
    slow, fast = (simulate(plan, UNIT, cost).refresh[0] for cost in (Measured(), Flops()))
    assert slow == pytest.approx(2 * fast)


def flown(*amounts, **changes):
    """Seconds of two ranks: of every bucket, megabytes from rank 0 to 1, and from 1 to 0."""
    flows = [
        Flows(np.array([there, back]) * 10**6, np.array([back, there]) * 10**6)
        for there, back in amounts
    ]
    quick = Cluster(bandwidth=1e6, latency=1e-9, overhead=1e-9, **changes)
    return simulator._flown(flows, [10**6] * len(flows), quick)


def test_a_bucket_waits_until_it_may_leave(monkeypatch):
    """As many are under way as the executor lets leave (`may_leave`), and the number is in one
    place."""
    few = [(10, 0)] + [(0, 0)] * (routes.IN_FLIGHT - 1)
    assert flown(*few[:-1], (0, 5)) == pytest.approx([10, 10])  # the last one leaves at once
    assert flown(*few, (0, 5)) == pytest.approx([15, 15])  # it waits for the first one
    monkeypatch.setattr(routes, "IN_FLIGHT", 100)
    assert flown(*few, (0, 5)) == pytest.approx([10, 10])
    monkeypatch.setattr(routes, "IN_FLIGHT", 1)
    assert flown(*few[:-1], (0, 5)) == pytest.approx([15, 15])
    assert summing.may_leave is simulator.may_leave is routes.may_leave


def test_so_does_one_of_a_plan(monkeypatch):
    """Layers that one rank owns, one behind the other."""
    blocks = [linear(f"l{i}", 300, 300, 4, bias=False) for i in range(12)]
    world = World(4, bucket_bytes=4 * 300 * 301 // 2, route=routes.Route.DIRECT)
    cluster = Cluster(latency=1e-9, overhead=1e-9)
    found = []
    for limit in (1, 2, routes.IN_FLIGHT, 1000):
        monkeypatch.setattr(routes, "IN_FLIGHT", limit)
        found.append(max(simulate(MemOpt()(blocks, world), cluster).update))
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.5 * found[-1]
    assert found[-2] == pytest.approx(found[-1], rel=0.2)  # four are nearly as good as all


def test_one_direction_at_a_time():
    """What two ranks of gloo send each other mostly travels one after the other."""
    flows = Flows(np.array([12, 6]), np.array([6, 12]))
    for duplex, seconds in ((1.0, 12), (0.5, 15), (0.0, 18)):
        slow = Cluster(bandwidth=1.0, latency=1e-9, overhead=1e-9, duplex=duplex)
        assert slow.exchange(flows) == pytest.approx([seconds] * 2)
        assert flown((12, 6), duplex=duplex) == pytest.approx([seconds] * 2)
        assert slow.ring(6, 4) == pytest.approx(6)


def test_rings_take_a_hop_for_every_rank():
    trees = Cluster(latency=5.0, bandwidth=1.0, node=4, inside=Link(3.0, 1.0))
    rings = replace(trees, rings=True)
    assert trees.ring(7, 16) == 4 * 5.0 + 7
    assert rings.ring(7, 16) == 4 * 5.0 + 11 * 3.0 + 7
    assert rings.ring(7, 4) == 3 * 3.0 + 7  # inside of a node
    assert replace(rings, node=1, inside=None).ring(7, 16) == 15 * 5.0 + 7
    assert rings.ring(7, 1) == trees.ring(7, 1) == 0
    assert rings.all_reduce(16, 16) == trees.all_reduce(16, 16)  # in trees


def test_a_reduce_scatter_may_be_an_all_to_all():
    """Over gloo ranks exchange slices and add them up: 6 bytes there and 6 back, in turn."""
    slow = Cluster(bandwidth=1.0, latency=2.0, overhead=0.5, duplex=0.0, exchanged_sums=True)
    assert slow.reduce_scatter(6, 4) == 2 + 2 * 0.5 + 2 * 6
    assert replace(slow, duplex=1.0).reduce_scatter(6, 4) == 2 + 2 * 0.5 + 6
    assert replace(slow, exchanged_sums=False).reduce_scatter(6, 4) == slow.ring(6, 4) == 2 * 2 + 6
    assert slow.reduce_scatter(6, 1) == 0
    # So in a plan whose factors go in even slices: sums alone, as an all-gather is none.
    world = World(4, route=routes.Route.BALANCED)
    plan = CommOpt()([linear("l", 40, 30, 4)], world)
    sums = sum(4 * spec.on_wire for spec in plan.factors.values())
    (ring,) = (call for call in plan.calls(plan.update) if call.groups is not None)
    assert ring.sums
    assert ring.around == pytest.approx(sums * 3 / 4, rel=0.01)
    faster, slower = (
        simulate(plan, replace(slow, latency=1e-9, overhead=1e-9, exchanged_sums=one))
        for one in (False, True)
    )
    assert max(slower.update) - max(faster.update) == pytest.approx(ring.around, rel=1e-6)
    assert slower.refresh == faster.refresh


def test_two_levels_by_hand():
    """4 nodes of 4 ranks and 160 bytes: 3/4 of them inside at 10 bytes a second, 3/4 between."""
    levels = Cluster(
        latency=5.0, bandwidth=2.0, node=4, inside=Link(3.0, 10.0), rings=True, two_levels=True
    )
    sent = 160 * 15 // 16
    assert levels.ring(sent, 16) == 3 * 3.0 + 120 / 10 + 3 * 5.0 + 120 / 2
    assert replace(levels, rings=False).ring(sent, 16) == 2 * 3.0 + 12 + 2 * 5.0 + 60
    one = replace(levels, two_levels=False)
    for ranks in (4, 14):  # one node, and nodes that are not full
        assert levels.ring(sent, ranks) == one.ring(sent, ranks)
    # Of hops there are N + d - 2 and not N d - 1, which tells where ranks are many.
    assert levels.ring(40, 4096) < one.ring(40, 4096) / 2


def test_slowest_ends_are_those_of_all_ranks():
    """The seconds of the slowest rank alone are exactly the most of those by rank."""
    rng = np.random.default_rng(0)
    for cluster in (
        Cluster(),
        Cluster(duplex=0.3),
        Cluster(node=4, inside=Link(1e-6, 3e10)),
        Cluster(node=4, inside=Link(1e-6, 3e8), rings=True),
    ):
        for ranks in (1, 2, 4, 10, 16):
            flows = Flows(*rng.integers(0, 10**9, (2, ranks)))
            assert cluster.longest(flows) == cluster.exchange(flows).max()
        assert cluster.longest(Flows.none(4)) == 0


@pytest.mark.parametrize("name", ["rings", "exchanged_sums", "two_levels"])
def test_words_of_a_cluster_that_are_true_or_false(name):
    with pytest.raises(SettingError) as error:
        Cluster(**{name: 2})
    assert str(error.value) == (f"Cluster.{name} is 2 but must be True or False: pass one of them.")


def test_ranks_of_a_node_are_connected():
    with pytest.raises(SettingError) as error:
        Cluster(node=8)
    assert str(error.value) == (
        "Cluster.node is 8 but Cluster.inside is None, so that nothing connects the ranks of a "
        "node: pass the Link between them, or node=1."
    )


def test_inverses_and_eigendecompositions_have_their_own_speed():
    cluster = Cluster(flops=100.0, decomposing=0.1, inverting=0.5)
    assert cluster.rate(Routine.EIGEN) == 10
    assert cluster.rate(Routine.CHOLESKY) == cluster.rate(Routine.PRODUCT) == 50


@pytest.mark.parametrize("wrong", [-0.1, 1.5, "both", float("nan")])
def test_a_share_of_both_directions_is_one(wrong):
    with pytest.raises(SettingError, match=r"Cluster.duplex is .* but must be"):
        Cluster(duplex=wrong)
