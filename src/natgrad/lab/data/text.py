"""Text files, plain or compressed by gzip, in UTF-8."""

from os.path import exists
from pathlib import Path

from natgrad.errors import DataError
from natgrad.lab.data import files
from natgrad.lab.data.dataset import Split
from natgrad.lab.data.locations import find, spoilt
from natgrad.lab.data.sources import TINYSHAKESPEARE, WIKITEXT2, Source


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
    """The text, 1,115,394 characters.

    Arguments:
        folder: that has the files; ``None`` looks into ``NATGRAD_DATA``, the cache and
            ``/usr/share/datasets``.
    """
    return read(find(TINYSHAKESPEARE, folder)["tinyshakespeare.txt"], TINYSHAKESPEARE)


def wikitext2(folder: Path | str | None = None) -> Split[str]:
    """WikiText-2: what to learn from, and what is meant for validation.

    Arguments:
        folder: that has the files; ``None`` looks into ``NATGRAD_DATA``, the cache and
            ``/usr/share/datasets``.
    """
    found = find(WIKITEXT2, folder)
    return Split(*(read(found[name], WIKITEXT2) for name in ("train.txt", "valid.txt")))
