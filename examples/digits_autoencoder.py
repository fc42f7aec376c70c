"""An autoencoder of handwritten digits, trained by SGD and by K-FAC before SGD, side by side.

python examples/digits_autoencoder.py

64 pixels pass through 12 numbers. Both start from the same weights and see the same batches; each
has the learning rate that `make demo` finds best for it. The PNG has digits that neither has
seen, and what they make of them.
"""

import argparse
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from application import Picture, Progress, told
from natgrad.lab.data import Images, digits, loader
from natgrad.lab.models import autoencoder

SHOWN = 12  # digits in the picture


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="default 200")
    parser.add_argument("--batch", type=int, default=256, help="default 256")
    parser.add_argument("--width", type=int, default=128, help="of the first layer (default 128)")
    parser.add_argument("--lr", type=float, default=0.01, help="of K-FAC (default 0.01)")
    parser.add_argument("--sgd-lr", type=float, default=0.03, help="of SGD (default 0.03)")
    parser.add_argument(
        "--out", type=Path, default=Path("digits.png"), help="picture (default digits.png)"
    )
    return parser.parse_args(given)


def reconstruction(output: Tensor, images: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the pixels ``[n, 64]`` of a digit."""
    total = F.binary_cross_entropy_with_logits(output, images.flatten(1), reduction="sum")
    return total / len(images)


def train(args: argparse.Namespace, images: Images, unseen: Tensor, *, with_kfac: bool) -> Tensor:
    """Returns what the network makes of ``unseen [n, 1, 8, 8]``: ``[n, 8, 8]``."""
    torch.manual_seed(0)
    widths = (64, args.width, args.width // 2, args.width // 4, 12)
    model = nn.Sequential(nn.Flatten(), *autoencoder(widths))
    lr = args.lr if with_kfac else args.sgd_lr
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=args.steps)
    kfac = natgrad.KFAC(model, optimizer) if with_kfac else None

    progress = Progress(0, args.steps)
    batches = chain.from_iterable(repeat(loader(images, args.batch, drop_last=True)))
    for step in range(args.steps):
        x, _ = next(batches)
        optimizer.zero_grad()
        loss = reconstruction(model(x), x)
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        schedule.step()
        progress.step(loss)
        if (step + 1) % max(1, args.steps // 5) == 0 or step + 1 == args.steps:
            with torch.no_grad():
                output = model(unseen)
            progress.tested(f"test loss {reconstruction(output, unseen):.4g}")
    progress.end(kfac)
    return output.sigmoid().unflatten(1, (8, 8))


def main(given: Sequence[str] | None = None) -> dict[str, Tensor]:
    args = options(given)
    picture = Picture(args.out)
    images, judged = digits()
    unseen, _ = judged.unit().tensors()
    rows = {"digits": unseen[:, 0]}
    for name, with_kfac in (("SGD", False), ("K-FAC", True)):
        print(f"{name}:")
        rows[name] = train(args, images.unit(), unseen, with_kfac=with_kfac)
    picture.draw({name: row[:SHOWN] for name, row in rows.items()}, scale=8)
    return rows


if __name__ == "__main__":
    told(main)
