"""What K-FAC covers of other people's models and what it costs: `-m benchmarks.model_gallery`.

Full sizes are made on the meta device, without numbers: the share of the trained parameters that
have a block, how many blocks there are, why the others have none, and the bytes that the plan
counts for one process, also as a multiple of the weights. Parameters that are used in expressions
and experts are left out where the first step of the small size does not understand that.

Small ones, with random weights, are trained on one batch: plain SGD and K-FAC take turns in one
process, and the cost of a step is that of a cycle with update every 10 and refresh every 100 steps,
put together from three kinds of step (`benchmarks.timing`). Small models are the worst case:
decompositions do not shrink as fast as the products of a batch of four.

`--no-times` leaves the cost out, and takes minutes less. Models of libraries that are not installed
are left out.
"""

import argparse
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import natgrad
from benchmarks.gallery_models import GalleryModel, gallery
from benchmarks.timing import average_step, interleave, machine
from benchmarks.workloads import INTERVALS
from natgrad.errors import first_line
from natgrad.layers.bare import Bare
from natgrad.layers.experts import Expert
from natgrad.tables import bytes_text

_BARE = "no layer is registered for "


@dataclass(frozen=True)
class Covered:
    """Of one model at full size. ``left``: numbers of parameters by the reason that they have no
    block; ``bytes``: what the plan counts for one process, ``weights`` those of the parameters."""

    parameters: int
    covered: int
    blocks: int
    left: Mapping[str, int]
    bytes: int
    weights: int

    @property
    def share(self) -> float:
        return self.covered / max(1, self.parameters)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, by kind; ``ratio`` of K-FAC's at 10/100 to that without."""

    seconds: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return average_step(self.seconds, 10, 100) / self.seconds["plain"]


def covered(entry: GalleryModel) -> Covered:
    """Nothing is allocated."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = entry.build(True)
    kfac = natgrad.KFAC(model, kl_clip=None)
    trained = {id(p): p for p in model.parameters() if p.requires_grad}
    uses = [(block, u) for block in kfac.blocks for u in block.layers]
    found = [(block, u) for block, u in uses if isinstance(u, Bare | Expert)]
    why_not = refused(entry) if found else {}
    out = {block: why for block, u in found if (why := why_not.get((u.kind, u.short)))}
    blocks = [block for block in kfac.blocks if block not in out]
    inside = {id(p) for block in blocks for p in block.parameters}
    named = dict(model.named_parameters())
    left: Counter[str] = Counter()
    without = {id(p): (block.kind, why) for block, why in out.items() for p in block.parameters}
    for name, p in named.items():
        if id(p) in without:
            left[reason(name, *without[id(p)])] += p.numel()
    for name, why in kfac.uncovered.items():
        if (p := named.get(name)) is not None and id(p) in trained:
            left[reason(name, why.kind, why.reason)] += p.numel()
    return Covered(
        sum(p.numel() for p in trained.values()),
        sum(p.numel() for key, p in trained.items() if key in inside),
        len(blocks),
        dict(left.most_common()),
        kfac.plan.most_memory,
        sum(p.numel() * p.element_size() for p in trained.values()),
    )


def refused(entry: GalleryModel) -> dict[tuple[str, str], str]:
    """By class and name: why a parameter that is used in an expression has no statistics, as the
    first step of the small size shows."""
    torch.manual_seed(0)
    trainer = Trainer(entry, entry.build(False), "both")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer()
    assert trainer.kfac is not None
    uses = [(block, u) for block in trainer.kfac.blocks for u in block.layers]
    found = [(b, u) for b, u in uses if isinstance(u, Bare | Expert)]
    return {(u.kind, u.short): b.refused for b, u in found if b.refused}


def reason(name: str, kind: str, why: str) -> str:
    """Short enough for a table: the parameter's own name, its module's class, and why."""
    own = name.rpartition(".")[2]
    where = f"`{own}` of {kind}" if kind else f"`{own}`"
    return where if why.startswith(_BARE) else f"{where}: {why.partition(', and ')[0]}"


class Trainer:
    """Calling it is one step of SGD, with K-FAC at its defaults where there are intervals."""

    def __init__(self, entry: GalleryModel, model: nn.Module, kind: str) -> None:
        self.entry, self.model = entry, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.kfac = None
        if kind in INTERVALS:
            update, refresh = INTERVALS[kind]
            self.kfac = natgrad.KFAC(
                model, self.optimizer, update_every=update, refresh_every=refresh
            )
        self.inputs = entry.inputs()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.entry.loss(self.model, self.inputs).backward()
        if self.kfac is not None:
            self.kfac.step()
        self.optimizer.step()


def cost(entry: GalleryModel, repeats: int) -> Cost:
    """Least seconds of each kind of step, in turn."""
    torch.manual_seed(0)
    model = entry.build(False)
    calls: dict[str, Callable[[], object]] = {}
    for kind in ("plain", *INTERVALS):
        torch.manual_seed(1)
        calls[kind] = Trainer(entry, copy.deepcopy(model), kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = interleave(calls, repeats)
    return Cost({kind: found.minimum for kind, found in times.items()})


def cells(entry: GalleryModel, found: Covered, spent: Cost | None) -> tuple[str, ...]:
    left = "; ".join(f"{why} ({_short(count)})" for why, count in list(found.left.items())[:3])
    if len(found.left) > 3:
        rest = sum(list(found.left.values())[3:])
        left += f"; {len(found.left) - 3} more ({_short(rest)})"
    return (
        entry.name,
        entry.library,
        _short(found.parameters),
        f"{100 * found.share:.{1 if found.share < 0.9995 or found.share == 1 else 2}f}%",
        f"{found.blocks:,}",
        f"{bytes_text(found.bytes)} ({found.bytes / max(1, found.weights):.1f}x)",
        "" if spent is None else f"{spent.ratio:.2f}x",
        left or "nothing",
    )


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


HEADER = ("model", "library", "parameters", "covered", "blocks", "memory", "step", "left out")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--no-times", action="store_true", help="only what is covered, and bytes")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of steps that are timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = [e for e in gallery() if not arguments.models or e.name in arguments.models]
    if not chosen:
        parser.error("none of these models can be made here: install transformers or timm")
    print("  \n".join(f"{key}: {value}" for key, value in machine().items()) + "\n")
    show = (lambda row: "| " + " | ".join(row) + " |") if arguments.markdown else "\t".join
    print(show(HEADER))
    if arguments.markdown:
        print("|---|---|---:|---:|---:|---:|---:|---|")
    for entry in chosen:
        try:
            found = covered(entry)
            spent = None if arguments.no_times else cost(entry, arguments.repeats)
        except Exception as error:  # of a library that has changed; the others are still shown
            why = f"{type(error).__name__}: {first_line(error)}"
            print(show((entry.name, entry.library, *[""] * 5, why)), flush=True)
            continue
        print(show(cells(entry, found, spent)), flush=True)


if __name__ == "__main__":
    main()
