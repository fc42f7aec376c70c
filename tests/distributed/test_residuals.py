"""Losses that differentiate the network, on two ranks: the weights of one process."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from natgrad import KFAC, Kronecker
from natgrad.curvature import GaussNewton


def residuals(model: nn.Module, x: Tensor, border: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    (du,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
    return second[:, 0] - du[:, 1] + 1.0, model(border)[:, 0]


def trained(ranks: int, rank: int, ddp: bool = False, empirical: bool = False) -> list[Tensor]:
    """Weights after four steps, each on this rank's part of the points."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model = DistributedDataParallel(net) if ddp else net
    optimizer = SGD(net.parameters(), lr=0.1)
    # The whole loss is one term a point where it is empirical, so points are as many inside.
    given = {"curvature": GaussNewton()}
    if empirical:
        given = {"structure": Kronecker(sharing="traces")}
    kfac = KFAC(model, optimizer, update_every=2, refresh_every=2, **given)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x, border = (torch.rand(n, 2, generator=generator).double() for n in (8, 4))
        mine = [t.chunk(ranks)[rank] for t in (x, border)]
        optimizer.zero_grad()
        first, second = residuals(model, *mine)
        if empirical:
            first.square().mean().backward()
        else:
            kfac.residuals(first, second, weights=(1.0, 3.0)).backward()
        kfac.step()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def ways() -> list[list[Tensor]]:
    rank = dist.get_rank()
    found = [trained(2, rank), trained(2, rank, ddp=True)]
    return [*found, trained(2, rank, empirical=True)]


def test_the_weights_of_one_process(world):
    alone = trained(1, 0)
    expected = [alone, alone, trained(1, 0, empirical=True)]
    for found in world.run(ways, ranks=2):
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
