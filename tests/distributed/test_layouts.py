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
)
from distributed.parallel import by_columns, network
from distributed.training import weights

CUT = ("tower", "transformer")
ENDS = {"mem": natgrad.MemOpt(), "comm": natgrad.CommOpt()}
TWO_WAYS = ("fsdp + tp", "hsdp")  # each of which takes two ranks


@lru_cache(maxsize=64)
def reference(network, method, replicas, reduction, clip, users):
    case = Case(network, method=method, reduction=reduction, clip=clip, users=users)
    return alone(case, replicas)


def each(case, placements=ENDS):
    """The case with each of ``placements``."""
    return {(case.method, name): replace(case, placement=one) for name, one in placements.items()}


def together(cases, placements=ENDS):
    """Several cases with each of ``placements``, for ranks that they share."""
    found = {}
    for number, case in enumerate(cases):
        for key, one in each(case, placements).items():
            found[number, *key] = one
    return found


def sizes(layout):
    """The fewest ranks of a layout, and how many parts of a batch they see."""
    ranks = 4 if layout in TWO_WAYS else 2
    return ranks, {"tp": 1, "one batch": 1, "fsdp + tp": 2}.get(layout, ranks)


def check(world, cases, ranks, replicas):
    """Weights, bytes that are kept, and bytes that a step without an update sends. Cases share
    their ranks, which learn how to spread each operation once."""
    for found in world.run(train_all, cases, ranks=ranks):
        for name, case in cases.items():
            settings = (case.reduction, case.clip, case.users)
            expected = reference(case.network, case.method, replicas, *settings)
            result = found[name]
            assert_same(result["weights"], expected, name)
            assert result["kept"] == (result["memory"].factors, result["memory"].inverses), name
            if not case.users:
                assert result["sent"][1].get("gradients", 0) == result["planned"].gradients, name


# Tensor parallelism.


# The worlds in which layers are cut: their layout, ranks, and how many parts of a batch they see.
CUT_WORLDS = [("tp", 2, 1), ("tp", 4, 1), ("fsdp + tp", 4, 2)]


@pytest.mark.parametrize("network", CUT)
@pytest.mark.parametrize("cut", CUT_WORLDS, ids=["tp-2", "tp-4", "fsdp + tp-4"])
def test_layers_are_cut(world, in_pairs, cut, network):
    """Each two of a world, a network, a method and a placement."""
    layout, ranks, replicas = cut
    cases = {
        (method, name): Case(network, layout, method, PLACEMENTS[name])
        for where, which, method, name in in_pairs(CUT_WORLDS, CUT, training.METHODS, PLACEMENTS)
        if (where, which) == (cut, network)
    }
    check(world, cases, ranks, replicas)


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
    check(world, each(Case(network, layout)), ranks, 1)


CUT_AND_SHARDED = ("fsdp + tp", "hsdp + tp", "replicated + tp")


@pytest.mark.parametrize("layout", CUT_AND_SHARDED)
@pytest.mark.parametrize("network", ["uneven", "tied"])
def test_layers_are_cut_and_sharded_in_other_ways(world, in_pairs, network, layout):
    """Each two of a network, a layout and a placement."""
    cases = in_pairs(("uneven", "tied"), CUT_AND_SHARDED, ENDS)
    chosen = {name: ENDS[name] for *where, name in cases if where == [network, layout]}
    check(world, each(Case(network, layout), chosen), 4, 2)


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
    case = Case(network, layout, method)
    check(world, each(case, {"mem": natgrad.MemOpt()}), ranks, replicas)


# Data parallelism.


def train_data_parallel(runs):
    return {name: training.train(run)["weights"] for name, run in runs.items()}


@pytest.mark.parametrize(
    ("network", "methods", "placements"),
    [
        ("mlp", ["eigen"], PLACEMENTS),
        ("cnn", ["ekfac"], ENDS),
        ("lm", ["eigen", "cholesky", "ekfac"], ENDS),
    ],
)
def test_shards_have_replicas(world, network, methods, placements):
    runs = {
        (method, name): training.Run(
            network, "hsdp", {**training.METHODS[method], "placement": placement}
        )
        for method in methods
        for name, placement in placements.items()
    }
    expected = {
        method: training.alone(training.Run(network, kfac=training.METHODS[method]), 4)
        for method in methods
    }
    for found in world.run(train_data_parallel, runs, ranks=4):
        for name, result in found.items():
            assert_same(result, expected[name[0]], name)


