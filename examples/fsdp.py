"""K-FAC under FSDP2: sharded parameters, and curvature that is sharded as well.

torchrun --nproc-per-node=2 examples/fsdp.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import natgrad
from natgrad.tables import Column, Table, bytes_text
from ranks import PLACEMENTS, Digits, arguments, finish, say, start


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.LayerNorm(256),
        nn.Linear(256, 10),
    )


def memory(kfac: natgrad.KFAC) -> Table:
    """What every rank keeps for K-FAC, beside what it would keep if each kept all inverses."""
    measured = kfac.comm.gather(kfac.memory().total)
    replicated = natgrad.CommOpt()(kfac.plan.blocks, kfac.plan.world)
    rows = tuple(
        (
            str(rank),
            bytes_text(total["factors"]),
            bytes_text(total["inverses"]),
            bytes_text(replicated.memory(rank).factors),
            bytes_text(replicated.memory(rank).inverses),
        )
        for rank, total in enumerate(measured)
    )
    names = ("rank", "factors", "inverses", "factors by CommOpt", "inverses by CommOpt")
    footer = f"kept by {kfac.plan.strategy}, and what CommOpt() would keep"
    return Table("Memory", tuple(Column(name, "right") for name in names), rows, footer)


def main() -> None:
    args = arguments(__doc__.splitlines()[0], placement="mem").parse_args()
    rank, ranks = start(needed=2)
    digits = Digits()

    model = network()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    distributed = natgrad.Distributed(PLACEMENTS[args.placement])
    kfac = natgrad.KFAC(model, optimizer, damping=0.1, distributed=distributed)

    for step in range(args.steps):
        optimizer.zero_grad()
        images, labels = digits.batch(step, rank, ranks)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        kfac.step()
        optimizer.step()
        if step % 10 == 0:
            say(f"step {step}: loss {loss.item():.4f} on rank 0")

    say(kfac.plan, kfac.traffic(), memory(kfac), digits.test_line(model.eval(), args.steps))
    finish()


if __name__ == "__main__":
    main()
