"""What of a spread model is where, and what cannot be spread."""

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import natgrad
from distributed.layouts import PLACEMENTS, Case, assert_same, inside
from distributed.parallel import EACH, TOKENS, cut, network, quiet, shard
from distributed.training import weights
from kfac_keywords import grouped
from natgrad.comm.layouts import box_of, last_backward, local
from natgrad.errors import SettingError

# Ranks that see the same samples.
PEERS = {"tp": 4, "one batch": 4, "fsdp + tp": 2, "hsdp + tp": 2, "replicated + tp": 2}


# What is where.


@pytest.fixture(scope="module")
def placed(world):
    """What is inside of a network on four ranks, under each of all placements."""

    @lru_cache(maxsize=8)
    def placed(network, layout, placements=tuple(PLACEMENTS)):
        calls = {name: (Case(network, layout, placement=PLACEMENTS[name]),) for name in placements}
        return world.each(inside, calls, ranks=4)

    return placed


@pytest.mark.parametrize("layout", ["tp", "fsdp", "hsdp", "fsdp + tp"])
def test_factors_and_inverses_are_where_the_plan_says_and_all_count_the_same(placed, layout):
    for placement, results in placed("tower", layout).items():
        for found in results:
            assert found["factors"] == found["planned factors"], placement
            assert found["parts"] == found["planned parts"], placement
        assert_counted(results, layout)


@pytest.mark.parametrize("layout", ["hsdp + tp", "one batch"])
def test_ranks_of_one_layer_count_the_same_samples(placed, layout):
    assert_counted(placed("tower", layout, ("half",))["half"], layout)


def assert_counted(results, layout):
    for found in results:
        ((samples, even, counts),) = found["totals"]
        assert even
        assert samples == 4 * EACH
        assert counts["first", "A"] == 4 * EACH * TOKENS
    peers = PEERS.get(layout, 1)
    assert [found["draws as"] for found in results] == [rank // peers * peers for rank in range(4)]


def test_gradients_are_put_together_only_where_they_are_preconditioned(placed):
    for placement, shares in {"mem": 4, "half": 8, "comm": 16}.items():
        results = placed("chain", "fsdp")[placement]
        assert sum(len(found["mine"]) for found in results) == shares
        for found in results:
            assert found["assembled"] == [found["mine"]] * 2, placement
            for name, shapes in found["blocks"].items():
                expected = shapes if name in found["mine"] else set()
                assert found["shapes"] & shapes == expected, (placement, name)


def test_gradients_that_every_rank_has_are_not_copied(placed):
    for placement, results in placed("chain", "replicated", ("mem", "comm")).items():
        for found in results:
            assert found["assembled"] == [set()] * 2, placement


def answers():
    """Whether a backward pass counts as the last one before a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = shard(network("tower"), mesh)
    last = last_backward(model)
    found = [last()]
    for switch in (model.set_requires_gradient_sync, model.set_requires_all_reduce):
        switch(False)
        found.append(last())
        switch(True)
    return [*found, last()]


def test_a_pass_without_any_sum_is_not_the_last(world):
    assert world.run(answers, ranks=4) == [[True, False, False, True]] * 4


def boxes(size):
    """Whether each rank's part of a layer is where its box says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = nn.Linear(3, size, bias=False)
    full = layer.weight.detach().clone()
    dist.broadcast(full, 0)
    parallelize_module(layer, mesh["tensor"], ColwiseParallel())
    shard(layer, mesh["data"])
    box = box_of(layer.weight)
    return torch.equal(full[*(slice(*ends) for ends in box)], local(layer.weight.detach()))


def test_boxes_of_a_parameter_that_is_cut_twice(world):
    sizes = [1, 3, 5, 7, 8, 13]
    found = world.each(boxes, {size: (size,) for size in sizes}, ranks=4)
    assert found == {size: [True] * 4 for size in sizes}


def wide(layout):
    """Large enough for what is only done on one process, if its parameters are plain."""
    quiet()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(512, 300), nn.Tanh(), nn.Linear(300, 5)).double()
    if layout == "tp":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif layout == "fsdp":
        shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = natgrad.KFAC(model, optimizer, inverse=natgrad.Cholesky())
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        x = torch.randn(8, 512, dtype=torch.float64)
        F.cross_entropy(model(x), torch.randint(5, (8,))).backward()
        kfac.step()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_one_rank_may_use_the_same_program(world, layout):
    (expected,), (found,) = (world.run(wide, name, ranks=1) for name in ("plain", layout))
    assert_same(found, expected)


