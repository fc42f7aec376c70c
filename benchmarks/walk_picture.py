"""The picture of `benchmarks/walk.py`: rooms as lanes, calls from left to right, counts as bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

# Lanes from top to bottom, from what the user calls to what everything rests on; others follow.
ROOMS = (
    "preconditioner",
    "kfac",
    "kfac/ranks",
    "capture",
    "layers",
    "structures",
    "inverses",
    "linalg",
    "comm",
)
COLOURS = {
    "forward": "#2a9d4a",
    "backward": "#e08a00",
    "update": "#1f6fb4",
    "refresh": "#c2302e",
    "apply": "#7a3fa0",
}
KINDS = {"before": "#b4bcc6", "now": "#1f6fb4"}
BETWEEN = 100  # calls' width between two steps
NARROW = 100  # calls too few to centre a name above
SHORTEST = 25
NAN = float("nan")  # where a line is interrupted


@dataclass(frozen=True)
class Step:
    """A training step: the file of every call in order, piece by piece."""

    title: str
    words: str
    pieces: Sequence[tuple[str, Sequence[str]]]

    @property
    def calls(self) -> int:
        return sum(len(files) for _, files in self.pieces)


def room(file: str) -> str:
    """The folder of a file; files of the package itself are rooms of their own."""
    path = PurePosixPath(file)
    return path.stem if path.parent == PurePosixPath() else str(path.parent)


def draw(
    steps: Sequence[Step], counts: Mapping[str, Mapping[str, Mapping[str, int]]], path: Path
) -> None:
    """The walk of every step; below it `counts` by kind ("before", "now"), stage and unit."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text, and the same walk gives the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "walk"}):
        figure = Figure(figsize=(13, 12), layout="constrained", facecolor="white")
        grid = figure.add_gridspec(2, 2, height_ratios=(3.4, 1), hspace=0.04)
        _draw_steps(figure.add_subplot(grid[0, :]), steps)
        calls, changes = (figure.add_subplot(grid[1, column]) for column in (0, 1))
        _draw_counts(calls, "calls", counts)
        _draw_counts(changes, "changes", counts)
        calls.set_title("Calls", fontsize=12, fontweight="bold", loc="left")
        changes.set_title("Changes of file", fontsize=12, fontweight="bold", loc="left")
        changes.set_yticklabels([])
        if len(counts) > 1:
            changes.legend(frameon=False, loc="upper right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=100)


def _draw_steps(axes: Any, steps: Sequence[Step]) -> None:
    rows = _rows({file for step in steps for _, files in step.pieces for file in files})
    _draw_lanes(axes, rows)
    start = 0
    ticks: dict[int, str] = {}
    for step in steps:
        axes.text(start, -5.9, step.title, fontsize=13, fontweight="bold")
        axes.text(start, -4.9, step.words, fontsize=10)
        _draw_walk(axes, start, step.pieces, rows)
        ticks |= {start + at: f"{at:,}" for at in range(0, step.calls, 250)}
        start += step.calls + BETWEEN
    axes.set_xlim(-12, start - BETWEEN + 12)
    axes.set_ylim(max(rows.values()) + 0.8, -6.8)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("calls of natgrad's functions since the step began")
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _rows(files: set[str]) -> dict[str, float]:
    """The height of every file, by room, with a gap between rooms."""
    order = {name: index for index, name in enumerate(ROOMS)}
    names = sorted(files, key=lambda file: (order.get(room(file), len(order)), room(file), file))
    rooms = list(dict.fromkeys(map(room, names)))
    return {file: index + 0.7 * rooms.index(room(file)) for index, file in enumerate(names)}


def _draw_lanes(axes: Any, rows: Mapping[str, float]) -> None:
    beside = axes.get_yaxis_transform()
    for index, (name, files) in enumerate(groupby(rows, key=room)):
        heights = [rows[file] for file in files]
        low, high = heights[0] - 0.7, heights[-1] + 0.7
        axes.axhspan(low, high, color=("#e3e9f0", "#f2f5f8")[index % 2], lw=0)
        place = {"transform": beside, "ha": "right", "va": "center"}
        axes.text(-0.008, (low + high) / 2, name, fontsize=12, fontweight="bold", **place)
    for file, height in rows.items():
        name = PurePosixPath(file).name
        axes.text(1.005, height, name, fontsize=8, va="center", transform=beside)


def _draw_walk(
    axes: Any, start: int, pieces: Sequence[tuple[str, Sequence[str]]], rows: Mapping[str, float]
) -> None:
    last: list[float] = []  # where the piece before ended
    for name, files in pieces:
        if not files:
            axes.text(start, -3.5, f"{name}: no call", color="#555555", fontsize=10)
            continue
        heights, end = [rows[file] for file in files], start + len(files)
        colour = COLOURS.get(name, "#555555")
        points = range(start - len(last), end)
        axes.step(points, last + heights, where="mid", color=colour, lw=0.5, alpha=0.7)
        # A stay in one file is a thick line over the thin ones of coming and going.
        moves = [at for at, (a, b) in enumerate(pairwise(heights), 1) if a != b]
        stays = list(pairwise([0, *moves, len(files)]))
        xs = [x for first, after in stays for x in (start + first - 0.5, start + after - 0.5, NAN)]
        ys = [y for first, _ in stays for y in (heights[first], heights[first], NAN)]
        axes.plot(xs, ys, color=colour, lw=2.2, solid_capstyle="butt")
        axes.hlines(-1.6, start, end, color=colour, lw=8)
        centred = len(files) > NARROW
        if name != "step" and len(files) > SHORTEST:  # a few calls are too short for a name
            place = {"ha": "center" if centred else "left", "fontsize": 11, "fontweight": "bold"}
            axes.text((start + end) / 2 if centred else start, -2.2, name, color=colour, **place)
        start, last = end, heights[-1:]


def _draw_counts(
    axes: Any, unit: str, counts: Mapping[str, Mapping[str, Mapping[str, int]]]
) -> None:
    names = list(counts["now"])
    thick = 0.8 / len(counts)
    for index, (kind, stages) in enumerate(counts.items()):
        values = [stages.get(name, {}).get(unit, 0) for name in names]
        places = [place + thick * (index + 0.5) for place in range(len(names))]
        axes.barh(places, values, thick, color=KINDS[kind], label=kind)
        for place, value in zip(places, values, strict=True):
            offset = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{value:,}", (value, place), fontsize=8, **offset)
    axes.set_yticks([place + 0.4 for place in range(len(names))], names, fontsize=10)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
