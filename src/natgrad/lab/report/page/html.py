"""Pieces of HTML: sections, tables, pictures and lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from natgrad.lab.report.page.colours import Owner
from natgrad.lab.report.page.figure import Picture
from natgrad.tables import Table

_LONG = 14  # rows above which a table is folded
_SPREAD = re.compile(r" (\(.*)$")  # of a number, which has a line of its own


@dataclass
class Section:
    """``body`` is HTML; ``inner`` sections have headings one level below."""

    title: str
    body: list[str] = field(default_factory=list)
    inner: list[Section] = field(default_factory=list)

    def add(self, *parts: str) -> Section:
        self.body += parts
        return self

    def html(self, level: int, names: Names) -> str:
        name = names(self.title, level)
        own = f'<section id="{name}"><h{level}>{escape(self.title)}</h{level}>'
        inner = "".join(one.html(level + 1, names) for one in self.inner)
        return f"{own}\n{''.join(self.body)}{inner}</section>\n"


class Names:
    """Of anchors: each once."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.links: list[str] = []

    def __call__(self, title: str, level: int) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "part"
        name, i = f"s-{plain}", 1
        while name in self.taken:
            i += 1
            name = f"s-{plain}-{i}"
        self.taken.add(name)
        if level < 4:
            inner = ' class="inner"' if level == 3 else ""
            self.links.append(f'<li{inner}><a href="#{name}">{escape(title)}</a></li>')
        return name

    def listed(self) -> str:
        return "".join(self.links)


class Gallery:
    """Draws pictures, and PNGs of them into the folder ``png`` if there is one."""

    def __init__(self, png: Path | None) -> None:
        self.png = png

    def __call__(self, pictures: Iterable[Picture | None]) -> str:
        """Beside each other where there is room."""
        shown = "".join(self._one(one) for one in pictures if one is not None)
        return f'<div class="pictures">{shown}</div>\n' if shown else ""

    def _one(self, picture: Picture) -> str:
        caption = f"<span>{escape(picture.caption)}</span>" if picture.caption else ""
        return (
            f'<figure id="{picture.name}"><figcaption><b>{escape(picture.title)}</b>{caption}'
            f"</figcaption>{picture.drawn(self.png)}</figure>\n"
        )


def paragraph(text: str, kind: str = "") -> str:
    """``kind`` is a class of the style sheet."""
    named = f' class="{kind}"' if kind else ""
    return f"<p{named}>{escape(text)}</p>\n"


def cards(found: Sequence[tuple[str, str, str]]) -> str:
    """What it is, the number, and what is to be said of it."""
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b>"
        f"{f'<span>{escape(about)}</span>' if about else ''}</dd></div>"
        for name, value, about in found
    )
    return f'<dl class="cards">{shown}</dl>\n' if shown else ""


def table(found: Table, owners: Mapping[str, Owner] | None = None, *, fold: bool = True) -> str:
    """In a box of its own, in which it moves if it is too wide; a long one is folded. Rows whose
    first cell is the name of an owner have its colour."""
    drawn = _table(found, owners or {})
    if fold and len(found.rows) > _LONG:
        return details(f"{found.title}: {len(found.rows)} rows", drawn)
    return drawn


def details(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>\n"


def _table(found: Table, owners: Mapping[str, Owner]) -> str:
    def cell(tag: str, text: str, column: int, mark: str = "") -> str:
        right = ' class="right"' if found.columns[column].align == "right" else ""
        shown = _SPREAD.sub(r" <small>\1</small>", escape(text)) if right else escape(text)
        return f"<{tag}{right}>{mark}{shown}</{tag}>"

    head = "".join(cell("th", one.name, i) for i, one in enumerate(found.columns))
    body = []
    for row in found.rows:
        owner = owners.get(row[0])
        mark = swatch(owner) if owner else ""
        cells = (cell("td", text, i, mark if i == 0 else "") for i, text in enumerate(row))
        body.append(f"<tr>{''.join(cells)}</tr>\n")
    title = f"<caption><span>{escape(found.title)}</span></caption>" if found.title else ""
    footer = paragraph(found.footer, "note") if found.footer else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(found.title)}"><table>'
        f"{title}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{footer}\n"
    )


def swatch(owner: Owner) -> str:
    return f'<i class="swatch" style="background:{owner.ink}"></i>'


def switches(owners: Sequence[Owner]) -> str:
    """Boxes that show and hide all that is an owner's in pictures, by `hiding`."""
    shown = "".join(
        f'<label><input type="checkbox" checked data-hides="{escape(one.key)}">{swatch(one)}'
        f"{escape(one.name)}</label>"
        for one in owners
    )
    return f'<fieldset class="switches"><legend>Show</legend>{shown}</fieldset>\n'


def hiding(body: str) -> str:
    """A line of style for each of the boxes in ``body``, which then need no script."""
    keys = re.findall(r'data-hides="([^"]+)"', body)
    return "".join(
        f'body:has([data-hides="{key}"]:not(:checked)) [data-of="{key}"] {{ display: none; }}\n'
        for key in keys
    )


def said(sentences: Sequence[str]) -> str:
    shown = "".join(f"<li>{escape(text)}</li>" for text in sentences)
    return f'<ul class="said">{shown}</ul>\n' if shown else ""


def listed(found: Sequence[tuple[str, str]]) -> str:
    """Names with what is said of them."""
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in found)
    return f'<dl class="listed">{shown}</dl>\n' if shown else ""
