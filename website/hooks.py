"""What the site has beside docs/: the reference, pages from outside of docs/, and sources.

    api/...        a page for each public room, from its `__all__`; mkdocstrings fills in docstrings
    ARCHITECTURE.md, CHANGELOG.md, ...    as they are in the repository
    source/...     files that pages link to, so that no link leaves the site

docs/ is written for GitHub. Where Python-Markdown reads it differently, it is adapted here.
"""

import re
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import notebooks  # in this folder, where mkdocs looks for what its hooks import
import reference

ROOT = Path(__file__).parents[1]
# Pages that are taken from the repository as they are.
TAKEN = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "benchmarks/RESULTS.md",
)
# What stands for a file in the site.
INSTEAD = {"README.md": "docs/index.md"}
PICTURES = (".png", ".svg")

FENCE = re.compile(r"^(?P<indent> *)(?P<mark>```+)[^\n]*\n.*?^ *(?P=mark) *$", re.M | re.S)
LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"(?<![`\[])`(?P<code>natgrad\.(?P<path>[A-Za-z_][\w.]*)[^`\n]*)`(?![`\]])")
ITEM = re.compile(r"^(?:[-*+]|1[.)]) ")
OUTSIDE = re.compile(r"[a-z]+:|#|/")


def repository_path(site_path: str) -> str:
    """Where a page of the site lies in the repository."""
    return site_path if site_path in TAKEN else f"docs/{site_path}"


def site_path(path: str) -> str | None:
    """Where a file of the repository lies in the site; None if there is no such file."""
    path = INSTEAD.get(path, path)
    if path in TAKEN:
        return path
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not (ROOT / path).exists():
        return None
    if path.endswith(PICTURES):
        return f"source/{path}"
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def in_prose(text: str, change: Any) -> str:
    """Apply ``change`` to everything but blocks of code."""
    found, at = [], 0
    for fence in FENCE.finditer(text):
        found += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*found, change(text[at:])])


def resolved(target: str, page: str) -> tuple[str, str]:
    """The file in the repository that a link of a page leads to, and the place in it."""
    path, _, anchor = target.partition("#")
    return normpath(join(page, "..", path)), f"#{anchor}" if anchor else ""


def linked(text: str, page: str) -> list[str]:
    """Files of the repository that a page (its own path there) links to."""
    found: list[str] = []

    def look(prose: str) -> str:
        targets = (match["target"] for match in LINK.finditer(prose))
        found.extend(resolved(t, page)[0] for t in targets if not OUTSIDE.match(t))
        return prose

    in_prose(text, look)
    return found


def relinked(text: str, page: str) -> str:
    """With links as they are in the site."""
    own = site_path(page) or page

    def move(match: re.Match[str]) -> str:
        if OUTSIDE.match(match["target"]):
            return match[0]
        path, anchor = resolved(match["target"], page)
        moved = site_path(path)
        if moved is None:
            return match[0]  # which mkdocs warns of
        return f"{match['text']}({relpath(moved, join(own, '..'))}{anchor})"

    return in_prose(text, lambda prose: LINK.sub(move, prose))


def with_reference(text: str, page: str) -> str:
    """With names such as `natgrad.Eigen()` leading to the reference."""

    def link(match: re.Match[str]) -> str:
        place = reference.place_of(match["path"])
        if place is None:
            return match[0]
        return f"[`{match['code']}`]({relpath(place, join(page, '..'))})"

    def change(prose: str) -> str:
        lines = prose.split("\n")
        return "\n".join(line if line.startswith("#") else _outside_links(line) for line in lines)

    def _outside_links(line: str) -> str:
        found, at = [], 0
        for other in LINK.finditer(line):
            found += [CODE.sub(link, line[at : other.start()]), other[0]]
            at = other.end()
        return "".join([*found, CODE.sub(link, line[at:])])

    return in_prose(text, change)


