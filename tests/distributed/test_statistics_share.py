"""Curvature from a share of the batch: the samples that one process would have taken."""

from functools import lru_cache

import pytest
import torch.distributed as dist
import torch.nn.functional as F

import natgrad
from distributed import layouts
from distributed.layouts import assert_same
from distributed.training import batch, network, weights, wrapped
from natgrad import Distributed, NaturalMuon

SHARES = {"share": 0.25, "uneven": 0.4, "number": 3}
PLACEMENTS = {"mem": natgrad.MemOpt(), "comm": natgrad.CommOpt(), "auto": natgrad.Auto()}


def train(model, share, name, rank=0, ranks=1, **more):
    """Four samples a rank, dealt out as a ``DistributedSampler`` does."""
    optimizer = NaturalMuon(
        model, 0.02, statistics=SHARES[share], update_every=1, refresh_every=2, **more
    )
    for step in range(4):
        optimizer.zero_grad()
        x, y = (t[rank::ranks] for t in batch(name, step, 12))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


@lru_cache(maxsize=8)
def alone(name, share):
    return train(network(name), share, name)


def train_all(name, layout):
    layouts.quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        (share, key): train(
            wrapped(network(name), layout),
            share,
            name,
            rank,
            ranks,
            distributed=Distributed(placement),
        )
        for share in SHARES
        for key, placement in PLACEMENTS.items()
    }


@pytest.mark.parametrize(
    ("ranks", "name", "layout"), [(2, "lm", "ddp"), (3, "cnn", "plain"), (2, "mlp", "fsdp")]
)
def test_the_samples_are_those_of_one_process(world, ranks, name, layout):
    for found in world.run(train_all, name, layout, ranks=ranks):
        for (share, placement), own in found.items():
            assert_same(own, alone(name, share), f"{share}, {placement}")


def train_cut(layout):
    layouts.METHODS["some"] = {"statistics": natgrad.curvature.Subsample(0.5, seed=2)}
    cases = {"mem": layouts.Case("transformer", layout, "some", natgrad.MemOpt())}
    return {key: found["weights"] for key, found in layouts.train_all(cases).items()}


def test_ranks_that_share_a_layer_take_the_same_samples(world):
    layouts.METHODS["some"] = {"statistics": natgrad.curvature.Subsample(0.5, seed=2)}
    expected = layouts.alone(layouts.Case("transformer", "tp", "some"), 1)
    for found in world.run(train_cut, "tp", ranks=2):
        assert_same(found["mem"], expected)