@pytest.mark.parametrize("layout", ["replicated", "one batch"])
def test_parameters_are_replicated_by_tensors(world, layout):
    cases = each(Case("tower", layout), PLACEMENTS)
    check(world, cases, 2, 2 if layout == "replicated" else 1)


BY_COLUMNS = {"shard_placement_fn": by_columns}
FSDP_OPTIONS = {
    2: [
        ("tower", {"reshard_after_forward": True}),
        ("uneven", {"reshard_after_forward": False}),
    ],
    4: [("uneven", {"reshard_after_forward": 2}), ("tower", BY_COLUMNS), ("uneven", BY_COLUMNS)],
}


@pytest.mark.parametrize("ranks", FSDP_OPTIONS)
def test_options_of_fsdp(world, ranks):
    chosen = [Case(name, "fsdp", options=options) for name, options in FSDP_OPTIONS[ranks]]
    check(world, together(chosen), ranks, ranks)


def test_options_of_ddp(world):
    options = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
    chosen = [Case("tower", "ddp", options={name: True}) for name in options]
    check(world, together(chosen, PLACEMENTS), 2, 2)


@pytest.mark.parametrize(
    "users",
    [(8, 0, 0, 8, 8), (8, 0, 0, 8, 4), (4, 8, 4, 8, 2)],
    ids=["by none", "by none or some", "by some"],
)
def test_a_layer_is_used_by_some_ranks_only(world, users):
    both = [{"find_unused_parameters": True, "gradient_as_bucket_view": v} for v in (True, False)]
    chosen = [Case("branches", "ddp", options=options, users=users) for options in both]
    check(world, together(chosen, PLACEMENTS), 2, 2)


def test_a_sharded_layer_is_not_used_by_any_rank(world):
    check(world, each(Case("branches", "fsdp", users=(8, 0, 0, 8, 8)), PLACEMENTS), 2, 2)


# How a step sees its samples, and in which layouts.
VARIANTS = {
    "several passes are accumulated": (
        {"micro": 2},
        ["tp", "fsdp + tp", "fsdp", "hsdp", "ddp", "replicated", "one batch"],
    ),
    "the loss is a sum": (
        {"reduction": "sum", "clip": None},
        ["tp", "fsdp + tp", "hsdp", "ddp", "one batch"],
    ),
    "steps are not clipped": ({"clip": None}, ["tp", "fsdp + tp", "fsdp", "replicated"]),
}


VARIED = ("tp", "fsdp + tp", "fsdp", "hsdp", "ddp", "replicated", "one batch")


@pytest.mark.parametrize("layout", VARIED)
def test_variants_of_a_step(world, in_pairs, layout):
    """Each two of a variant, a layout and a placement."""
    cases, left_out = {}, lambda how, where, _: where not in VARIANTS[how][1]
    for how, where, name in in_pairs(VARIANTS, VARIED, ENDS, unless=left_out):
        if where == layout:
            settings, _ = VARIANTS[how]
            cases[how, name] = Case("tower", layout, placement=ENDS[name], **settings)
    if layout == "ddp":  # accumulation into views of buckets
        options = {"gradient_as_bucket_view": True}
        cases |= together([Case("tower", layout, options=options, micro=2)])
    check(world, cases, *sizes(layout))


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16])
def test_parameters_in_half_precision(world, reduced):
    policy = MixedPrecisionPolicy(torch.bfloat16, reduced, output_dtype=torch.float32)
    case = Case("tower", "fsdp", options={"mp_policy": policy}, dtype=torch.float32, length=4)
    expected, before = alone(case, 2), weights(network("tower", torch.float32))
    for result in world.run(train, case, ranks=2):
        for name, found in result["weights"].items():
            assert torch.isfinite(found).all()
            moved = (expected[name] - before[name]).norm()
            assert (found - expected[name]).norm() <= 0.2 * moved, name
