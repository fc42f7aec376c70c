"""A GPT on the characters of tinyshakespeare: K-FAC before AdamW; prints a text of its own.

python examples/gpt_shakespeare.py
python examples/gpt_shakespeare.py --adamw --lr 1e-3

The output layer is the embedding, transposed: one block of curvature for both. Perplexity is over
the last tenth of the text, which is not learnt from.
"""

import argparse
import math
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from application import Progress, told
from natgrad.lab import schemes
from natgrad.lab.data import Loader, characters, loader, tinyshakespeare
from natgrad.lab.models import GPT


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adamw", action="store_true", help="without K-FAC")
    parser.add_argument("--steps", type=int, default=600, help="default 600, five epochs")
    parser.add_argument("--batch", type=int, default=64, help="windows of a step (default 64)")
    parser.add_argument("--context", type=int, default=128, help="characters (default 128)")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--heads", type=int, default=4, help="default 4")
    parser.add_argument("--width", type=int, default=128, help="default 128")
    parser.add_argument("--lr", type=float, default=3e-3, help="default 3e-3")
    parser.add_argument("--letters", type=int, default=400, help="to write at the end")
    parser.add_argument("--data", type=Path, help="folder of tinyshakespeare.txt")
    return parser.parse_args(given)


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over characters; ``[n, length, vocabulary]``, ``[n, length]``."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


@torch.no_grad()
def perplexity(model: nn.Module, batches: Loader) -> float:
    model.eval()
    total, count = 0.0, 0
    for tokens, targets in batches:
        total += float(cross_entropy(model(tokens), targets)) * targets.numel()
        count += targets.numel()
    model.train()
    return math.exp(total / count)


@torch.no_grad()
def written(model: GPT, start: Tensor, letters: int) -> Tensor:
    """``start [n]`` and ``letters`` more, each drawn from what the model expects."""
    model.eval()
    tokens = start
    for _ in range(letters):
        output = model(tokens[None, -model.context :])
        likely = output[0, -1].softmax(0)
        tokens = torch.cat((tokens, torch.multinomial(likely, 1)))
    return tokens


def main(given: Sequence[str] | None = None) -> nn.Module:
    args = options(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, judged = characters(tinyshakespeare(args.data), args.context)
    batches = loader(text, args.batch, drop_last=True, device=device)
    tests = loader(judged, args.batch, shuffle=False, device=device)

    torch.manual_seed(0)
    sizes = {"layers": args.layers, "heads": args.heads, "width": args.width}
    model = GPT(len(text.vocabulary), args.context, **sizes).to(device)
    groups = schemes.parameter_groups(model, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    fall = schemes.PolynomialDecay(args.lr, 0, args.steps, power=1, steps_per_epoch=1)
    warm = max(1, args.steps // 20)
    lr = schemes.LinearWarmup(fall, warm, start=0.5 / warm)
    kfac = None
    if not args.adamw:  # the loss is a mean over characters
        kfac = natgrad.KFAC(model, optimizer, loss=natgrad.MeanLoss(args.context))

    progress = Progress(0, args.steps)
    stream = chain.from_iterable(repeat(batches))
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        tokens, targets = next(stream)
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        progress.step(loss)
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            progress.tested(f"test perplexity {perplexity(model, tests):.3f}")
    progress.end(kfac)
    start = text.encode("\n").to(device)
    print(text.decode(written(model, start, args.letters).cpu()))
    return model


if __name__ == "__main__":
    told(main)
