"""Several matrices in one parameter: the same weights on any ranks, wherever shards cut it."""

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import natgrad
from distributed import layouts
from distributed.layouts import assert_same
from distributed.training import weights
from natgrad import Distributed, NaturalMuon
from natgrad import layers as natgrad_layers
from natgrad.layers import Interleaved

PLACEMENTS = {"mem": natgrad.MemOpt(), "comm": natgrad.CommOpt(), "auto": natgrad.Auto()}
SPLIT = {
    "qkv": Interleaved((4, 2, 1), heads=3),
    "gated": Interleaved(2),
    "experts.gate_up_proj": natgrad_layers.Experts(Interleaved(2), inputs_first=True),
}


class Experts(nn.Module):
    """Every token by all of five experts, of which no rank has as many as another."""

    def __init__(self):
        super().__init__()
        self.is_transposed, self.is_concatenated = True, False
        self.gate_up_proj = nn.Parameter(torch.randn(5, 4, 6) / 2)
        self.down_proj = nn.Parameter(torch.randn(5, 3, 4) / 2)

    def forward(self, x):
        both = torch.einsum("ni,eio->neo", x, self.gate_up_proj)
        return torch.einsum("neo,eoi->ni", both[..., ::2].tanh() * both[..., 1::2], self.down_proj)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gated = nn.Linear(5, 21), nn.Linear(21, 8)
        self.experts, self.head = Experts(), nn.Linear(4, 3)

    def forward(self, x):
        gate, up = self.gated(self.qkv(x).tanh()).unflatten(-1, (4, 2)).unbind(-1)
        return self.head(self.experts(gate.sigmoid() * up))


def net():
    torch.manual_seed(0)
    return Net().double()


def train(model, rank=0, ranks=1, **more):
    # The experts' last projection is found by itself.
    optimizer = NaturalMuon(model, 0.02, split=SPLIT, update_every=2, refresh_every=2, **more)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 5, dtype=torch.float64, generator=generator)
        y = torch.randint(3, (12,), generator=generator)
        each = 12 // ranks
        some = slice(rank * each, (rank + 1) * each)
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    return weights(model)


@lru_cache
def alone():
    return train(net())


def wrapped(layout):
    model = net()
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train_all(layout):
    layouts.quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        key: train(wrapped(layout), rank, ranks, distributed=Distributed(placement))
        for key, placement in PLACEMENTS.items()
    }


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, "plain"), (2, "ddp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp")]
)
def test_weights_are_those_of_one_process(world, ranks, layout):
    """21 rows in turns of 7 are cut inside of a turn by 2 and by 4 ranks."""
    for found in world.run(train_all, layout, ranks=ranks):
        for placement, own in found.items():
            assert_same(own, alone(), f"{layout}, {placement}")
