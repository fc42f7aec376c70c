"""ResNet-50 on a folder of images by large batches: K-FAC by the recipe of Osawa 2019.

python examples/imagenet_folder.py FOLDER --row 4096
torchrun --nproc-per-node=8 examples/imagenet_folder.py FOLDER --row 32768

FOLDER has train/CLASS/*.jpg and val/CLASS/*.jpg. A row of the paper's Table 3 says all numbers; a
process takes a few images at once and accumulates gradients and curvature to the batch
(Osawa 2019, sec. 5.1).
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, repeat
from math import ceil
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from application import Progress, accuracy, load, save, told
from natgrad.comm import Communicator
from natgrad.comm.torchrun import joined
from natgrad.lab import schemes
from natgrad.lab.data import Normalise, Squeeze, image_folder, loader, mean_image
from natgrad.lab.models import he_normal_, resnet, small_resnet

LARGE = (18, 34, 50, 101, 152)  # depths of networks for large images


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with train and val in it")
    rows = [row.batch for row in schemes.LARGE_BATCH]
    parser.add_argument("--row", type=int, choices=rows, default=4096, help="default 4096")
    parser.add_argument("--batch", type=int, help="another one than the row's, for fewer images")
    parser.add_argument("--micro", type=int, default=32, help="images at once (default 32)")
    parser.add_argument("--epochs", type=int, help="default: the row's")
    parser.add_argument("--stale", action="store_true", help="longer intervals (Osawa, eq. 20)")
    parser.add_argument("--depth", type=int, default=50, help="or 18, …; 8, 20, … are small ones")
    parser.add_argument("--image", type=int, default=224, help="side in pixels (default 224)")
    parser.add_argument("--mean-image", action="store_true", help="subtract it from all images")
    parser.add_argument("--workers", type=int, default=4, help="processes that read (default 4)")
    parser.add_argument("--out", type=Path, default=Path("imagenet"), help="for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last one")
    parser.add_argument("--steps", type=int, help="end earlier, after so many in all")
    return parser.parse_args(given)


def passes(batch: int, micro: int, ranks: int) -> int:
    """How many a step has on each rank."""
    if batch % (micro * ranks):
        raise natgrad.errors.SettingError(
            f"The batch is {batch} but {ranks} processes of {micro} images at once must divide it: "
            "pass another --micro or --batch."
        )
    return batch // (micro * ranks)


def train(args: argparse.Namespace, comm: Communicator, device: torch.device) -> nn.Module:
    crop = Squeeze(side=round(args.image * 256 / 224), size=args.image)
    images, judged = image_folder(args.folder, crop)
    if args.mean_image:  # otherwise the means of channels
        by = Normalise(mean_image(images, crop, workers=args.workers), (1.0, 1.0, 1.0))
        images, judged = images.normalised(by), judged.normalised(by)
    count, classes = len(images), len(images.classes)
    row = schemes.large_batch(args.row)
    row = replace(row, batch=args.batch or row.batch, epochs=args.epochs or row.epochs)
    micros = passes(row.batch, args.micro, comm.size)
    place = {"rank": comm.rank, "ranks": comm.size, "device": device, "workers": args.workers}
    batches = loader(images, args.micro, drop_last=True, **place)
    tests = loader(judged, 2 * args.micro, shuffle=False, **place)

    torch.manual_seed(0)  # the same initial weights on all ranks
    network = resnet if args.depth in LARGE else small_resnet
    net = he_normal_(network(args.depth, classes)).to(device)
    some = torch.zeros(1, 3, args.image, args.image, device=device)
    rescaling = schemes.WeightRescaling(schemes.normalized_layers(net, some).values())
    model = DistributedDataParallel(net) if comm.size > 1 else net
    lr = row.lr_schedule(count)
    sgd = torch.optim.SGD(net.parameters(), lr=row.lr)
    optimizer = schemes.DisplacementMomentum(sgd, row.momentum_schedule(count))
    settings = row.kfac()
    if args.stale:
        settings |= dict.fromkeys(("update_every", "refresh_every"), row.interval(count))
    kfac = natgrad.KFAC(model, optimizer, **settings)
    # A sample is mixed with the one at its place in the last batch: each pass has its own.
    mixups = [row.mixup(classes) for _ in range(micros)]
    erasing = row.erasing()

    start, steps = 0, min(row.steps(count), args.steps or row.steps(count))
    if found := load(args.out, comm, resume=args.resume):
        state, own = found
        start = state["step"]
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        kfac.load_state_dict(state["kfac"])
        for mixup, mixed in zip(mixups, own, strict=True):
            mixup.load_state_dict(mixed)

    progress = Progress(start, steps, comm.rank)
    stream = chain.from_iterable(repeat(batches))
    for step in range(start, steps):
        # What is drawn depends on step and rank alone, also in a run that goes on.
        torch.manual_seed(comm.size * step + comm.rank)
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.zero_grad()
        mean = torch.zeros((), device=device)
        for number, mixup in enumerate(mixups):
            x, y = mixup(*next(stream))
            last = number == micros - 1  # only then are gradients and curvature communicated
            with nullcontext() if last or model is net else model.no_sync():
                loss = schemes.soft_cross_entropy(model(erasing(x)), y) / micros
                loss.backward()
            mean += loss.detach()
        kfac.step()
        optimizer.step()
        rescaling.step()
        progress.step(mean)
        if (step + 1) % ceil(count / row.batch) == 0 or step + 1 == steps:
            right = accuracy(model, tests, comm)
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "batches": batches.state_dict(),
                "kfac": kfac.state_dict(),
            }
            save(args.out, comm, step + 1, state, [mixup.state_dict() for mixup in mixups])
            done = (step + 1) * row.batch / count
            progress.tested(f"test accuracy {right:.2%} after {done:.1f} of {row.epochs} epochs")
    progress.end(kfac)
    return net


def main(given: Sequence[str] | None = None) -> nn.Module:
    args = options(given)
    with joined() as (comm, device):
        return train(args, comm, device)


if __name__ == "__main__":
    told(main)
