"""Inverses that several ranks make together, each some of their rows."""

import copy
import warnings
from dataclasses import astuple
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

import natgrad
from distributed.test_bytes import ALL, STALE, exact, measure, planned
from distributed.test_parity import assert_same, reference
from distributed.training import (
    METHODS,
    NETWORKS,
    AllTogether,
    Run,
    backward,
    network,
    train,
    weights,
    wrapped,
)
from natgrad.placement import Route

PLACEMENTS = {"all": AllTogether(), "half": AllTogether(0.5)}
LAYOUTS = ("plain", "ddp", "fsdp")


@lru_cache
def choices_of(ranks):
    """Every placement by either route."""
    return {
        (name, route): {**METHODS["cholesky"], "placement": placement, "route": route}
        for name, placement in PLACEMENTS.items()
        for route in Route
        if name != "half" or ranks == 4
    }


def train_each(runs):
    found = {key: train(run) for key, run in runs.items()}
    return {key: (one["weights"], one["rows"]) for key, one in found.items()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_weights_are_those_of_one_process(world, ranks):
    """Every network in one layout, which is another one on another number of ranks."""
    runs = {
        (network, *key): Run(network, LAYOUTS[(ranks + index) % 3], kfac)
        for index, network in enumerate(NETWORKS)
        for key, kfac in choices_of(ranks).items()
    }
    results = world.run(train_each, runs, ranks=ranks)
    for key in runs:
        first, rows = results[0][key]
        assert rows > 5, key
        assert_same(first, reference(key[0], "cholesky", ranks), key)
        for others in results[1:]:
            assert all(torch.equal(others[key][0][name], first[name]) for name in first), key


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_and_memory_are_the_plans(world, ranks):
    choices = choices_of(ranks)
    short = {"inverse_dtype": torch.bfloat16, "wire_dtype": torch.bfloat16}
    for (name, route), choice in list(choices.items()):
        choices = {**choices, (name, route, "short"): {**choice, **short}}
    results = world.run(measure, "cnn", "ddp", list(choices.values()), ranks=ranks)
    for rank, found in enumerate(results):
        for key, one in zip(choices, found, strict=True):
            plan = one["plan"]
            # Two convolutions and a head have two factors each.
            assert {factor for factor, _ in plan.rows} > {(n, "A") for n in ("conv1", "head")}, key
            for step, clocks in ((ALL, ("update", "refresh", "apply")), (STALE, ("apply",))):
                expected = exact(planned(one["planned"], *clocks), ranks)
                assert exact(one["sent"][step], ranks) == expected, (key, rank, step)
            assert one["kept"] == astuple(plan.memory(rank))[:2], (key, rank)


class BreaksOnRankOne(natgrad.Cholesky):
    breaks = False

    def decompose_rows(self, matrix, damping, rows):
        if dist.get_rank() == 1 and BreaksOnRankOne.breaks:
            raise torch.linalg.LinAlgError("broken")
        return super().decompose_rows(matrix, damping, rows)


def break_one():
    warnings.filterwarnings("ignore", message="Factor . of Linear")
    run = Run("mlp", "ddp", {"inverse": BreaksOnRankOne(), "placement": PLACEMENTS["all"]})
    model = wrapped(network("mlp"), "ddp")
    kfac, optimizer = run.make(model)
    found = []
    for step in range(6):
        BreaksOnRankOne.breaks = step > 0  # from the second refresh on
        optimizer.zero_grad()
        backward(run, model, step, dist.get_rank(), dist.get_world_size())
        kfac.step()
        optimizer.step()
        found.append({b.name: b.parts["A"][0].clone() for b in kfac.blocks})
    return found, [block.failures for block in kfac.blocks], weights(model)


def test_a_failure_on_one_rank_leaves_the_last_good_inverse_on_all(world):
    results = world.run(break_one, ranks=2)
    for found, failures, last in results:
        assert all(count > 0 for count in failures)
        for name, part in found[0].items():
            assert torch.equal(part, found[-1][name])
        assert all(torch.equal(last[name], results[0][2][name]) for name in last)


def reload():
    """Two steps with shared inverses, then four with and without, and without after loading."""
    settings = {**METHODS["cholesky"], "placement": PLACEMENTS["all"]}
    others = {**METHODS["cholesky"], "placement": natgrad.MemOpt()}
    model = wrapped(network("cnn"), "ddp")
    run = Run("cnn", "ddp", settings)
    kfac, optimizer = run.make(model)
    _train(run, model, kfac, optimizer, range(2))
    other = wrapped(network("cnn"), "ddp")
    again = Run("cnn", "ddp", others)
    kfac_again, optimizer_again = again.make(other)
    other.load_state_dict(model.state_dict())
    kfac_again.load_state_dict(kfac.state_dict())
    optimizer_again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(run, model, kfac, optimizer, range(2, 5))
    _train(again, other, kfac_again, optimizer_again, range(2, 5))
    return weights(model), weights(other), len(kfac.plan.rows), len(kfac_again.plan.rows)


def _train(run, model, kfac, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(run, model, step, dist.get_rank(), dist.get_world_size())
        kfac.step()
        optimizer.step()


def test_a_state_fits_a_placement_that_shares_nothing_out(world):
    for one, other, rows, none in world.run(reload, ranks=2):
        assert rows > 0
        assert none == 0
        assert_same(one, other)
