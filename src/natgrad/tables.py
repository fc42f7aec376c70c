"""Reports as data that print as tables: in a terminal, in a log, in a notebook."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_NARROWEST = 40  # columns of a terminal below which a drawn table folds into nonsense
_LONGEST = 200  # rows above which drawing takes longer than reading: a plan has a row a factor


@dataclass(frozen=True)
class Column:
    name: str
    align: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns; `rows` is the data, `print(table)` the picture.

    `str()` gives a drawn table where `rich` is installed and the terminal can show it, and aligned
    plain text elsewhere and of very long ones, never with colours. `rich` itself prints it coloured
    (`__rich__`).
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"Table {self.title!r} has {len(self.columns)} columns, but the row {row!r} "
                    f"has {len(row)} cells. Give one cell for each of "
                    f"{[column.name for column in self.columns]}."
                )

    def column(self, name: str) -> tuple[str, ...]:
        """All cells under one name."""
        names = [column.name for column in self.columns]
        if name not in names:
            raise KeyError(f"Table {self.title!r} has no column {name!r}; it has {names}.")
        return tuple(row[names.index(name)] for row in self.rows)

    def plain(self) -> str:
        """Aligned text with nothing but the cells, spaces and dashes."""
        lines = [tuple(column.name for column in self.columns), *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]

        def aligned(cells: tuple[str, ...]) -> str:
            placed = (
                cell.rjust(width) if column.align == "right" else cell.ljust(width)
                for cell, width, column in zip(cells, widths, self.columns, strict=True)
            )
            return "  ".join(placed).rstrip()

        dashes = "  ".join("-" * width for width in widths)
        body = [aligned(lines[0]), dashes, *map(aligned, lines[1:])]
        return "\n".join(part for part in (self.title, *body, self.footer) if part)

    def __str__(self) -> str:
        plain = self.plain()
        natural = max(map(len, plain.splitlines())) + 2 * len(self.columns) + 2
        width = shutil.get_terminal_size(fallback=(natural, 24)).columns
        plainly = width < _NARROWEST or len(self.rows) > _LONGEST
        if plainly or not _stdout_shows_unicode():
            return plain
        try:
            from rich.console import Console
        except ImportError:
            return plain
        text = StringIO()
        Console(file=text, width=width, color_system=None, force_terminal=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich__(self) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        # Text, not str: a name such as `blocks[0]` is not markup.
        drawn = RichTable(
            title=Text(self.title) if self.title else None,
            caption=Text(self.footer) if self.footer else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for column in self.columns:
            drawn.add_column(Text(column.name), justify=column.align, overflow="fold")
        for row in self.rows:
            drawn.add_row(*map(Text, row))
        return drawn

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            return "".join(
                f'<{tag} style="text-align:{column.align}">{escape(cell)}</{tag}>'
                for cell, column in zip(cells, self.columns, strict=True)
            )

        head = line("th", tuple(column.name for column in self.columns))
        body = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        footer = f"<p>{escape(self.footer)}</p>" if self.footer else ""
        return (
            f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}"
        )


def bytes_text(count: float) -> str:
    """1536 -> '1.50 KiB'."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{_three_digits(count)} {unit}"
    return f"{_three_digits(count / 1024)} TiB"


def seconds_text(seconds: float) -> str:
    """0.00123 -> '1.23 ms', 3725 -> '1 h 02 min'."""
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    if seconds == 0:
        return "0 s"
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if seconds < limit:
            return f"{_three_digits(seconds * scale)} {unit}"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def _stdout_shows_unicode() -> bool:
    stdout: Any = sys.stdout  # None under pythonw
    return str(getattr(stdout, "encoding", None) or "").lower().startswith("utf")
