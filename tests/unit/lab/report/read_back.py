"""What a page says, read back from its HTML: elements, tables, and the numbers of its curves."""

import math
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "img"}


@dataclass(repr=False, eq=False)
class Element:
    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["Element"] = field(default_factory=list)
    parts: list = field(default_factory=list)  # children and text, in their order

    def all(self, tag=None, **wanted):
        """Those below it in their order; ``of`` stands for ``data-of``, ``kind`` for ``class``."""
        names = {"of": "data-of", "kind": "class"}
        for child in self.children:
            given = {key: child.attributes.get(names.get(key, key)) for key in wanted}
            if tag in (None, child.tag) and given == wanted:
                yield child
            yield from child.all(tag, **wanted)

    def one(self, tag=None, **wanted):
        (found,) = self.all(tag, **wanted)
        return found

    @property
    def text(self):
        return "".join(part if isinstance(part, str) else part.text for part in self.parts).strip()


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.top = Element("")
        self.open = [self.top]
        self.problems = []

    def handle_starttag(self, tag, attributes):
        made = Element(tag, {name: value or "" for name, value in attributes})
        self.open[-1].children.append(made)
        self.open[-1].parts.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if self.open[-1].tag == tag:
            self.open.pop()
        else:
            self.problems.append(f"</{tag}> closes <{self.open[-1].tag}>")

    def handle_data(self, data):
        self.open[-1].parts.append(data)


def parsed(text):
    reader = _Reader()
    reader.feed(text)
    assert not reader.problems
    assert len(reader.open) == 1
    return reader.top


def rows(table):
    """Cells of the body of a table."""
    body = table.one("tbody")
    return [tuple(cell.text for cell in row.all("td")) for row in body.all("tr")]


def curve(plot, group):
    """The numbers of a curve, from where it is drawn and what the ends of the axes stand for."""
    path = next(group.all("path")).attributes["d"]
    points = re.findall(r"[ML] *(-?[\d.]+)[ ,]+(-?[\d.]+)", path)
    across, along = (_scale(plot.attributes[name]) for name in ("data-x", "data-y"))
    return [(across(float(x)), along(float(y))) for x, y in points]


def _scale(text):
    kind, *rest = text.split()
    low, high, first, last = map(float, rest)

    def value(at):
        share = (at - first) / (last - first)
        if kind == "log":
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        return low + share * (high - low)

    return value
