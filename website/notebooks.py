"""Pages of docs/gallery: Markdown with Python whose output stands below it.

    python website/notebooks.py              runs all of them and writes outputs and pictures
    python website/notebooks.py spectra      runs one

A block ``python`` is a cell. What it prints stands in a block ``text`` right after it; pictures are
files that it saves, which the page shows as any other. All cells of a page share one namespace.
The site offers every page as a notebook as well (`as_notebook`).
"""

import base64
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"

CELL = re.compile(
    r"^```python\n(?P<source>.*?)^```\n(?P<shown>\n```text\n(?P<output>.*?)^```\n)?", re.M | re.S
)
PICTURE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<file>[^)/]+\.(?:svg|png))\)")
KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Cell:
    """Python and what it printed, or (without code) prose."""

    source: str
    output: str = ""
    code: bool = True
    line: int = 0


def cells(text: str) -> Iterator[Cell]:
    at = 0
    for match in CELL.finditer(text):
        if text[at : match.start()].strip():
            yield Cell(text[at : match.start()].strip(), code=False)
        line = text[: match.start("source")].count("\n")
        yield Cell(match["source"], match["output"] or "", line=line)
        at = match.end()
    if text[at:].strip():
        yield Cell(text[at:].strip(), code=False)


def pictures(text: str) -> list[str]:
    return [match["file"] for match in PICTURE.finditer(text)]


def run(page: Path, text: str, folder: Path) -> list[str]:
    """What each block of a page prints when all are run in a folder, where pictures are saved."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    printed = []
    with contextlib.chdir(folder), _drawing(), _one_thread():
        for cell in cells(text):
            if cell.code:
                out = io.StringIO()
                code = compile("\n" * cell.line + cell.source, str(page), "exec")
                with contextlib.redirect_stdout(out):
                    exec(code, namespace)
                printed.append(out.getvalue())
    return printed


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in one order, however many cores there are."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Pictures that are the same files whenever they are drawn."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib
    from matplotlib import pyplot

    settings = {
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.figsize": (6.4, 3.2),
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "natgrad",
    }
    with matplotlib.rc_context(settings):
        saved = matplotlib.figure.Figure.savefig

        def savefig(self: Any, name: Any, **given: Any) -> None:
            saved(self, name, metadata={"Date": None} if str(name).endswith("svg") else {}, **given)

        matplotlib.figure.Figure.savefig = savefig  # type: ignore[method-assign]
        try:
            yield
        finally:
            matplotlib.figure.Figure.savefig = saved  # type: ignore[method-assign]
            pyplot.close("all")


def with_outputs(text: str, printed: list[str]) -> str:
    """The page with other outputs."""
    left = iter(printed)

    def filled(match: re.Match[str]) -> str:
        output = next(left)
        shown = f"\n```text\n{output}```\n" if output else ""
        return f"```python\n{match['source']}```\n{shown}"

    return CELL.sub(filled, text)


def as_notebook(text: str, page: Path) -> str:
    """The page in Jupyter's format, with its outputs and pictures in it."""
    found: list[dict[str, Any]] = []
    for number, cell in enumerate(cells(text)):
        one: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        if cell.code:
            shown = {"output_type": "stream", "name": "stdout", "text": cell.output}
            one |= {"cell_type": "code", "execution_count": None, "source": cell.source.rstrip()}
            one["outputs"] = [shown] if cell.output else []
        else:
            one |= {"cell_type": "markdown", "source": PICTURE.sub(_attached, cell.source)}
            inside = {name: _attachment(page.parent / name) for name in pictures(cell.source)}
            if inside:
                one["attachments"] = inside
        found.append(one)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"cells": found, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False)


def _attached(match: re.Match[str]) -> str:
    return f"![{match['text']}](attachment:{match['file']})"


def _attachment(file: Path) -> dict[str, str]:
    return {KINDS[file.suffix]: base64.b64encode(file.read_bytes()).decode()}


def main(names: list[str]) -> None:
    for page in sorted(GALLERY.glob("*.md")):
        if page.stem != "index" and (not names or page.stem in names):
            text = page.read_text(encoding="utf-8")
            page.write_text(with_outputs(text, run(page, text, GALLERY)), encoding="utf-8")
            print(f"notebooks: {page.relative_to(GALLERY.parents[1])}")


if __name__ == "__main__":
    main(sys.argv[1:])
