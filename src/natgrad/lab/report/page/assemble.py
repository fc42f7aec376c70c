"""The page: what each folder holds, one after the other, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path

from natgrad.errors import SettingError
from natgrad.lab.compare import Comparison
from natgrad.lab.report.canvas import available
from natgrad.lab.report.page import comparison_section, run_section, side_by_side
from natgrad.lab.report.page.folders import read as read_folder
from natgrad.lab.report.page.html import Gallery, Names, Section, hiding, paragraph
from natgrad.lab.report.page.run_folder import Run
from natgrad.lab.train.state import write_text

NAME = "report.html"

PathTo = str | PathLike[str]
Found = Run | Comparison


def write(
    folders: Sequence[PathTo] | PathTo,
    path: PathTo | None = None,
    png: PathTo | None = None,
    title: str | None = None,
) -> Path:
    """A page of all ``folders`` at ``path``, by default in the first of them; PNGs of its pictures
    go to the folder ``png``. The same folders give the same bytes."""
    given = [folders] if isinstance(folders, str | PathLike) else list(folders)
    if not given:
        raise SettingError("A page needs something to show: name the folder of a run.")
    available()
    paths = [Path(one) for one in given]
    out = paths[0] / NAME if path is None else Path(path)
    if not out.absolute().parent.is_dir():
        raise SettingError(
            f"The page cannot be written to {out}, as there is no folder {out.parent}: make it, or "
            "name a file elsewhere."
        )
    found = [read_folder(one) for one in paths]
    gallery = Gallery(_made(png))
    write_text(out, html(list(zip(_named(paths), paths, found, strict=True)), gallery, title))
    return out


def html(found: Sequence[tuple[str, Path, Found]], gallery: Gallery, title: str | None) -> str:
    """Of names, folders, and what they hold."""
    if len(found) == 1:
        _, folder, one = found[0]
        heading, about, parts = (
            _heading(one),
            [_lead(one)],
            _sections(one, folder, _kind(one), gallery),
        )
    else:
        heading, about, parts = _headings(found), [], _several(found, gallery)
    names = Names()
    body = "".join(part.html(2, names) for part in parts)
    heading = title or heading
    style, script = (
        (files(__package__) / name).read_text(encoding="utf-8")
        for name in ("style.css", "script.js")
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # a browser would ask a server for one
        f"<title>{escape(heading)}</title>\n<style>\n{style}{hiding(body)}</style>\n</head>\n<body>\n"
        f'<div class="page">\n<header><h1>{escape(heading)}</h1>\n'
        f"{''.join(paragraph(text, 'lead') for text in about)}</header>\n"
        f'<nav aria-label="Sections"><ul>{names.listed()}</ul></nav>\n<main>\n{body}</main>\n'
        "<footer>Made by natgrad report.</footer>\n</div>\n"
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _several(found: Sequence[tuple[str, Path, Found]], gallery: Gallery) -> list[Section]:
    parts = []
    runs = [(name, one) for name, _, one in found if isinstance(one, Run)]
    comparisons = [(name, one) for name, _, one in found if isinstance(one, Comparison)]
    if len(comparisons) > 1:
        parts.append(side_by_side.comparisons(comparisons))
    if len(runs) > 1:
        parts.append(side_by_side.runs(runs, gallery))
    for i, (name, folder, one) in enumerate(found, 1):
        about = paragraph(_lead(one), "lead")
        inner = _sections(one, folder, f"{_kind(one)}{i}", gallery)
        parts.append(Section(name, [about], inner))
    return parts


def _kind(found: Found) -> str:
    """With which the names of its pictures begin."""
    return "run" if isinstance(found, Run) else "comparison"


def _sections(found: Found, folder: Path, name: str, gallery: Gallery) -> list[Section]:
    if isinstance(found, Run):
        return run_section.sections(found, name, gallery)
    return comparison_section.sections(found, folder, name, gallery)


def _lead(found: Found) -> str:
    return run_section.lead(found) if isinstance(found, Run) else comparison_section.lead(found)


def _heading(found: Found) -> str:
    if isinstance(found, Run):
        about = run_section.about(found)
        return about if about == found.name else f"{found.name}: {about}"
    return f"{found.name}: optimizers compared"


def _headings(found: Sequence[tuple[str, Path, Found]]) -> str:
    kinds = {isinstance(one, Run) for _, _, one in found}
    if len(kinds) > 1:
        return "Runs and comparisons"
    return f"{len(found)} {'runs' if kinds.pop() else 'comparisons'}"


def _named(paths: Sequence[Path]) -> list[str]:
    """By the last parts of their paths, as many as tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path.absolute().name} ({i})" for i, path in enumerate(paths, 1)]


def _made(png: PathTo | None) -> Path | None:
    if png is None:
        return None
    folder = Path(png)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"The pictures cannot be written to {folder} ({error.strerror}): name another folder."
        ) from error
    return folder