def with_room_for_lists(text: str) -> str:
    """On GitHub a list may follow a paragraph at once; here it needs an empty line."""

    def change(prose: str) -> str:
        found: list[str] = []
        for line in prose.split("\n"):
            before = found[-1] if found else ""
            if ITEM.match(line) and before.strip() and before[0] != " " and not ITEM.match(before):
                found.append("")
            found.append(line)
        return "\n".join(found)

    return in_prose(text, change)


def source(path: str) -> str:
    """The page of a source file, or of a folder."""
    file = ROOT / path
    if file.is_dir():
        rows = [f"| [`{name}`]({link}) | {said} |" for name, link, said in _inside(file)]
        return "\n".join([f"# {path}/", "", "| | |", "|---|---|", *rows, ""])
    language = {".py": "python", ".toml": "toml", ".json": "json"}.get(file.suffix, "text")
    text = file.read_text(encoding="utf-8")
    mark = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))])
    return f"# {path}\n\n{mark}{language}\n{text}\n{mark}\n"


def _inside(folder: Path) -> list[tuple[str, str, str]]:
    """Python files of a folder: name, link, and first sentence."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        said = reference.first_sentence(reference.parsed(file))
        if said:
            name = file.relative_to(folder).as_posix()
            found.append((name, f"{name}.md", said))
    return found


UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


# Called by mkdocs, in this order.


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give every page a place in the navigation; those of the gallery in the order of its index,
    which is found nowhere in itself and so comes first."""
    nav: list[Any] = config.nav or []
    pages = sorted(file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md"))
    gallery = [page.as_posix() for page in pages if page.parts[0] == "gallery"]
    rooms = ["api/training.md", *(reference.page_of(room) for room in reference.ROOMS)]
    for entry in nav:
        if "Gallery" in entry:
            index = (ROOT / "docs" / "gallery" / "index.md").read_text(encoding="utf-8")
            gallery.sort(key=lambda page: index.find(f"({page.removeprefix('gallery/')})"))
            entry["Gallery"] = gallery
        elif "Reference" in entry:
            entry["Reference"] = ["api/index.md", *rooms]
    named = set(_named(nav))
    others = [page.as_posix() for page in pages if page.as_posix() not in named]
    config.nav = [*nav, {"More": others}] if others else nav
    return config


def _named(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inside = nav.values() if isinstance(nav, dict) else nav
    return [page for one in inside for page in _named(one)]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path in TAKEN:
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, path, content=text))
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    wanted = set()
    for file in files.documentation_pages():
        page = repository_path(file.src_uri)
        wanted |= set(linked(file.content_string, page))
        if file.src_uri.startswith("gallery/") and file.src_uri != "gallery/index.md":
            notebook = file.src_uri.removesuffix(".md") + ".ipynb"
            content = notebooks.as_notebook(file.content_string, ROOT / page)
            files.append(File.generated(config, notebook, content=content))
    for path in sorted(wanted):
        place = site_path(path)
        if place is not None and place.startswith("source/"):
            _append_source(path, files, config)
    return files


def _append_source(path: str, files: Files, config: MkDocsConfig) -> None:
    place = str(site_path(path))
    if files.get_file_from_path(place) is not None:
        return
    if path.endswith(PICTURES):
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
        return
    files.append(File.generated(config, place, content=UNSEARCHED + source(path)))
    if (ROOT / path).is_dir():
        for name, _, _ in _inside(ROOT / path):
            _append_source(f"{path}/{name}", files, config)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    if path.startswith(("source/", "api/")):
        return markdown
    text = re.sub(r"^( *```+\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)
    text = with_room_for_lists(relinked(text, repository_path(path)))
    text = with_reference(text, path)
    if path.startswith("gallery/") and path != "gallery/index.md":
        name = Path(path).with_suffix(".ipynb").name
        text = re.sub(r"\A(# [^\n]*\n)", rf"\1\n[As a notebook]({name})\n", text)
    return text
