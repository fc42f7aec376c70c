"""The walk of a training step through the files of natgrad: `python -m benchmarks.walk`.

    calls            what `sys.setprofile` reports as a call of a function of natgrad's own files
    files            how many different files these functions are in
    changes of file  how often the next call is in another file than the one before

Every such report counts: methods, properties, lambdas, comprehensions and generators each time
they go on. What torch does between two of them does not. Steps are those of a run that is under
way, as the very first also fills caches and allocates; construction is that of a new process.
Python 3.12 runs comprehensions inside of the function around them, so only counts of one version
of Python can be compared.

Prints the counts and the walk of one Conv2d, and draws the picture of `docs/images/walk.svg`.
"""

import argparse
import gc
import json
import platform
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from benchmarks.networks import resnet20
from benchmarks.timing import render
from benchmarks.walk_picture import Step, draw

T = TypeVar("T")

PACKAGE = Path(natgrad.__file__).parent
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "walk.svg"

# Stages of training, in the order of the table.
CONSTRUCT = "construct KFAC"
FORWARD, BACKWARD = "forward, update step", "backward, update step"
BOTH, IDLE, APPLY = (
    "step(), update + refresh",
    "forward and backward, other steps",
    "step(), apply only",
)
RESNET = "step(), apply only, of ResNet-20"

# Parts of step(): each begins with the first call into the file of this name.
PARTS = ("update", "refresh", "apply")


@dataclass(frozen=True)
class Walk:
    """The file of every call, in order, relative to the package."""

    files: tuple[str, ...] = ()

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in pairwise(self.files))

    @property
    def counts(self) -> dict[str, int]:
        return {
            "calls": len(self.files),
            "files": len(set(self.files)),
            "changes": self.changes,
        }

    def __add__(self, other: "Walk") -> "Walk":
        return Walk(self.files + other.files)


def traced(call: Callable[[], T], package: Path = PACKAGE) -> tuple[T, Walk]:
    """What `call` returns, and the calls of functions in files of `package` on the way."""
    files: list[str] = []
    prefix = f"{package}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix):
            files.append(path.removeprefix(prefix))

    # What the garbage collector calls is nobody's step, and comes when it likes.
    collects = gc.isenabled()
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return result, Walk(tuple(files))


class FiveBlocks(nn.Module):
    """A layer of every common kind: convolution, Linear, LayerNorm, embedding tied to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.embedding = nn.Embedding(11, 8)
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, images: Tensor) -> Tensor:
        """`[n, 3, h, w]` -> logits `[n, 5, 11]` of five words beside each image."""
        words = torch.arange(len(images) * 5, device=images.device).reshape(-1, 5) % 11
        pooled = F.adaptive_avg_pool2d(self.conv(images).relu(), 2).flatten(1)
        hidden = self.second(self.first(pooled).relu())
        logits: Tensor = self.head(self.norm(hidden[:, None] + self.embedding(words)))
        return logits


def stages(model: nn.Module) -> dict[str, Walk]:
    """The walks of training `model` on random images, by stage.

    Steps 0 and 2 update and refresh, 1 and 3 only apply; those of steps 2 and 3 are returned."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, decompositions happen in threads that nobody traces
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    kfac, construct = traced(
        lambda: natgrad.KFAC(model, optimizer, update_every=2, refresh_every=2)
    )
    walks = {CONSTRUCT: construct}
    for step in range(4):
        optimizer.zero_grad()
        output, forward = traced(lambda: model(images))
        rows = output.flatten(0, -2)
        loss = F.cross_entropy(rows, torch.arange(len(rows)) % output.shape[-1])
        _, backward = traced(loss.backward)
        _, stepping = traced(kfac.step)
        optimizer.step()
        if step == 2:
            walks |= {FORWARD: forward, BACKWARD: backward, BOTH: stepping}
        elif step == 3:
            walks |= {IDLE: forward + backward, APPLY: stepping}
    kfac.detach()
    torch.set_num_threads(threads)
    return walks


def parts(walk: Walk) -> list[tuple[str, Walk]]:
    """step() in parts; "step" is what comes before the first of them."""
    stems = [PurePosixPath(file).stem for file in walk.files]
    starts = {"step": 0}
    for name in PARTS:
        after = max(starts.values())
        if name in stems[after:]:
            starts[name] = stems.index(name, after)
    ends = [*list(starts.values())[1:], len(stems)]
    pieces = zip(starts.items(), ends, strict=True)
    return [(name, Walk(walk.files[start:end])) for (name, start), end in pieces]


