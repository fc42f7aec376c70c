"""Mask R-CNN: a class, a box and a mask for every object, K-FAC on its heads (Pauloski 2022).

python examples/mask_rcnn.py                       # circles, squares and triangles
python examples/mask_rcnn.py --sgd
python examples/mask_rcnn.py --data FOLDER --full  # as COCO comes, with ResNet-50

Backbone, pyramid and region proposals are SGD's; K-FAC preconditions what the box head and the mask
head do with a region. The PNG shows a few test images with what is there and what was found.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path

import torch
from torch import Tensor, nn

import natgrad
from application import Progress, told
from natgrad.lab import data, schemes
from natgrad.lab.models import MASK_RCNN_HEADS, mask_rcnn, small_mask_rcnn

SHOWN, SURE = 4, 0.5  # images in the picture, and the least score of what is drawn there
COLOURS = ((230, 60, 60), (60, 110, 250), (30, 180, 70), (240, 170, 0), (160, 70, 220))


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder as COCO comes (default: drawn shapes)")
    parser.add_argument("--full", action="store_true", help="ResNet-50 and 256 channels")
    parser.add_argument("--sgd", action="store_true", help="without K-FAC")
    parser.add_argument("--steps", type=int, default=300, help="default 300")
    parser.add_argument("--batch", type=int, default=8, help="images of a step (default 8)")
    parser.add_argument("--side", type=int, help="of an image (default 96, or 800 with --full)")
    parser.add_argument("--lr", type=float, default=0.05, help="default 0.05")
    parser.add_argument("--damping", type=float, default=0.3, help="default 0.3")
    parser.add_argument("--drawn", type=int, default=200, help="shapes' images (default 200)")
    parser.add_argument("--out", type=Path, default=Path("mask_rcnn.png"), help="the picture")
    return parser.parse_args(given)


@torch.no_grad()
def judge(model: nn.Module, batches: data.Loader) -> dict[str, data.Precision]:
    model.eval()
    pairs = [pair for x, y in batches for pair in zip(model(x), y, strict=True)]
    model.train()
    return {
        "boxes": data.average_precision([data.box_matches(*pair) for pair in pairs]),
        "masks": data.average_precision([data.mask_matches(*pair) for pair in pairs]),
    }


@torch.no_grad()
def draw(path: Path, model: nn.Module, judged: data.Instances, device: torch.device) -> None:
    """What is there above, what was found below."""
    from PIL import Image

    rows = list(range(min(SHOWN, len(judged))))
    images, truths = judged.take(rows, torch.zeros(len(rows), 0).numpy())
    found = model.eval()([image.to(device) for image in images])
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    scale = max(1, 240 // max(height, width))
    sheet = Image.new("RGB", (scale * width * len(rows), 2 * scale * height), "white")
    for column, row in enumerate(rows):
        sure = found[row]["scores"] >= SURE
        masks = found[row]["masks"][sure, 0] >= 0.5
        guesses = {"masks": masks, "boxes": found[row]["boxes"][sure]}
        guesses |= {"labels": found[row]["labels"][sure], "scores": found[row]["scores"][sure]}
        for line, objects in enumerate((truths[row], guesses)):
            piece = overlaid(images[row], objects, judged.classes, scale)
            sheet.paste(piece, (column * scale * width, line * scale * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    print(f"What is there (above) and what was found (below) is in {path}.")


def overlaid(image: Tensor, objects: Mapping[str, Tensor], names: Sequence[str], scale: int):
    """``image [3, h, w]`` with masks, boxes and names in the colours of their classes."""
    from PIL import Image, ImageDraw

    pixels = image.clone()
    for mask, label in zip(objects["masks"].cpu().bool(), objects["labels"], strict=True):
        colour = torch.tensor(COLOURS[int(label) % len(COLOURS)]) / 255
        pixels[:, mask] = (pixels[:, mask] + colour[:, None]) / 2
    bytes_ = pixels.mul(255).byte().repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    picture = Image.fromarray(bytes_.permute(1, 2, 0).numpy())
    pen = ImageDraw.Draw(picture)
    for i, (box, label) in enumerate(zip(objects["boxes"], objects["labels"], strict=True)):
        left, top, right, bottom = (scale * float(v) for v in box)
        colour = COLOURS[int(label) % len(COLOURS)]
        pen.rectangle((left, top, right, bottom), outline=colour, width=2)
        score = f" {float(objects['scores'][i]):.0%}" if "scores" in objects else ""
        pen.text((left + 3, top + 1), f"{names[int(label)]}{score}", fill="white")
    return picture


def main(given: Sequence[str] | None = None) -> nn.Module:
    args = options(given)
    side = args.side or (800 if args.full else 96)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as drawn:
        if args.data is None:
            data.draw_shapes(drawn, train=args.drawn, test=max(1, args.drawn // 5), side=side)
        train, test = data.coco_folder(args.data or drawn, flip=True)
        build = mask_rcnn if args.full else small_mask_rcnn
        model = build(len(train.classes), side=side).to(device)
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
        kfac = None
        if not args.sgd:
            # A region is to the heads what an image is to the backbone, so each of them counts.
            heads = {"include": MASK_RCNN_HEADS, "loss": natgrad.MeanLoss(regions=MASK_RCNN_HEADS)}
            kfac = natgrad.KFAC(model, optimizer, damping=args.damping, **heads)
        falling = schemes.PolynomialDecay(args.lr, 0, args.steps, power=1, steps_per_epoch=1)
        lr = schemes.LinearWarmup(falling, min(20, args.steps), 0.1)

        batches = data.loader(train, args.batch, drop_last=True, device=device)
        tests = data.loader(test, args.batch, shuffle=False, device=device)
        progress, stream = Progress(0, args.steps), chain.from_iterable(repeat(batches))
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = lr(step)
            optimizer.zero_grad()
            loss = sum(model(*next(stream)).values())
            loss.backward()
            if kfac is not None:
                kfac.step()
            optimizer.step()
            progress.step(loss)
            if (step + 1) % 100 == 0 or step + 1 == args.steps:
                found = judge(model, tests).items()
                said = ", ".join(f"AP of {n} {p.mean:.3f} ({p.half:.3f} at .5)" for n, p in found)
                progress.tested(said)
        progress.end(kfac)
        draw(args.out, model, test, device)
    return model


if __name__ == "__main__":
    told(main)
