"""Experts in one parameter: the weights of one process on any ranks, whichever rows each rank has,
and what one rank does not understand is dropped by all."""

import copy
import io
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import expert_modules as em
import natgrad
from distributed import layouts
from distributed.layouts import assert_same
from distributed.training import weights
from natgrad import KFAC, Distributed
from natgrad.layers import Expert, Experts

PLACEMENTS = {
    "mem": natgrad.MemOpt(),
    "half": natgrad.Hybrid(0.5),
    "scatter": natgrad.ReduceScatter(),
}
WAYS = ("linear", "gathered_bmm_from_the_right", "index_select")
STEPS, SAMPLES = 6, 8


def data(step):
    """The first expert has rows of the first samples alone, which are one rank's; the last expert
    none at all until the last update."""
    x, t = em.batch(SAMPLES, step)
    x[SAMPLES // 2 :, :, 0] = -60.0
    if step < 4:
        x[:, :, em.EXPERTS - 1] = -70.0
    return x, t


def make(model, name, **more):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    split = {"experts.w": Experts(inputs_first=em.WAYS[name][2])}
    more = {"update_every": 2, "refresh_every": 4, "split": split, "damping": 0.05, **more}
    return KFAC(model, optimizer, **more), optimizer


def go_on(model, kfac, optimizer, steps, rank=0, ranks=1, micro=1):
    for step in steps:
        x, t = data(step)
        own = SAMPLES // ranks
        x, t = x[rank * own : (rank + 1) * own], t[rank * own : (rank + 1) * own]
        optimizer.zero_grad()
        for some in torch.arange(own).chunk(micro):
            (F.cross_entropy(model(x[some]), t[some]) / micro).backward()
        kfac.step()
        optimizer.step()


@lru_cache
def alone(name):
    model = em.Net(name)
    kfac, optimizer = make(model, name)
    go_on(model, kfac, optimizer, range(STEPS))
    ready = {b.layers[0].index for b in kfac.blocks if isinstance(b.layers[0], Expert) and b.ready}
    return weights(model), ready


def wrapped(model, layout):
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if layout == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train_all(layout):
    layouts.quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in WAYS:
        for key, placement in PLACEMENTS.items():
            model = wrapped(em.Net(name), layout)
            # Buckets of a block or two, which leave at other times on ranks with other rows.
            distributed = Distributed(placement, bucket_bytes=300)
            kfac, optimizer = make(model, name, distributed=distributed)
            micro = 2 if key == "half" and layout != "ddp" else 1
            go_on(model, kfac, optimizer, range(STEPS), rank, ranks, micro)
            found[name, key] = weights(model)
    return found


def resumed():
    layouts.quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = em.Net("linear")
    kfac, optimizer = make(model, "linear", distributed=Distributed(PLACEMENTS["mem"]))
    go_on(model, kfac, optimizer, range(3), rank, ranks)
    file = io.BytesIO()
    torch.save(copy.deepcopy([one.state_dict() for one in (model, kfac, optimizer)]), file)
    file.seek(0)
    other = em.Net("linear")
    second = make(other, "linear", distributed=Distributed(PLACEMENTS["half"]))
    for one, state in zip((other, *second), torch.load(file, weights_only=False), strict=True):
        one.load_state_dict(state)
    go_on(other, *second, range(3, STEPS), rank, ranks)
    return weights(other)


class OnOneRank(em.Net):
    """The second rank makes something of its weights first."""

    def __init__(self):
        super().__init__()
        run = self.experts.run
        if dist.get_rank():
            self.experts.run = lambda h, w, b, c: run(h, w * 2, b, c)


def dropped():
    model = OnOneRank()
    kfac, _ = make(model, "linear", kl_clip=None)
    x, t = em.batch(seed=dist.get_rank())
    F.cross_entropy(model(x), t).backward()
    before = model.experts.w.grad.clone()
    dist.all_reduce(before)
    kfac.step()
    own = [block for block in kfac.blocks if isinstance(block.layers[0], Expert)]
    error = (model.experts.w.grad - before / 2).abs().max().item()
    return error, any(block.ready for block in own), {int(block.dropped) for block in own}


@pytest.mark.parametrize(("ranks", "layout"), [(2, "plain"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")])
def test_weights_are_those_of_one_process(world, ranks, layout):
    for name in WAYS:
        assert alone(name)[1] == {0, 1, 3}  # the idle one waits
    for found in world.run(train_all, layout, ranks=ranks):
        for (name, placement), own in found.items():
            assert_same(own, alone(name)[0], f"{name}, {layout}, {placement}")


def test_it_goes_on_from_a_checkpoint_with_another_placement(world):
    for own in world.run(resumed, ranks=2):
        assert_same(own, alone("linear")[0], "resumed")


def test_what_one_rank_does_not_understand_all_drop(world):
    for error, ready, counts in world.run(dropped, ranks=2):
        assert error < 1e-14
        assert not ready
        assert counts == {1}


def sharded():
    """Each rank has two of the experts, and gathers them to multiply by."""
    layouts.quiet()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = em.Net("einsum_over_experts")
    for name, p in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        how = [Shard(0)] if name == "experts.w" else [Replicate()]
        setattr(
            owner, name.rpartition(".")[2], nn.Parameter(distribute_tensor(p.detach(), mesh, how))
        )
    run = model.experts.run
    model.experts.run = lambda h, w, b, c: run(h, w.full_tensor(), b, c)
    for layer in (model.first, model.head):
        layer.forward = lambda x, m=layer: F.linear(x, m.weight.full_tensor(), m.bias.full_tensor())
    kfac, _ = make(model, "linear", kl_clip=None)
    x, t = em.batch()
    F.cross_entropy(model(x), t).backward()
    kfac.step()
    return kfac.coverage().uncovered["experts.w"]


def test_experts_in_shards_say_so(world):
    for why in world.run(sharded, ranks=2):
        assert why == "in forward it is in shards, as of tensor or expert parallelism"
