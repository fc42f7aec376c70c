"""The weights do not depend on how many ranks train, nor on who does what."""

from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import natgrad
from distributed.training import METHODS, NETWORKS, Run, alone, train
from documented import InputsOnly, LowRank, NewtonSchulz
from natgrad.placement import Route

PLACEMENTS = {
    "mem": natgrad.MemOpt(),
    "half": natgrad.Hybrid(0.5),
    "comm": natgrad.CommOpt(),
    "scatter": natgrad.ReduceScatter(),
    "auto": natgrad.Auto(),
}
COMPARED = ["mem", "half", "comm", "scatter"]
LAYOUTS = ["plain", "ddp", "fsdp"]
# Small worlds choose the direct route: the other one is asked for, with fewer methods.
ROUTES = {"direct": None, "balanced": Route.BALANCED}
OF_ROUTE = {"direct": list(METHODS), "balanced": ["eigen", "ekfac"]}


def divides(placement, ranks):
    return placement != "half" or ranks != 3


# As the documents show how to write them.
OWN = {
    "newton-schulz": {"inverse": NewtonSchulz()},
    "low-rank": {"inverse": LowRank(3)},
    "inputs": {"structure": InputsOnly()},
    "inputs, low-rank": {"structure": InputsOnly(), "inverse": LowRank(3)},
    "root": {"geometry": natgrad.geometry.Euclidean(power=0.5)},
    "narrow": {"max_dim": 4},
    "narrow, low-rank": {"max_dim": 6, "inverse": natgrad.inverses.LowRank(2)},
}


@lru_cache(maxsize=64)
def reference(network, method, ranks, batches=()):
    return alone(Run(network, kfac={**METHODS, **OWN}[method], batches=batches), ranks)


def assert_same(found, expected, where=""):
    for name, weight in expected.items():
        error = (found[name] - weight).abs().max() / weight.abs().max()
        assert error <= 1e-10, f"{where} {name}: {error:.1e}"


def train_each(runs):
    """All of them on the same ranks, one after the other."""
    return {key: train(run)["weights"] for key, run in runs.items()}


def combinations(in_pairs, ranks):
    """On every number of ranks each two of a placement, a method, a route, a network and a
    layout."""

    def left_out(placement, method, route, *_):
        return not divides(placement, ranks) or method not in OF_ROUTE[route]

    return in_pairs(COMPARED, METHODS, ROUTES, NETWORKS, LAYOUTS, unless=left_out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_are_those_of_one_process(world, in_pairs, ranks, network, layout):
    runs = {
        (placement, method, route): Run(
            network,
            layout,
            {**METHODS[method], "placement": PLACEMENTS[placement], "route": ROUTES[route]},
        )
        for placement, method, route, *where in combinations(in_pairs, ranks)
        if where == [network, layout]
    }
    results = world.run(train_each, runs, ranks=ranks)
    for key in runs:
        _, method, _ = key
        first = results[0][key]
        assert_same(first, reference(network, method, ranks), key)
        assert torch.isfinite(torch.cat([w.flatten() for w in first.values()])).all(), key
        for weights in results[1:]:
            assert all(torch.equal(weights[key][name], first[name]) for name in first), key


def train_in_nodes(runs):
    """Ranks in nodes of two, by a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    return train_each(
        {key: replace(run, kfac={**run.kfac, "group": mesh}) for key, run in runs.items()}
    )


@pytest.mark.parametrize("network", NETWORKS)
def test_so_are_those_of_two_levels(world, network):
    runs = {
        placement: Run(
            network, "ddp", {"placement": PLACEMENTS[placement], "route": Route.BALANCED}
        )
        for placement in COMPARED
    }
    expected = reference(network, "eigen", 4)
    for found in world.run(train_in_nodes, runs, ranks=4):
        for weights in found.values():
            assert_same(weights, expected)


def test_a_run_repeats_itself(world):
    """Bit by bit, at a fixed number of ranks, by either route."""
    runs = {
        (route, turn): Run("cnn", "ddp", {"placement": natgrad.MemOpt(), "route": route})
        for route in Route
        for turn in range(2)
    }
    for found in world.run(train_each, runs, ranks=3):
        for route in Route:
            first, second = found[route, 0], found[route, 1]
            assert all(torch.equal(first[name], second[name]) for name in first)


# Of the own variants all, or the first of every two, or the second.
OF_OWN = {"all": list(OWN), "odd": list(OWN)[::2], "even": list(OWN)[1::2]}
WORLDS_OF_OWN = [
    (1, "mlp", "plain", "comm", "all"),
    (2, "mlp", "plain", "mem", "odd"),
    (2, "cnn", "ddp", "comm", "even"),
    (2, "lm", "fsdp", "mem", "even"),
    (3, "cnn", "fsdp", "scatter", "all"),
    (3, "lm", "ddp", "mem", "odd"),
    (4, "cnn", "plain", "half", "odd"),
    (4, "lm", "fsdp", "half", "even"),
]


def test_every_own_variant_is_everywhere():
    """On every number of ranks and network, in every layout, and with every placement."""
    for axis in range(4):
        met = {(world[axis], method) for world in WORLDS_OF_OWN for method in OF_OWN[world[4]]}
        assert met == set(product({world[axis] for world in WORLDS_OF_OWN}, OWN))


@pytest.mark.parametrize(("ranks", "network", "layout", "placement", "which"), WORLDS_OF_OWN)
def test_so_are_those_of_own_variants(world, ranks, network, layout, placement, which):
    """Nobody looks into the parts of an inverse on their way, nor at the factors of a structure."""
    runs = {
        method: Run(network, layout, {**OWN[method], "placement": PLACEMENTS[placement]})
        for method in OF_OWN[which]
    }
    for found in world.run(train_each, runs, ranks=ranks):
        for method, weights in found.items():
            assert_same(weights, reference(network, method, ranks))
