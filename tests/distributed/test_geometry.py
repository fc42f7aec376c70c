"""Steps in natural coordinates: the same weights on any ranks, and momentum where the plan says."""

import copy
from functools import lru_cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import natgrad
from distributed import layouts
from distributed.layouts import assert_same
from distributed.training import batch, network, weights, wrapped
from natgrad import Distributed, NaturalMuon

STEPS = 4
PLACEMENTS = {
    "mem": natgrad.MemOpt(),
    "comm": natgrad.CommOpt(),
    "scatter": natgrad.ReduceScatter(),
    "auto": natgrad.Auto(),
}
METHODS = {
    "spectral": {},
    "muon": {"geometry": natgrad.Spectral(power=0)},
    "ekfac": {"structure": natgrad.EKFAC(), "factor_decay": 0.5},
    # Seen by a hook, without observe(); enumerated and not drawn, so that ranks have no own dice.
    "exact": {"curvature": natgrad.ExactFisher(), "inverse": natgrad.Cholesky()},
    "output": {"length": natgrad.OutputChange(), "geometry": natgrad.geometry.Euclidean()},
    "graft": {"length": natgrad.lengths.Graft(), "geometry": natgrad.geometry.Euclidean()},
}


def made(model, method, **more):
    settings = {"update_every": 2, "refresh_every": 2, "weight_decay": 0.1, **METHODS[method]}
    return NaturalMuon(model, 0.02, **settings, **more)


def passes(optimizer, model, name, steps, rank=0, ranks=1, of=1):
    """``of`` ranks' batches are one step; this rank's share of them."""
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(name, step, 4 * of)
        each = len(x) // ranks
        some = slice(rank * each, (rank + 1) * each)
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()


@lru_cache(maxsize=64)
def alone(name, method, ranks):
    model = network(name)
    passes(made(model, method), model, name, range(STEPS), of=ranks)
    return weights(model)


WORLDS = [
    (2, "cnn", "plain"),
    (2, "lm", "ddp"),
    (2, "lm", "fsdp"),
    (3, "cnn", "fsdp"),
    (4, "lm", "ddp"),
]


def combinations(ranks, name, layout):
    """Each method with one placement, and in the next world with the next one."""
    turn = WORLDS.index((ranks, name, layout))
    both = product(enumerate(METHODS), enumerate(PLACEMENTS))
    return [(method, key) for (m, method), (p, key) in both if (m + turn - p) % 4 == 0]


def test_every_method_meets_every_placement():
    """And each of them every world, and so all ranks, networks and layouts."""
    met = {world: set(combinations(*world)) for world in WORLDS}
    assert set().union(*met.values()) == set(product(METHODS, PLACEMENTS))
    for pairs in met.values():
        assert {method for method, _ in pairs} == set(METHODS)
        assert {placement for _, placement in pairs} == set(PLACEMENTS)


def train_all(name, layout, chosen):
    """Each method with its placement, on the ranks of the default group."""
    layouts.quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for method, key in chosen:
        model = wrapped(network(name), layout)
        optimizer = made(model, method, distributed=Distributed(PLACEMENTS[key]))
        passes(optimizer, model, name, range(STEPS), rank, ranks, ranks)
        kfac = optimizer.kfac
        mine = {b.name for b in kfac.blocks if b.moments}
        workers = {b.name for b in kfac.blocks if rank in kfac.plan.workers[b.name]}
        found[method, key] = weights(model), mine, workers
    return found


@pytest.mark.parametrize(("ranks", "name", "layout"), WORLDS)
def test_weights_are_those_of_one_process(world, ranks, name, layout):
    chosen = combinations(ranks, name, layout)
    results = world.run(train_all, name, layout, chosen, ranks=ranks)
    for found in results:
        assert list(found) == chosen
        for (method, placement), (own, mine, workers) in found.items():
            assert_same(own, alone(name, method, ranks), f"{method}, {placement}")
            first = results[0][method, placement][0]
            assert all(torch.equal(own[key], first[key]) for key in first), (method, placement)
            assert mine == workers, (method, placement)


def train_cut(layout):
    layouts.METHODS["spectral"] = {"geometry": natgrad.Spectral(), "momentum": 0.9}
    placements = {"mem": natgrad.MemOpt(), "comm": natgrad.CommOpt()}
    cases = {
        key: layouts.Case("transformer", layout, "spectral", one) for key, one in placements.items()
    }
    return {key: found["weights"] for key, found in layouts.train_all(cases).items()}


@pytest.mark.parametrize(("ranks", "layout", "replicas"), [(2, "tp", 1), (4, "fsdp + tp", 2)])
def test_layers_that_are_cut(world, ranks, layout, replicas):
    layouts.METHODS["spectral"] = {"geometry": natgrad.Spectral(), "momentum": 0.9}
    expected = layouts.alone(layouts.Case("transformer", layout, "spectral"), replicas)
    for found in world.run(train_cut, layout, ranks=ranks):
        for placement, own in found.items():
            assert_same(own, expected, placement)


def go_on(values, state):
    """Two more steps on these ranks; the weights, and the state that all of them have then."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = wrapped(network("lm"), "ddp")
    model.module.load_state_dict(values)
    optimizer = made(model, "spectral", distributed=Distributed(natgrad.MemOpt()))
    optimizer.load_state_dict(state)
    passes(optimizer, model, "lm", range(2, 4), rank, ranks, of=2)
    return weights(model), optimizer.kfac.state_dict()["blocks"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_state_of_one_process_goes_on(world, ranks):
    model = network("lm")
    optimizer = made(model, "spectral")
    passes(optimizer, model, "lm", range(2), of=2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    passes(optimizer, model, "lm", range(2, 4), of=2)
    expected = optimizer.kfac.state_dict()["blocks"]
    for own, blocks in world.run(go_on, *saved, ranks=ranks):
        assert_same(own, weights(model))
        for name, block in expected.items():
            assert_same(blocks[name]["moments"], block["moments"], name)
