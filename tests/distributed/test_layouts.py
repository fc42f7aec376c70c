"""The weights do not depend on how parameters, batches and sequences are spread over ranks."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import natgrad
from distributed import training
from distributed.layouts import (
    PLACEMENTS,
    Case,
    alone,
    assert_same,
    train,
    train_all,
    train_data_parallel,
)
from distributed.parallel import by_columns, network
from distributed.training import weights

THREE = ("eigen", "cholesky", "ekfac")
ENDS = {"mem": natgrad.MemOpt(), "comm": natgrad.CommOpt()}
# Ranks that see the same samples.
PEERS = {"tp": 4, "one batch": 4, "fsdp + tp": 2, "hsdp + tp": 2, "replicated + tp": 2}


@lru_cache(maxsize=64)
def reference(network, method, replicas, reduction, clip, users):
    case = Case(network, method=method, reduction=reduction, clip=clip, users=users)
    return alone(case, replicas)


def check(world, case, ranks, replicas, placements=PLACEMENTS, methods=()):
    """Weights, bytes that are kept, and bytes that a step without an update sends. Methods share
    their ranks, which learn how to spread each operation once."""
    cases = [replace(case, method=method) for method in methods or [case.method]]
    for found in world.run(train_all, cases, placements, ranks=ranks):
        for one, results in zip(cases, found, strict=True):
            settings = (one.reduction, one.clip, one.users)
            expected = reference(one.network, one.method, replicas, *settings)
            for placement, result in results.items():
                assert_same(result["weights"], expected, f"{one.method}, {placement}")
                assert result["kept"] == (result["memory"].factors, result["memory"].inverses)
                if not one.users:
                    assert result["sent"][3].get("gradients", 0) == result["planned"].gradients


# Tensor parallelism.


@pytest.mark.parametrize("network", ["tower", "transformer"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_are_cut(world, ranks, network):
    check(world, Case(network, "tp"), ranks, 1, methods=THREE)


@pytest.mark.parametrize(
    ("network", "layout", "ranks"),
    [
        ("uneven", "tp", 2),
        ("uneven", "tp", 4),
        ("tied", "tp", 4),
        ("tower", "tp without sequences", 2),
        ("transformer", "tp without sequences", 4),
        ("transformer", "tp with its loss", 4),
    ],
)
def test_layers_are_cut_in_other_ways(world, network, layout, ranks):
    check(world, Case(network, layout), ranks, 1)


@pytest.mark.parametrize("network", ["tower", "transformer"])
def test_layers_are_cut_and_sharded(world, network):
    check(world, Case(network, "fsdp + tp"), 4, 2, methods=THREE)


@pytest.mark.parametrize("layout", ["fsdp + tp", "hsdp + tp", "replicated + tp"])
@pytest.mark.parametrize("network", ["uneven", "tied"])
def test_layers_are_cut_and_sharded_in_other_ways(world, network, layout):
    check(world, Case(network, layout), 4, 2)


@pytest.mark.parametrize(
    ("network", "layout", "method"),
    [
        ("tower", "tp", "exact"),
        ("transformer", "tp", "drawn"),
        ("transformer", "tp with its loss", "drawn"),
        ("tower", "fsdp + tp", "exact"),
    ],
)
def test_fishers_that_observe_the_output(world, network, layout, method):
    """Ranks of one layer draw the same, and here what one process draws."""
    ranks, replicas = (4, 2) if layout == "fsdp + tp" else (2, 1)
    check(world, Case(network, layout, method), ranks, replicas, {"mem": natgrad.MemOpt()})


# Data parallelism.


@pytest.mark.parametrize(
    ("network", "method"),
    [("mlp", "eigen"), ("cnn", "ekfac"), ("lm", "eigen"), ("lm", "cholesky"), ("lm", "ekfac")],
)
def test_shards_have_replicas(world, network, method):
    run = training.Run(network, "hsdp", training.METHODS[method])
    expected = training.alone(run, 4)
    for results in world.run(train_data_parallel, run, PLACEMENTS, ranks=4):
        for placement, result in results.items():
            assert_same(result["weights"], expected, placement)


@pytest.mark.parametrize("layout", ["replicated", "one batch"])
def test_parameters_are_replicated_by_tensors(world, layout):
    check(world, Case("tower", layout), 2, 2 if layout == "replicated" else 1)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"shard_placement_fn": by_columns},
    ],
)
@pytest.mark.parametrize("network", ["tower", "uneven"])
def test_options_of_fsdp(world, network, options):
    check(world, Case(network, "fsdp", options=options), 4, 4, ENDS)


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
)
def test_options_of_ddp(world, options):
    check(world, Case("tower", "ddp", options=options), 2, 2)


@pytest.mark.parametrize(
    "users",
    [(8, 0, 0, 8, 8), (8, 0, 0, 8, 4), (4, 8, 4, 8, 2)],
    ids=["by none", "by none or some", "by some"],
)
@pytest.mark.parametrize("views", [True, False])
def test_a_layer_is_used_by_some_ranks_only(world, users, views):
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    check(world, Case("branches", "ddp", options=options, users=users), 2, 2)


def test_a_sharded_layer_is_not_used_by_any_rank(world):
    check(world, Case("branches", "fsdp", users=(8, 0, 0, 8, 8)), 2, 2)


@pytest.mark.parametrize(
    "layout", ["tp", "fsdp + tp", "fsdp", "hsdp", "ddp", "replicated", "one batch"]
)
def test_gradients_of_several_passes_are_accumulated(world, layout):
    check(world, Case("tower", layout, micro=2), 4, 4 // PEERS.get(layout, 1), ENDS)


def test_accumulation_into_views_of_buckets(world):
    options = {"gradient_as_bucket_view": True}
    check(world, Case("tower", "ddp", options=options, micro=2), 2, 2, ENDS)


@pytest.mark.parametrize("layout", ["tp", "fsdp + tp", "hsdp", "ddp", "one batch"])
def test_the_loss_is_a_sum(world, layout):
    replicas = 4 // PEERS.get(layout, 1)
    check(world, Case("tower", layout, reduction="sum", clip=None), 4, replicas, ENDS)


@pytest.mark.parametrize("layout", ["tp", "fsdp + tp", "fsdp", "replicated"])
def test_steps_that_are_not_clipped(world, layout):
    replicas = 4 // PEERS.get(layout, 1)
    check(world, Case("tower", layout, clip=None), 4, replicas, ENDS)


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16])
def test_parameters_in_half_precision(world, reduced):
    policy = MixedPrecisionPolicy(torch.bfloat16, reduced, output_dtype=torch.float32)
    case = Case("tower", "fsdp", options={"mp_policy": policy}, dtype=torch.float32)
    expected, before = alone(case, 2), weights(network("tower", torch.float32))
    for result in world.run(train, case, ranks=2):
        for name, found in result["weights"].items():
            assert torch.isfinite(found).all()
            moved = (expected[name] - before[name]).norm()
            assert (found - expected[name]).norm() <= 0.2 * moved, name
