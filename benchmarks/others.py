"""The loops of others with one line more: `python -m benchmarks.others`.

Each loop has the model, data, optimizer, schedule, clip and batch size that its repository gives
it, written anew (`others_plain`, `others_text`): fewer steps, a narrower network where a processor
would need hours, no checkpoints and pictures. Nothing of it is changed for K-FAC. It is trained as
it is, at twice its rate, with a `Dogleg`, with the line at its defaults, with the root of the
curvature, and with `NaturalMuon` in the place of its optimizer, at its rate. What counts is the
loss on data that were not trained on.

All runs are appended to a file, so that seeds can be added later, and the table is made of it:

    python -m benchmarks.others --seeds 1 2 3 --json runs.jsonl
    python -m benchmarks.others --read runs.jsonl --write others --page docs/loops.md
"""

import argparse
import json
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import natgrad
from benchmarks.page import write

Settings = dict[str, Any]
LINES: dict[str, Settings | None] = {
    "as it is": None,
    "twice the rate": None,
    "dogleg": {"length": natgrad.lengths.Dogleg()},
    "default": {},
    "root": {"geometry": natgrad.geometry.Euclidean(0.5)},
    "in its place": {"geometry": natgrad.geometry.Euclidean()},
}
AS_IT_IS, INSTEAD, TWICE = "as it is", "in its place", "twice the rate"


class Line:
    """What is written behind the optimizer, in one run of a loop. ``preconditioners``: what it has
    made, to be looked at afterwards."""

    def __init__(self, name: str, extra: Settings | None = None) -> None:
        settings = LINES[name]
        self.settings = None if settings is None else {**settings, **(extra or {})}
        self.instead, self.twice = name == INSTEAD, name == TWICE
        self.preconditioners: list[natgrad.KFAC] = []

    def __call__(
        self, model: nn.Module, optimizer: Optimizer, rate: float, decay: float = 0.0
    ) -> Optimizer:
        """The optimizer that the loop goes on with.

        Arguments:
            model: its network, or one of several.
            optimizer: the loop's own.
            rate: of a `NaturalMuon` in its place.
            decay: the loop's weight decay, for the same.
        """
        if self.twice:
            doubled(optimizer)
        if self.settings is None:
            return optimizer
        if self.instead:
            own = natgrad.NaturalMuon(model, rate, weight_decay=decay, **self.settings)
            self.preconditioners.append(own.kfac)
            return own
        self.preconditioners.append(natgrad.KFAC(model, optimizer, **self.settings).attach())
        return optimizer


