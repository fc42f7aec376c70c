"""A citation leads to the work: no private tags, and an entry for every name and year."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks")

# A letter and a number, such as an item of somebody's list: it says nothing to a reader.
TAG = re.compile(r"(?<![\w.`/-])[OPYKS]\d{1,2}(?![\w.`])")
CITATION = re.compile(
    r"\b(?P<name>[A-Z][^\W\d_]+)"
    r"(?: et al\.?,?| (?:and|&) [A-Z][^\W\d_]+,?|,)? "
    r"\(?(?P<year>(?:19|20)\d\d[a-z]?)\b"
)
ENTRY = re.compile(r"^- \*\*(?P<key>[^*]+?)\.?\*\*", re.MULTILINE)


def files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for suffix in ("py", "md"):
            yield from sorted((ROOT / folder).rglob(f"*.{suffix}"))


def citations(text: str) -> set[str]:
    """``Name Year`` of the first author; a citation may be broken over lines."""
    joined = re.sub(r"\s*\n\s*(#\s*)?", " ", text)
    return {f"{found['name']} {found['year']}" for found in CITATION.finditer(joined)}


def entries(text: str) -> set[str]:
    return {name for found in ENTRY.finditer(text) for name in citations(found["key"])}


def test_there_are_no_tags():
    here = Path(__file__)
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in files(*FOLDERS)
        if file != here
        for match in TAG.finditer(file.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["src", "examples", "docs"])
def test_every_citation_has_an_entry(folder):
    known = entries((ROOT / "docs" / "references.md").read_text(encoding="utf-8"))
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files(folder)
        if file.name != "references.md"
        for name in citations(file.read_text(encoding="utf-8")) - known
    }
    assert sorted(missing) == []


def test_every_entry_is_cited():
    text = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    cited = {
        name
        for file in files(*FOLDERS)
        if file.name not in ("references.md", "test_references.py")
        for name in citations(file.read_text(encoding="utf-8"))
    }
    assert sorted(entries(text) - cited) == []


def test_the_reader_finds_citations():
    text = "(Martens & Grosse 2015, sec. 6) Koh and\n    # Liang 2017; You et al., 2020; 3 steps"
    assert citations(text) == {"Martens 2015", "Koh 2017", "You 2020"}
    assert citations("MacKay 1992a, Huszár (2018)") == {"MacKay 1992a", "Huszár 2018"}
    assert entries("- **Osawa 2019.** K. Osawa. 2020\n- **Koh and Liang 2017** (x)") == {
        "Osawa 2019",
        "Koh 2017",
    }


def test_the_reader_finds_tags():
    assert TAG.findall("by (O15), P17: and Y6; not S3.x, `K1`, a/O2, O2-like, F1") == [
        "O15",
        "P17",
        "Y6",
        "O2",
    ]
