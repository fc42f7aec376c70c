"""Text files, plain or compressed by gzip, in UTF-8."""

from os.path import exists
from pathlib import Path

from natgrad.data import files
from natgrad.data.places import find, spoilt
from natgrad.data.rows import Split
from natgrad.data.sources import TINYSHAKESPEARE, WIKITEXT2, Source
from natgrad.errors import DataError


def read(path: Path | str, source: Source | None = None) -> str:
    """All of it, with its line ends as they are."""
    path = Path(path).expanduser()
    if not exists(path):
        raise DataError(f"There is no text {path}: name a file that is there.")
    try:
        return files.read(path, source).decode("utf-8")
    except UnicodeDecodeError as error:
        raise spoilt(path, f"is no text in UTF-8 (byte {error.start:,})", source) from error


def tinyshakespeare(folder: Path | str | None = None) -> str:
    """1,115,394 characters."""
    return read(find(TINYSHAKESPEARE, folder)["tinyshakespeare.txt"], TINYSHAKESPEARE)


def wikitext2(folder: Path | str | None = None) -> Split[str]:
    """WikiText-2: what to learn from, and what is meant for validation."""
    found = find(WIKITEXT2, folder)
    return Split(*(read(found[name], WIKITEXT2) for name in ("train.txt", "valid.txt")))