# What cannot work.


def flat(original):
    model = network("tower")
    options = {"device_id": torch.device("cpu"), "use_orig_params": original}
    model.third = FullyShardedDataParallel(model.third, **options)
    return refused(model)


def cut_under_ddp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = cut(network("tower"), "tower", mesh["tensor"])
    return refused(nn.parallel.DistributedDataParallel(model, device_mesh=mesh["data"]))


def averaged_by_others(everyone):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[dist.get_rank() // 2]
    model = nn.parallel.DistributedDataParallel(
        network("tower"), process_group=None if everyone else half
    )
    return refused(model, group=half if everyone else None)


def spread_over_others():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = cut(network("tower"), "tower", mesh["tensor"])
    return refused(shard(model, mesh["data"]), group=mesh["data"])


def half_a_layer():
    model = network("tower")
    model.third.weight = nn.Parameter(model.third.weight.detach().chunk(2)[dist.get_rank()])
    return refused(model)


def interleaved():
    mesh = init_device_mesh("cpu", (2, 2))
    model = network("tower")
    cuts = [Shard(0), _StridedShard(0, split_factor=2)]
    model.third.weight = nn.Parameter(distribute_tensor(model.third.weight.detach(), mesh, cuts))
    return refused(model)


def refused(model, **settings):
    """Every rank says it of its own processes, in whatever order."""
    with pytest.raises(SettingError) as error:
        natgrad.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **grouped(**settings))
    return str(error.value)


@pytest.mark.parametrize(
    ("function", "args", "ranks", "message"),
    [
        (
            flat,
            (original,),
            2,
            "The model is a FullyShardedDataParallel, or has one inside, which makes one flat "
            "parameter of many layers: use torch.distributed.fsdp.fully_shard instead.",
        )
        for original in (True, False)
    ]
    + [
        (
            cut_under_ddp,
            (),
            4,
            "Parameter 'module.first.weight' is a part of a layer and does not tell which, as DDP "
            "has made it, by device_mesh: use fully_shard, on a mesh of (replicas, 1) to shard "
            "nothing.",
        ),
        (
            averaged_by_others,
            (False,),
            4,
            "DDP averages the gradients of processes [0, 1] but KFAC's group has [0, 1, 2, 3]: "
            "pass Distributed(group=model.process_group) to KFAC.",
        ),
        (
            averaged_by_others,
            (True,),
            4,
            "DDP averages the gradients of processes [0, 1, 2, 3] but KFAC's group has [0, 1]: "
            "pass Distributed(group=model.process_group) to KFAC.",
        ),
        (
            spread_over_others,
            (),
            4,
            "Parameter 'first.weight' is spread over processes [0, 1, 2, 3] but KFAC's group has "
            "[0, 2]: pass a group that has all of them, or None.",
        ),
        (
            half_a_layer,
            (),
            2,
            "Linear 'third' is cut in a way that its parameters do not tell: of its 40 numbers the "
            "ranks hold 24. Cut it with parallelize_module and fully_shard alone, or leave it out "
            "with exclude=[...].",
        ),
        (
            interleaved,
            (),
            4,
            "Linear 'third' is cut in a way that its parameters do not tell: of its 40 numbers the "
            "ranks hold 40, some twice. Cut it with parallelize_module and fully_shard alone, or "
            "leave it out with exclude=[...].",
        ),
    ],
)
def test_what_cannot_work_is_refused(world, function, args, ranks, message):
    assert world.run(function, *args, ranks=ranks)[0] == message
