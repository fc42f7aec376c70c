"""A picture of the page: drawn once, it becomes a part of the page and, where wanted, a PNG.

In the page letters stay letters, and black becomes the colour of the text around it, so that one
picture is right on a light ground and on a dark one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from natgrad.lab.report.canvas import INK, figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 72.0  # of an inch, the unit of an SVG
_PNG = 150  # dots of an inch


@dataclass(frozen=True)
class Mark:
    """``owner``: with whom it comes and goes; ``title``: what pointing at it says."""

    owner: str
    title: str
    curve: bool


@dataclass
class Sheet:
    """A figure under way, and what is to be known of its parts."""

    figure: Figure
    marks: dict[str, Mark] = field(default_factory=dict)
    plots: dict[str, tuple[Axes, str, str]] = field(default_factory=dict)

    def mark(
        self, artist: Artist, owner: str = "", title: str = "", *, curve: bool = False
    ) -> None:
        name = f"mark{len(self.marks)}"
        artist.set_gid(name)
        self.marks[name] = Mark(owner, title, curve)

    def readable(self, axes: Axes, x: str, y: str) -> None:
        """Pointing at its curves gives their numbers, which are called ``x`` and ``y``."""
        name = f"plot{len(self.plots)}"
        axes.set_gid(name)
        self.plots[name] = (axes, x, y)


@dataclass(frozen=True)
class Picture:
    """``name`` is that of its file; ``alt`` says in words what is to be seen."""

    name: str
    title: str
    alt: str
    width: float  # inches
    height: float
    draw: Callable[[Sheet], None]
    caption: str = ""

    def drawn(self, png: Path | None) -> str:
        """The SVG; a PNG of the same goes to the folder ``png``."""
        with figure(self.width, self.height, None) as made:
            sheet = Sheet(made)
            self.draw(sheet)
            # Laid out once, for the SVG and the PNG.
            made.set_dpi(_POINTS)
            made.draw_without_rendering()
            made.set_layout_engine("none")
            if png is not None:
                made.savefig(png / f"{self.name}.png", dpi=_PNG, facecolor="white")
            text = StringIO()
            made.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        return _inline(text.getvalue(), self, sheet)


def _inline(svg: str, picture: Picture, sheet: Sheet) -> str:
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    # So that the parts of all pictures of a page have names of their own.
    own = f"{picture.name}-"
    body = re.sub(r'\b(id="|xlink:href="#|url\(#)', lambda found: found[1] + own, body)
    body = body.replace("xlink:href", "href").replace(INK, "currentColor")
    # Letters are those of the page. Older matplotlibs write size and family as one.
    body = re.sub(r"\bfont: [^;\"]*?([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"\bfont-family: [^;\"]*(; *)?", "", body)
    body = re.sub(r'\b(d|x|y|width|height|transform|points)="([^"]*)"', _rounded, body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    body = re.sub(
        rf'<g id="{re.escape(own)}(mark\d+)"([^>]*)>',
        lambda m: _marked(sheet.marks[m[1]], m[2]),
        body,
    )
    body = re.sub(
        rf'<g id="{re.escape(own)}(plot\d+)"',
        lambda m: "<g" + _scaled(*sheet.plots[m[1]], picture),
        body,
    )
    size = f"{picture.width * _POINTS:g} {picture.height * _POINTS:g}"
    return f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(picture.alt)}">{body.strip()}'


def _rounded(found: re.Match[str]) -> str:
    """A hundredth of a point is less than a pixel."""
    numbers = re.sub(
        r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), found[2]
    )
    return f'{found[1]}="{numbers}"'


def _marked(mark: Mark, rest: str) -> str:
    kind = ' class="curve"' if mark.curve else ""
    owner = f' data-of="{escape(mark.owner)}"' if mark.owner else ""
    title = f"<title>{escape(mark.title)}</title>" if mark.title else ""
    return f"<g{kind}{owner}{rest}>{title}"


def _scaled(axes: Axes, x: str, y: str, picture: Picture) -> str:
    """Where the axes are, and which numbers their ends stand for."""
    box: Any = axes.get_position()
    wide, high = picture.width * _POINTS, picture.height * _POINTS
    left, right = (round(wide * share, 2) for share in (box.x0, box.x1))
    bottom, top = (round(high * (1 - share), 2) for share in (box.y0, box.y1))
    (low, up), (least, most) = axes.get_xlim(), axes.get_ylim()
    across = f"{axes.get_xscale()} {low:.6g} {up:.6g} {left:g} {right:g}"
    along = f"{axes.get_yscale()} {least:.6g} {most:.6g} {bottom:g} {top:g}"
    names = f'data-xname="{escape(x)}" data-yname="{escape(y)}"'
    return f' class="plot" data-x="{across}" data-y="{along}" {names}'
