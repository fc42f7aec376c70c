"""ResNet-32 on CIFAR-10 as in Pauloski 2022, alone or under torchrun: half of SGD's epochs.

python examples/cifar_resnet.py
torchrun --nproc-per-node=4 examples/cifar_resnet.py

The learning rate is that of one process times their number, as is the batch. Ctrl-C and --resume: a
run goes on from its last epoch, or from where --steps ended it.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from application import Progress, accuracy, load, save, told
from natgrad.comm import Communicator
from natgrad.comm.torchrun import joined
from natgrad.lab import schemes
from natgrad.lab.data import cifar10, loader
from natgrad.lab.models import small_resnet


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sgd", action="store_true", help="without K-FAC")
    parser.add_argument("--depth", type=int, default=32, help="6n + 2 layers (default 32)")
    parser.add_argument("--epochs", type=int, help="default 100, or 200 with --sgd")
    parser.add_argument("--batch", type=int, default=128, help="of a process (default 128)")
    parser.add_argument("--lr", type=float, default=0.1, help="of a process (default 0.1)")
    parser.add_argument("--data", type=Path, help="folder of the binary files")
    parser.add_argument("--samples", type=int, default=50_000, help="to learn from (default all)")
    parser.add_argument("--judged", type=int, default=10_000, help="to judge by (default all)")
    parser.add_argument("--workers", type=int, default=0, help="processes that read ahead")
    parser.add_argument("--out", type=Path, default=Path("cifar"), help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from it")
    parser.add_argument("--steps", type=int, help="end earlier, after so many in all")
    return parser.parse_args(given)


def rate(lr: float, epochs: int, per_epoch: int, *, sgd: bool) -> Callable[[int], float]:
    """Ten times lower at 35, 75 and 90 of 100 epochs, or 100 and 150 of 200 with SGD; five epochs
    of warm-up. All of it shrinks with the number of epochs."""
    parts = (0.5, 0.75) if sgd else (0.35, 0.75, 0.9)
    at = schemes.steps_of((part * epochs for part in parts), per_epoch)
    warm = max(1, round(min(5, epochs / 20) * per_epoch))
    return schemes.LinearWarmup(schemes.StepDecay(lr, 0.1, sorted(set(at))), warm, 0.5 / warm)


def train(args: argparse.Namespace, comm: Communicator, device: torch.device) -> nn.Module:
    images, unseen = cifar10(args.data)
    place = {"rank": comm.rank, "ranks": comm.size, "device": device, "workers": args.workers}
    learnt = images.augmented().part(range(min(args.samples, len(images))))
    judged = unseen.part(range(min(args.judged, len(unseen))))
    batches = loader(learnt, args.batch, drop_last=True, **place)
    tests = loader(judged, 500, shuffle=False, **place)
    epochs = args.epochs or (200 if args.sgd else 100)
    lr = rate(args.lr * comm.size, epochs, len(batches), sgd=args.sgd)

    torch.manual_seed(0)  # the same initial weights on all ranks
    net = small_resnet(args.depth).to(device)
    model = DistributedDataParallel(net) if comm.size > 1 else net
    groups = schemes.parameter_groups(net, weight_decay=5e-4)
    optimizer = torch.optim.SGD(groups, lr=lr(0), momentum=0.9)
    published = {"damping": 3e-3, "update_every": 1, "refresh_every": 10}
    kfac = None if args.sgd else natgrad.KFAC(model, optimizer, **published)

    start, steps = 0, min(epochs * len(batches), args.steps or epochs * len(batches))
    if found := load(args.out, comm, resume=args.resume):
        state, _ = found
        start = state["step"]
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        if kfac is not None:
            kfac.load_state_dict(state["kfac"])

    progress = Progress(start, steps, comm.rank)
    stream = chain.from_iterable(repeat(batches))  # an epoch after the other
    for step in range(start, steps):
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        x, y = next(stream)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        progress.step(loss)
        if batches.position == 0 or step + 1 == steps:  # the epoch is over
            right = accuracy(model, tests, comm)
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "batches": batches.state_dict(),
                "kfac": None if kfac is None else kfac.state_dict(),
            }
            save(args.out, comm, step + 1, state)
            progress.tested(f"test accuracy {right:.2%} after {batches.epoch} of {epochs} epochs")
    progress.end(kfac)
    return net


def main(given: Sequence[str] | None = None) -> nn.Module:
    args = options(given)
    with joined() as (comm, device):
        return train(args, comm, device)


if __name__ == "__main__":
    told(main)
