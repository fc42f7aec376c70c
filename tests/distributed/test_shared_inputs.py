"""Layers on one input share its second moment, even if it has left for other ranks already."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad import KFAC, Distributed

RANKS, EACH = 2, 4


class Attention(nn.Module):
    """Query, key and value are three layers on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x).tanh() + self.value(x)


def averages(model: nn.Module, x: Tensor, y: Tensor, bucket: int) -> dict[str, Tensor]:
    """The running averages that are kept here, after one step."""
    kfac = KFAC(model, kl_clip=None, distributed=Distributed(bucket_bytes=bucket))
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    return {
        f"{block.name}.{name}": running.mean.clone()
        for block in kfac.blocks
        for name, running in block.running.items()
    }


def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Attention().double()
    return model, torch.randn(RANKS * EACH, 6).double(), torch.randint(5, (RANKS * EACH,))


def on_ranks(bucket: int) -> dict[str, Tensor]:
    model, x, y = data()
    rank = dist.get_rank()
    mine = slice(rank * EACH, (rank + 1) * EACH)
    return averages(nn.parallel.DistributedDataParallel(model), x[mine], y[mine], bucket)


@pytest.mark.parametrize("bucket", [1, 300, 1 << 20], ids=["one factor", "some", "all at once"])
def test_factors_are_those_of_one_process(world, bucket):
    """With one factor a bucket, key's sums leave before those of value are made from them."""
    expected = averages(*data(), bucket)
    found: dict[str, Tensor] = {}
    for kept in world.run(on_ranks, bucket, ranks=RANKS):
        found |= kept
    assert found.keys() == expected.keys()
    for name, factor in expected.items():
        torch.testing.assert_close(found[name], factor, rtol=1e-12, atol=1e-14)
