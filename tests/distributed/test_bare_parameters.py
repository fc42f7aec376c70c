"""Parameters in expressions: the same weights on two ranks as on one, and what one rank does not
understand is dropped by all."""

from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import bare_modules as bare
import natgrad
from distributed import layouts
from distributed.layouts import assert_same
from distributed.training import weights
from natgrad import KFAC, Distributed

PLACEMENTS = {"mem": natgrad.MemOpt(), "scatter": natgrad.ReduceScatter()}
KINDS = (bare.ClassToken, bare.Windows)


def net(kind):
    torch.manual_seed(0)
    return kind().double()


def train(model, rank=0, ranks=1, **more):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    kfac = KFAC(model, optimizer, damping=0.1, update_every=2, refresh_every=2, **more)
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(8, bare.TOKENS, bare.WIDTH, dtype=torch.float64)
        y = torch.randint(3, (8,))
        some = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), y[some]).backward()
        kfac.step()
        optimizer.step()
    return weights(model)


@lru_cache
def alone(kind):
    return train(net(kind))


def train_all():
    layouts.quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        (kind.__name__, ddp, key): train(
            nn.parallel.DistributedDataParallel(net(kind)) if ddp else net(kind),
            rank,
            ranks,
            distributed=Distributed(placement),
        )
        for kind in KINDS
        for ddp in (False, True)
        for key, placement in PLACEMENTS.items()
    }


class OnOneRank(bare.Shifted):
    """Positions that the second rank looks up for every sample apart."""

    def inside(self, x):
        if dist.get_rank():
            which = torch.arange(bare.TOKENS).repeat(len(x), 1)
            return x + self.p[0][which]
        return super().inside(x)


def dropped():
    model = net(OnOneRank)
    train(model, dist.get_rank(), 2)
    (p,) = (p for name, p in model.named_parameters() if name == "p")
    kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, bare.TOKENS, bare.WIDTH, dtype=torch.float64)
    F.cross_entropy(model(x), torch.arange(4) % 3).backward()
    before = p.grad.clone()
    dist.all_reduce(before)
    kfac.step()
    (block,) = (block for block in kfac.blocks if block.name == "p")
    return (p.grad - before / 2).abs().max().item(), block.ready, int(block.dropped), p.grad


def test_weights_are_those_of_one_process(world):
    for found in world.run(train_all, ranks=2):
        for (kind, ddp, placement), own in found.items():
            expected = alone(next(k for k in KINDS if k.__name__ == kind))
            assert_same(own, expected, f"{kind}, {'ddp' if ddp else 'plain'}, {placement}")


def test_what_one_rank_does_not_understand_all_drop(world):
    (one, two) = world.run(dropped, ranks=2)
    for error, ready, count, _ in (one, two):
        assert error < 1e-15
        assert not ready
        assert count == 1
    assert torch.equal(one[-1], two[-1])