def doubled(optimizer: Optimizer) -> None:
    """Have an optimizer step at twice the rate that its loop sets, whenever it does so."""

    def times(factor: float) -> Callable[..., None]:
        def change(optimizer: Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= factor

        return change

    optimizer.register_step_pre_hook(times(2.0))
    optimizer.register_step_post_hook(times(0.5))


@dataclass(frozen=True)
class Loop:
    """One training loop. ``train(line, steps)`` returns the loss on data that it has not learnt
    from; everything random in it has been seeded. ``needs``: packages; ``before``: what need not be
    made in each run; ``extra``: settings of `KFAC` that the loop needs in any case."""

    title: str
    optimizer: str
    steps: int
    train: Callable[[Line, int], float]
    needs: tuple[str, ...] = ()
    before: Callable[[], object] = lambda: None
    extra: Settings = field(default_factory=dict)


@dataclass
class Run:
    """What one run has shown. ``said``: warnings of natgrad."""

    loop: str
    line: str
    seed: int
    steps: int
    loss: float
    seconds: float  # of CPU
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run(name: str, loop: Loop, line: str, seed: int, steps: int) -> Run:
    """Train once.

    Arguments:
        name: of the loop.
        loop: it.
        line: a name in `LINES`.
        seed: of weights, data and noise.
        steps: of training.
    """
    loop.before()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    written = Line(line, loop.extra)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        before = time.process_time()
        loss = loop.train(written, steps)
        spent = time.process_time() - before
    texts = [str(one.message) for one in heard]
    said = [text for text in texts if any(name in text for name in ("K-FAC", "KFAC", "natgrad"))]
    problems = [p for kfac in written.preconditioners for p in kfac.health().problems]
    loss = loss if math.isfinite(loss) else math.inf
    return Run(name, line, seed, steps, loss, spent, said, problems)


def table(runs: Sequence[Run], loops: dict[str, Loop]) -> str:
    """Markdown: medians over seeds, with the least and the largest where there are several."""
    shown = _trained(runs)
    lines = [
        f"| loop | its optimizer | steps | seeds | {' | '.join(shown)} |",
        f"|---|---|---:|---:|{'---:|' * len(shown)}",
    ]
    for name, loop in loops.items():
        found = {line: {} for line in shown}  # type: dict[str, dict[int, float]]
        steps = 0
        for one in runs:
            if one.loop == name:
                found[one.line][one.seed], steps = one.loss, one.steps
        if not steps:
            continue
        plain = found[AS_IT_IS]
        cells = [_cell(found[line], plain if found[line] is not plain else {}) for line in shown]
        seeds = max(len(each) for each in found.values())
        row = [loop.title, loop.optimizer, str(steps), str(seeds), *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _trained(runs: Sequence[Run]) -> list[str]:
    """The lines that there are runs of; that without any, which all are compared with, comes
    first."""
    return [line for line in LINES if line == AS_IT_IS or any(one.line == line for one in runs)]


def _cell(losses: dict[int, float], plain: dict[int, float]) -> str:
    """Bold where it is worse than the loop as it is, in the median."""
    if not losses:
        return ""
    middle = statistics.median(losses.values())
    text = f"{middle:.4g}"
    if plain and middle > statistics.median(plain[s] for s in losses if s in plain or not s):
        text = f"**{text}**"
    if len(losses) > 1:
        text += f" ({min(losses.values()):.4g} to {max(losses.values()):.4g})"
    return text


def costs(runs: Sequence[Run], loops: dict[str, Loop]) -> str:
    """Markdown: seconds of CPU a step, medians over seeds, relative to the loop as it is."""
    shown = _trained(runs)
    lines = [f"| loop | {' | '.join(shown)} |", f"|---|{'---:|' * len(shown)}"]
    for name, loop in loops.items():
        spent = [
            [one.seconds / one.steps for one in runs if (one.loop, one.line) == (name, line)]
            for line in shown
        ]
        if not spent[0]:
            continue
        plain = statistics.median(spent[0])
        others = [f"{statistics.median(s) / plain:.2f}x" if s else "" for s in spent[1:]]
        lines.append(f"| {loop.title} | {plain:.2g} s | {' | '.join(others)} |")
    return "\n".join(lines)


def all_loops() -> dict[str, Loop]:
    from benchmarks import others_plain, others_text

    return {**others_plain.LOOPS, **others_text.LOOPS}


def read(path: Path) -> list[Run]:
    """All runs of a file; of one that was repeated the last."""
    found: dict[tuple[str, str, int], Run] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        one = Run(**json.loads(line))
        found[one.loop, one.line, one.seed] = one
    return list(found.values())


def main(given: Sequence[str] | None = None) -> None:
    loops = all_loops()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loops", nargs="+", choices=list(loops), default=list(loops))
    parser.add_argument("--lines", nargs="+", choices=list(LINES), default=list(LINES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, help="of each loop, instead of its own number")
    parser.add_argument("--json", type=Path, help="append all runs to this file")
    parser.add_argument("--read", type=Path, help="a file of --json, instead of runs")
    parser.add_argument("--write", metavar="MARK", help="also write the tables between these marks")
    parser.add_argument("--page", type=Path, default=Path("docs/loops.md"))
    args = parser.parse_args(given)
    runs = read(args.read) if args.read else []
    for name in [] if args.read else args.loops:
        if missing := [each for each in loops[name].needs if find_spec(each) is None]:
            print(f"{name}: not trained, as {', '.join(missing)} is not installed", flush=True)
            continue
        for seed in args.seeds:
            for line in args.lines:
                one = run(name, loops[name], line, seed, args.steps or loops[name].steps)
                runs.append(one)
                print(f"{name}, {line}, seed {seed}: {one.loss:.4f}, {one.seconds:.0f} s")
                for text in [*one.said, *one.problems]:
                    print(f"    {text}")
                print(end="", flush=True)
                if args.json:
                    with args.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(one)) + "\n")
    print(text := f"{table(runs, loops)}\n\n{costs(runs, loops)}")
    if args.write:
        write(args.page, args.write, text)


if __name__ == "__main__":
    main()
