"""K-FAC for a model that is cut twice: every layer over two ranks, and its halves by FSDP2.

torchrun --nproc-per-node=4 examples/tensor_parallel.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import natgrad
from ranks import PLACEMENTS, Digits, arguments, finish, say, start

CUT = 2  # ranks that share a layer


class Block(nn.Module):
    """The feed-forward half of a transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    args = arguments(__doc__.splitlines()[0], placement="hybrid").parse_args()
    _, ranks = start(needed=2 * CUT)
    digits = Digits()
    mesh = init_device_mesh("cpu", (ranks // CUT, CUT), mesh_dim_names=("data", "tensor"))

    model = Network()
    for block in model.blocks:
        # Rows of one layer and columns of the next: no communication between the two.
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    distributed = natgrad.Distributed(PLACEMENTS[args.placement])
    kfac = natgrad.KFAC(model, optimizer, damping=0.1, distributed=distributed)

    replica, replicas = mesh.get_local_rank("data"), mesh.size(0)
    for step in range(args.steps):
        optimizer.zero_grad()
        images, labels = digits.batch(step, replica, replicas)  # ranks of a layer see the same
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        kfac.step()
        optimizer.step()
        if step % 10 == 0:
            say(f"step {step}: loss {loss.item():.4f} on rank 0")

    say(kfac.plan, kfac.traffic(), digits.test_line(model.eval(), args.steps))
    finish()


if __name__ == "__main__":
    main()
