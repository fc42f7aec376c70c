"""A U-Net that finds the membranes of cells in electron-microscopy images: K-FAC or Adam (KAISA).

python examples/unet_membrane.py
python examples/unet_membrane.py --adam

Learns from random squares of 24 images and is judged by 6 whole ones. The PNG shows a few of these,
the membranes that people have drawn in them, and those of the network.
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
from natgrad.lab import schemes
from natgrad.lab.data import Loader, loader, membrane
from natgrad.lab.models import UNet

SHOWN = 3  # images in the picture


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adam", action="store_true", help="without K-FAC")
    parser.add_argument("--steps", type=int, default=300, help="default 300")
    parser.add_argument("--batch", type=int, default=4, help="squares of a step (default 4)")
    parser.add_argument("--image", type=int, default=128, help="side of a square (default 128)")
    parser.add_argument("--width", type=int, default=16, help="of the U-Net (default 16)")
    parser.add_argument("--lr", type=float, help="default 0.1, or 0.003 with --adam")
    parser.add_argument("--judged", type=int, default=6, help="images to judge by (default 6)")
    parser.add_argument("--data", type=Path, help="folder of image/N.png and label/N.png")
    parser.add_argument(
        "--out", type=Path, default=Path("membrane.png"), help="picture (default membrane.png)"
    )
    return parser.parse_args(given)


@torch.no_grad()
def guesses(model: nn.Module, batches: Loader) -> tuple[Tensor, Tensor, Tensor]:
    """Images, membranes and what the network takes for them, each ``[n, h, w]``."""
    model.eval()
    found = [(x[:, 0], y == 0, model(x)[:, 0] > 0) for x, y in batches]
    model.train()
    images, truth, guess = (torch.cat(parts) for parts in zip(*found, strict=True))
    return images, truth, guess


def dice(truth: Tensor, guess: Tensor) -> float:
    """``2 |A ∩ B| / (|A| + |B|)`` of two sets of pixels."""
    return float(2 * (truth & guess).sum() / (truth.sum() + guess.sum()).clamp(min=1))


def main(given: Sequence[str] | None = None) -> nn.Module:
    args = options(given)
    picture = Picture(args.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    squares, _ = membrane(args.image, args.data)
    _, whole = membrane(folder=args.data)
    batches = loader(squares, args.batch, drop_last=True, device=device)
    tests = loader(whole.part(range(args.judged)), 1, shuffle=False, device=device)

    torch.manual_seed(0)
    model = UNet(width=args.width).to(device)
    kfac = None
    if args.adam:
        start = args.lr or 3e-3
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=start)
    else:
        start = args.lr or 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=start, momentum=0.9)
        # The loss is a mean over pixels.
        kfac = natgrad.KFAC(model, optimizer, loss=natgrad.MeanLoss(args.image**2))
    lr = schemes.PolynomialDecay(start, 0, args.steps, power=1, steps_per_epoch=1)

    progress = Progress(0, args.steps)
    stream = chain.from_iterable(repeat(batches))
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        x, cells = next(stream)
        optimizer.zero_grad()
        membranes = (cells == 0).float().unsqueeze(1)
        loss = F.binary_cross_entropy_with_logits(model(x), membranes)
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        progress.step(loss)
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            images, truth, guess = guesses(model, tests)
            progress.tested(f"test dice of membranes {dice(truth, guess):.4f}")
    progress.end(kfac)
    light = (images - images.amin()) / (images.amax() - images.amin())
    rows = {"image": light, "truth": (~truth).float(), "guess": (~guess).float()}
    picture.draw({name: row[:SHOWN] for name, row in rows.items()})
    return model


if __name__ == "__main__":
    told(main)
