"""Measuring and printing: interleaved times, peak memory of a process, a table with verdicts.

    average step = sum over kinds of (seconds of the kind x its number in a cycle) / cycle

The step of plain SGD and every kind of K-FAC step are measured in turn in one process, so that a
slow moment of the machine hits all of them. A cycle of update every u and refresh every r steps
is then put together from the kinds instead of being run: at 10/100 that is 90 stale, 9 update
and 1 update-and-refresh step.
"""

import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

Kind = str  # "stale", "update", "refresh" (without an update) or "both"


@dataclass
class Times:
    """Seconds of the single calls of one function."""

    seconds: list[float] = field(default_factory=list)

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleave(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warmup: int = 2,
    burst: int = 1,
    after: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Times]:
    """Call the functions in turn, `burst` times each, `repeats` rounds; every call is timed.

    `after[name]` is called, untimed, after every call of that name, those of the warm-up included.
    """
    after = after or {}
    for _ in range(warmup):
        for name, call in calls.items():
            call()
            if name in after:
                after[name]()
    times = {name: Times() for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            for _ in range(burst):
                start = time.perf_counter()
                call()
                times[name].seconds.append(time.perf_counter() - start)
                if name in after:
                    after[name]()
    return times


def kinds(update_every: int, refresh_every: int) -> Counter[Kind]:
    """How often each kind of step occurs in one cycle, when both are due at step 0."""
    cycle = math.lcm(update_every, refresh_every)
    names = {(0, 0): "stale", (1, 0): "update", (0, 1): "refresh", (1, 1): "both"}
    return Counter(
        names[step % update_every == 0, step % refresh_every == 0] for step in range(cycle)
    )


def average_step(seconds: Mapping[Kind, float], update_every: int, refresh_every: int) -> float:
    """Mean seconds of a step over a cycle, from the seconds of a stale, update and both step.

    Where a refresh falls on a step without an update, the update's share is taken off.
    """
    full = {"refresh": seconds["stale"] + seconds["both"] - seconds["update"], **seconds}
    counts = kinds(update_every, refresh_every)
    return sum(full[kind] * count for kind, count in counts.items()) / counts.total()


def peak_megabytes(
    module: str, *arguments: str, repeats: int = 1, environment: Mapping[str, str] | None = None
) -> float:
    """Least peak resident memory (MB) of `repeats` runs of `python -m module arguments`.

    The module prints `peak_resident_bytes()` as its last line.
    """
    variables = {**os.environ, **(environment or {})}
    root = Path(__file__).resolve().parents[1]
    peaks = []
    for _ in range(repeats):
        command = [sys.executable, "-m", module, *arguments]
        run = subprocess.run(
            command, cwd=root, env=variables, check=True, stdout=subprocess.PIPE, text=True
        )
        peaks.append(int(run.stdout.split()[-1]) / 1e6)
    return min(peaks)


def peak_resident_bytes() -> int:
    """The most memory this process ever held (VmHWM where there is /proc, else ru_maxrss)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Row:
    """One figure; `goal` is an upper limit, or a lower one when `at_least`."""

    name: str
    figure: float
    unit: str = ""
    goal: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.goal is None or math.isnan(self.figure):
            return ""
        met = self.figure >= self.goal if self.at_least else self.figure <= self.goal
        return "met" if met else "MISSED"

    def cells(self) -> tuple[str, str, str, str, str]:
        sign = ">=" if self.at_least else "<="
        goal = "" if self.goal is None else f"{sign} {_number(self.goal, '')}"
        return self.name, _number(self.figure, self.unit), goal, self.verdict, self.note


@dataclass
class Table:
    """Rows under a title; prints aligned, or as Markdown."""

    title: str
    rows: list[Row] = field(default_factory=list)
    note_name: str = ""

    def render(self, markdown: bool = False) -> str:
        header = ("what", "figure", "goal", "verdict", self.note_name)
        return render(self.title, header, [row.cells() for row in self.rows], markdown)


def render(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False
) -> str:
    """Columns padded to their width, the first to the left and numbers to the right."""
    keep = [i for i in range(len(header)) if header[i] or any(row[i] for row in rows)]
    lines = [[line[i] for i in keep] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keep))]
    padded = [
        [line[i].rjust(w) if i == 1 else line[i].ljust(w) for i, w in enumerate(widths)]
        for line in lines
    ]
    if markdown:
        rule = ["-" * (w - 1) + (":" if i == 1 else "-") for i, w in enumerate(widths)]
        body = "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))
        return f"### {title}\n\n{body}\n"
    rule = ["-" * w for w in widths]
    body = "\n".join("  ".join(line).rstrip() for line in (padded[0], rule, *padded[1:]))
    return f"{title}\n{body}\n"


def _number(value: float, unit: str) -> str:
    text = f"{value:.2e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"
    return f"{text} {unit}".rstrip() if unit != "x" else f"{text}x"


def machine() -> dict[str, str]:
    """What the figures were measured on, and of which commit."""
    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": processor,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or "none",
        "command": " ".join(["python", "-m", _module_name(), *sys.argv[1:]]),
    }


def _module_name() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"
