"""What all pictures share: colours, sizes of letters, and how a figure becomes a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import floor, isfinite, log10
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from natgrad.errors import SettingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PathTo = str | PathLike[str] | None

# Told apart by readers who do not see red and green apart (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
FAINT = "#8a8a8a"
INK = "#010203"  # black to the eye; a page puts the colour of its own text in its place
ENDINGS = (".png", ".svg", ".pdf")
_LETTERS: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "natgrad",  # the same picture is the same file
    "axes.unicode_minus": True,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}
ACROSS = 4  # panels in a row
_LONGEST = 24  # characters of a layer's name; its end says more than its beginning


@contextmanager
def figure(width: float, height: float, path: PathTo) -> Iterator[Figure]:
    """An empty one of ``width`` by ``height`` inches, which is written to ``path`` when it is done
    (``None``: nowhere); the ending of the name says what it becomes."""
    check(path)
    available()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_LETTERS):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made
        if path is not None:
            dated = {"Date": None} if Path(path).suffix.lower() == ".svg" else {}
            made.savefig(path, dpi=100, metadata=dated)


def available() -> None:
    """Whether pictures can be drawn at all."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingError(
            "Pictures need matplotlib, which is not installed: pip install 'natgrad[report]'."
        ) from None


def check(path: PathTo) -> None:
    """Whether a picture can be written there, before anything is computed for it."""
    if path is None:
        return
    file = Path(path)
    if file.suffix.lower() not in ENDINGS:
        raise SettingError(
            f"A picture cannot be written to {str(file)!r}, whose ending says nothing: name a "
            f"file that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}."
        )
    if not file.absolute().parent.is_dir():
        raise SettingError(
            f"A picture cannot be written to {str(file)!r}, as there is no folder "
            f"{str(file.parent)!r}: make it, or name a file elsewhere."
        )


def shape(count: int) -> tuple[int, int]:
    """Rows and columns of ``count`` panels."""
    rows = -(-count // ACROSS)
    return rows, -(-count // rows)


def panels(made: Figure, count: int, **options: Any) -> Sequence[Axes]:
    """One beside the other, in rows of ``ACROSS`` at most."""
    found: Any = made.subplots(*shape(count), squeeze=False, **options)
    for axes in found.flat[count:]:
        axes.set_axis_off()
    return list(found.flat[:count])


def bare(axes: Axes) -> None:
    """Without the lines that frame nothing."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def short(name: str) -> str:
    return name if len(name) <= _LONGEST else "…" + name[1 - _LONGEST :]


def logarithmic(axis: Axis) -> None:
    """With numbers as one writes them, also between powers of ten where there are few of those."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    name = axis.axis_name  # type: ignore[attr-defined]  # "x" or "y"
    getattr(axis.axes, f"set_{name}scale")("log")
    low, high = axis.get_view_interval()
    decades = log10(high) - log10(low)
    between = () if decades >= 2 else (2, 5) if decades >= 0.8 else (1.5, 2, 3, 5, 7)
    axis.set_major_locator(LogLocator(subs=(1, *between), numticks=7 if not between else None))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(NullLocator())


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float, digits: int = 6) -> str:
    """0.02 -> '0.02', 20000 -> '20,000', 2e-7 -> '2·10⁻⁷', of so many digits at most."""
    if not isfinite(value):
        return "not finite"
    value = float(f"{value:.{digits}g}")
    if not value or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.10g}"
    power = floor(log10(abs(value)) + 1e-9)
    times = f"{value / 10.0**power:.{digits}g}"
    raised = "10" + str(power).translate(_RAISED)
    return raised if times == "1" else f"{times}·{raised}"