# The walk as text.


def merged(files: Sequence[str], longest: int = 4) -> list[str]:
    """Files without `.py` and without repeats; rounds of up to `longest` files are told once."""
    names = [name for name, _ in groupby(file.removesuffix(".py") for file in files)]
    merged_names: list[str] = []
    at = 0
    while at < len(names):
        rounds = {n: _rounds(names, at, n) for n in range(2, longest + 1)}
        length = max(rounds, key=lambda n: n * rounds[n])
        if rounds[length] > 1:
            merged_names.append(f"({' -> '.join(names[at : at + length])}) x{rounds[length]}")
            at += length * rounds[length]
        else:
            merged_names.append(names[at])
            at += 1
    return merged_names


def _rounds(names: Sequence[str], at: int, length: int) -> int:
    rounds, first = 1, names[at : at + length]
    while names[at + rounds * length : at + (rounds + 1) * length] == first:
        rounds += 1
    return rounds


def told(walks: Mapping[str, Walk]) -> str:
    """The files of an update step in turn, a paragraph a stage."""
    pieces = [("forward", walks[FORWARD]), ("backward", walks[BACKWARD]), *parts(walks[BOTH])]
    lines = [
        textwrap.fill(
            " -> ".join(merged(walk.files)),
            width=100,
            initial_indent=f"{name:<10}",
            subsequent_indent=" " * 10,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, walk in pieces
    ]
    return "\n".join(lines)


# Counts.


def measure(model: nn.Module, resnet: nn.Module) -> tuple[dict[str, Walk], dict[str, Any]]:
    """The walks of `model`, and the counts as they are printed and kept.

    A deep network adds its step that only applies, as most steps of a training are."""
    walks = stages(model)
    deep = stages(resnet)[APPLY]
    counts = {name: walk.counts for name, walk in walks.items()} | {RESNET: deep.counts}
    blocks = sum(any(True for _ in m.parameters(recurse=False)) for m in resnet.modules())
    facts = {"python": platform.python_version(), "resnet blocks": blocks, "stages": counts}
    return walks, facts


def table(facts: Mapping[str, Any], before: Mapping[str, Any] | None, markdown: bool) -> str:
    header = ["stage", "calls", "files", "changes of file", "calls a block"]
    rows = [_cells(name, facts) for name in facts["stages"]]
    if before:
        header += [f"{name} before" for name in header[1:]]
        rows = [row + _cells(row[0], before)[1:] for row in rows]
    return render(f"Calls of natgrad's functions, Python {facts['python']}", header, rows, markdown)


def _cells(stage: str, facts: Mapping[str, Any]) -> list[str]:
    counts = facts["stages"].get(stage)
    if counts is None:
        return [stage, "", "", "", ""]
    each = f"{counts['calls'] / facts['resnet blocks']:.0f}" if stage == RESNET else ""
    return [stage, *(f"{counts[name]:>6,}" for name in ("calls", "files", "changes")), each]


def steps(walks: Mapping[str, Walk]) -> list[Step]:
    """Both kinds of step as the picture takes them."""
    update = [("forward", walks[FORWARD]), ("backward", walks[BACKWARD]), *parts(walks[BOTH])]
    apply = [("forward and backward", walks[IDLE]), *parts(walks[APPLY])]
    drawn = []
    for title, pieces in {
        "A step that updates and refreshes": update,
        "A step that only applies": apply,
    }.items():
        counts = sum((walk for _, walk in pieces), Walk()).counts
        words = "{calls:,} calls, {files} files, {changes:,} changes of file".format(**counts)
        drawn.append(Step(title, words, [(name, walk.files) for name, walk in pieces]))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="FILE", help="what --json wrote, to compare with")
    parser.add_argument("--picture", metavar="FILE", type=Path, default=PICTURE)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    before = json.loads(Path(arguments.before).read_text()) if arguments.before else None
    torch.manual_seed(0)
    walks, facts = measure(FiveBlocks(), resnet20())
    print(table(facts, before, arguments.markdown))
    print("The files of one Conv2d in a step that updates and refreshes:\n")
    print(told(stages(nn.Conv2d(3, 4, 3, padding=1))))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(facts, indent=2) + "\n")
    kinds = ({"before": before["stages"]} if before else {}) | {"now": facts["stages"]}
    draw(steps(walks), kinds, arguments.picture)


if __name__ == "__main__":
    main()
