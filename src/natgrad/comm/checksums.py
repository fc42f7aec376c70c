"""Whether the files of a folder are those that were written: their sizes and SHA-256 digests.

A flipped bit in a tensor is still a tensor. So what was written is written down, and compared
before anything that was read is used.
"""

import json
import os
from collections.abc import Iterable, Mapping
from hashlib import file_digest
from pathlib import Path

from natgrad.errors import CheckpointError

NAME = "checksums.json"


def digests(paths: Iterable[Path]) -> dict[str, list[int | str]]:
    """Size and digest of each file, by name.

    Arguments:
        paths: of files in one folder.
    """
    found: dict[str, list[int | str]] = {}
    for path in paths:
        with path.open("rb") as file:
            found[path.name] = [path.stat().st_size, file_digest(file, "sha256").hexdigest()]
    return found


def write(folder: Path, found: Mapping[str, list[int | str]]) -> None:
    """Write down what is in a folder, and wait until it is on the disk.

    Arguments:
        folder: in which `NAME` is written.
        found: what `digests` gave, of all files there.
    """
    with (folder / NAME).open("w", encoding="utf-8") as file:
        json.dump(dict(sorted(found.items())), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def verify(folder: Path, only: Iterable[str] | None = None) -> None:
    """Raise `CheckpointError` if a file is not as it was written. A folder without checksums, of an
    older version or of another program, is taken as it is.

    Arguments:
        folder: with files, and what `write` wrote.
        only: names of the files to look at; ``None``: all that were written.
    """
    written = expected(folder)
    if only is None:
        verify_names(folder, (path.name for path in folder.iterdir()))
    for name in written if only is None else [n for n in only if n in written]:
        if digests([folder / name])[name] != written[name]:
            raise CheckpointError(f"'{folder / name}' is not what was written there: {_COPY}")


def expected(folder: Path) -> dict[str, list[int | str]]:
    """What was written down, by name of file; nothing if there is no such file.

    Arguments:
        folder: with files, and what `write` wrote.
    """
    path = folder / NAME
    if not path.is_file():
        return {}
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): list(value) for name, value in written.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is damaged: {_COPY}") from error


def verify_names(folder: Path, files: Iterable[str]) -> None:
    """Raise `CheckpointError` if a file that was written is gone.

    Arguments:
        folder: with files, and what `write` wrote.
        files: names of those that are there.
    """
    gone = expected(folder).keys() - set(files)
    if gone:
        raise CheckpointError(f"'{folder / min(gone)}' is missing: {_COPY}")


def flush(folder: Path) -> None:
    """Wait until the names in a folder are on the disk.

    Arguments:
        folder: whose files were made or renamed.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_COPY = "take another copy of the folder, or an older checkpoint."
