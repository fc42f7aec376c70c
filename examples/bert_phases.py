"""BERT on WikiText-2 in two phases: short windows with LAMB, then long ones with K-FAC as well.

python examples/bert_phases.py
python examples/bert_phases.py --large --windows 128 512 --steps 7038 1000 --batch 8192 2048
    --micro 8 --lr 6e-3 4e-3 --vocabulary 8192 --characters 0 --bfloat16 --no-compare

K-FAC is made when its phase begins, and costs nothing until then (Pauloski 2022, sec. 6.3.3).
LAMB is new as well: it keeps averages of gradients, and preconditioned ones are of another size.
The second phase is also run by LAMB alone, from the same weights.
"""

import argparse
import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from application import Progress, told
from natgrad.lab import data, schemes
from natgrad.lab.models import BERT_LARGE, BertSize, bert
from natgrad.tables import Column, Table


@dataclass
class Phase:
    """Windows of so many pieces and how they are learnt, then loss and accuracy on test windows."""

    window: int
    steps: int
    batch: int
    lr: float
    kfac: bool = False
    before: tuple[float, float] = (0.0, 0.0)
    after: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        return f"windows of {self.window}, LAMB{' and K-FAC' if self.kfac else ''}"


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    both = {"nargs": 2, "metavar": ("ONE", "TWO")}
    parser.add_argument("--windows", type=int, **both, default=(16, 64), help="default 16 64")
    parser.add_argument("--steps", type=int, **both, default=(200, 100), help="default 200 100")
    parser.add_argument("--batch", type=int, **both, default=(64, 32), help="default 64 32")
    parser.add_argument("--lr", type=float, **both, default=(0.02, 0.03), help="default 0.02 0.03")
    parser.add_argument("--micro", type=int, help="windows at once (default all)")
    parser.add_argument("--damping", type=float, default=1e-3, help="of K-FAC (default 1e-3)")
    parser.add_argument("--large", action="store_true", help="BERT-Large, not a tiny one")
    parser.add_argument("--bfloat16", action="store_true", help="by autocast")
    parser.add_argument("--vocabulary", type=int, default=1024, help="pieces (default 1024)")
    parser.add_argument("--characters", type=int, default=10**6, help="of the text; 0 is all")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(given)


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over hidden pieces; ``[n, window, vocabulary]``, ``[n, window]``."""
    return F.cross_entropy(output.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def tested(model: nn.Module, batches: data.Loader) -> tuple[float, float]:
    """Loss and accuracy; what is hidden is the same every time."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for tokens, targets in batches:
        output, hidden = model(tokens), int((targets >= 0).sum())
        loss += float(cross_entropy(output, targets)) * hidden
        right, count = right + int((output.argmax(-1) == targets).sum()), count + hidden
    model.train()
    return loss / count, right / count


def train(model: nn.Module, phase: Phase, rows: data.Split, args: argparse.Namespace) -> None:
    print(f"\n{phase}, {phase.steps:,} steps", flush=True)
    device = next(model.parameters()).device
    batches = data.loader(rows.train, phase.batch, device=device)
    tests = data.loader(rows.test, 64, shuffle=False, device=device)
    optimizer = schemes.LAMB(schemes.parameter_groups(model, weight_decay=0.01), lr=phase.lr)
    fall = schemes.PolynomialDecay(phase.lr, 0, phase.steps, power=0.5, steps_per_epoch=1)
    lr = schemes.LinearWarmup(fall, max(1, phase.steps // 8), start=0.05)
    # The loss is a mean over so many pieces of a window. LAMB gives every layer a length of its
    # own, so that there is nothing to clip.
    scale = {"loss": natgrad.MeanLoss(rows.train.guessed), "damping": args.damping, "kl_clip": None}
    clocks = {
        "update_every": natgrad.schedules.Doubling(5),
        "refresh_every": natgrad.schedules.Doubling(50),
    }
    kfac = natgrad.KFAC(model, optimizer, **scale, **clocks) if phase.kfac else None
    cast = torch.autocast(device.type, torch.bfloat16) if args.bfloat16 else nullcontext()
    phase.before, progress = tested(model, tests), Progress(0, phase.steps)
    stream = chain.from_iterable(repeat(batches))
    for step in range(phase.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.zero_grad()
        batch, total = next(stream), torch.zeros((), device=device)
        parts = (one.split(args.micro or len(one)) for one in batch)
        for tokens, targets in zip(*parts, strict=True):
            with cast:
                output = model(tokens)
            loss = cross_entropy(output, targets) * (len(tokens) / len(batch[0]))
            loss.backward()
            total += loss.detach()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        progress.step(total)
        if (step + 1) % 50 == 0 or step + 1 == phase.steps:
            phase.after = tested(model, tests)
            progress.tested(f"test loss {phase.after[0]:.4f}, accuracy {phase.after[1]:.1%}")
    progress.end(kfac)
    if kfac is not None:
        kfac.detach()


def main(given: Sequence[str] | None = None) -> list[Phase]:
    args = options(given)
    text, length = data.wikitext2(), args.characters
    if length:
        text = data.Split(text.train[:length], text.test[: length // 10])
    words = data.build_vocabulary(text.train, args.vocabulary)
    rows = [data.masked_words(text, words, window) for window in args.windows]

    torch.manual_seed(0)
    size = BERT_LARGE if args.large else BertSize(layers=2, heads=4, width=64)
    model = bert(len(words), size, context=max(args.windows), dropout=0.1 if args.large else 0.0)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    one, two = zip(args.windows, args.steps, args.batch, args.lr, strict=True)
    phases = [Phase(*one), Phase(*two, kfac=True), *([Phase(*two)] if args.compare else [])]
    train(model, phases[0], rows[0], args)
    weights, table = copy.deepcopy(model.state_dict()), []
    for phase in phases[1:]:
        model.load_state_dict(weights)
        train(model, phase, rows[1], args)
    for phase in phases:
        (loss, right), (low, high) = phase.before, phase.after
        table.append((str(phase), f"{loss:.4f} → {low:.4f}", f"{right:.1%} → {high:.1%}"))
    columns = Column("phase"), Column("test loss"), Column("accuracy")
    print(Table("\nBERT in two phases", columns, tuple(table)))
    return phases


if __name__ == "__main__":
    told(main)
