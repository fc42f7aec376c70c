"""K-FAC over MPI alone: a plain model, whose gradients K-FAC averages itself.

mpirun -n 2 python examples/mpi.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from ranks import PLACEMENTS, Digits, arguments


def main() -> None:
    args = arguments(__doc__.splitlines()[0], placement="auto").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits, world = Digits(), natgrad.comm.MPI()

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    distributed = natgrad.Distributed(PLACEMENTS[args.placement], group=world)
    kfac = natgrad.KFAC(model, optimizer, damping=0.1, distributed=distributed)
    for step in range(args.steps):
        optimizer.zero_grad()
        images, labels = digits.batch(step, world.rank, world.size)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        kfac.step()  # after it, all ranks have the same gradients
        optimizer.step()
        if step % 10 == 0 and world.rank == 0:
            print(f"step {step}: loss {loss.item():.4f} on rank 0", flush=True)

    if world.rank == 0:
        print(kfac.plan, kfac.traffic(), digits.test_line(model, args.steps), sep="\n\n")


if __name__ == "__main__":
    main()
