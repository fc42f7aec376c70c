"""Auto takes the cheapest placement that fits."""

import re

import pytest

from natgrad.errors import SettingError
from natgrad.placement import Auto, Cluster, Hybrid, ReduceScatter, World, simulate
from natgrad.placement.strategies.hybrid import divisors
from natgrad.tables import bytes_text
from unit.placement.networks import mixed, mlp, resnet50, sharded

FAST, SLOW = Cluster(bandwidth=1e13, latency=1e-9), Cluster(bandwidth=1e6)


def candidates(blocks, world, cluster=SLOW):
    strategies = [Hybrid(k / world.size, cluster=cluster) for k in divisors(world.size)]
    strategies += [ReduceScatter(cluster=cluster)] if world.gradients_are_local else []
    return [strategy(blocks, world) for strategy in strategies]


def seconds(plan, cluster):
    every = plan.world.update_every, plan.world.refresh_every
    return simulate(plan, cluster).step_seconds(*every)


def most(plan):
    return max(plan.memory(rank).total for rank in plan.world.ranks)


@pytest.mark.parametrize("cluster", [FAST, SLOW, Cluster()], ids=["fast", "slow", "default"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("size", [2, 6, 8])
def test_no_candidate_is_cheaper(cluster, local, every, size):
    blocks, world = mixed(size), World(size, local, update_every=every, refresh_every=every)
    chosen = Auto(cluster=cluster)(blocks, world)
    assert seconds(chosen, cluster) == min(
        seconds(plan, cluster) for plan in candidates(blocks, world, cluster)
    )


def test_gradients_that_travel_anyway_are_preconditioned_on_the_way():
    """Local gradients and a refresh at every step on a slow network: what Osawa 2019 is for."""
    every = {"update_every": 1, "refresh_every": 1}
    world = World(8, gradients_are_local=True, bucket_bytes=1 << 30, **every)
    plan = Auto(cluster=SLOW)(resnet50(8), world)
    assert plan.strategy == "Auto: ReduceScatter()"


def test_rare_refreshes_on_a_slow_network_make_every_rank_precondition():
    plan = Auto(cluster=SLOW)(resnet50(8), World(8, refresh_every=10_000))
    assert plan.strategy == "Auto: Hybrid(1)"


@pytest.mark.parametrize("give", ["memory_limit", "cluster"])
def test_what_it_chooses_fits(give):
    blocks, world = resnet50(8), World(8, refresh_every=10_000)
    needs = sorted(most(plan) for plan in candidates(blocks, world))
    for limit in needs:
        if give == "memory_limit":
            auto = Auto(limit, cluster=SLOW)
        else:
            auto = Auto(cluster=Cluster(bandwidth=SLOW.bandwidth, memory=limit))
        assert most(auto(blocks, world)) <= limit
    assert most(Auto(needs[-1], cluster=SLOW)(blocks, world)) == needs[-1]


def test_a_limit_comes_before_the_memory_of_the_cluster():
    blocks, world = mlp(4), World(4)
    least = min(most(plan) for plan in candidates(blocks, world))
    assert Auto(least, cluster=Cluster(memory=1))(blocks, world)


def test_an_error_names_the_least_memory():
    blocks, world = resnet50(8, sharded), World(8)
    least = min(candidates(blocks, world), key=most)
    says = (
        f"Auto may take 1.00 MiB per rank, but the least that any placement takes is "
        f"{bytes_text(most(least))}, by {least.strategy}, {bytes_text(most(least) - 2**20)} too "
        "much: raise memory_limit to that, use more ranks, or a structure that keeps less for the "
        "largest layers."
    )
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        Auto(memory_limit=1 << 20)(blocks, world)


@pytest.mark.parametrize("given", [0, -1, float("inf"), "1 GiB"], ids=repr)
def test_a_limit_must_be_a_number(given):
    says = f"Auto.memory_limit is {given!r} but must be finite and above 0: pass such a number."
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        Auto(given)
