"""Where data are looked for: the folder ``NATGRAD_DATA``, the cache, and Debian's place."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from natgrad.errors import DataError
from natgrad.lab.data.sources import Source

DEBIAN = Path("/usr/share/datasets")  # of packages such as dataset-fashion-mnist


def cache() -> Path:
    """``NATGRAD_CACHE``, or ``natgrad`` in the user's cache folder."""
    if own := os.environ.get("NATGRAD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "natgrad"


def places() -> tuple[Path, ...]:
    """In the order in which they are looked at."""
    given = os.environ.get("NATGRAD_DATA")
    first = (Path(given).expanduser(),) if given else ()
    return (*first, cache(), DEBIAN)


def find(source: Source, folder: Path | str | None = None) -> dict[str, Path]:
    """The path of each file of a data set, in ``folder`` or else in the first place with all."""
    if folder is None:
        candidates = [place / name for place in places() for name in source.folders]
    else:
        candidates = [Path(folder)]
    incomplete = None
    for candidate in candidates:
        found = {name: _present(candidate, name, source.endings) for name in source.files}
        here = {name: path for name, path in found.items() if path is not None}
        if len(here) == len(source.files):
            return here
        if here and incomplete is None:
            incomplete = candidate, [name for name in source.files if name not in here]
    if incomplete is not None:
        where, lacking = incomplete
        raise DataError(
            f"{source.title} in {where} lacks {_with_endings(lacking[0], source)}"
            f"{_others(lacking)}: {remedy(source)}."
        )
    looked = _listed([str(candidate) for candidate in candidates])
    if folder is not None:
        raise DataError(
            f"{source.title} is not in {looked}, which has no "
            f"{_with_endings(source.files[0], source)}: name the folder that has it."
        )
    raise DataError(
        f"{source.title} was not found: there is no {_with_endings(source.files[0], source)} in "
        f"{looked}; {remedy(source)}, or name the folder above {source.folders[0]} in NATGRAD_DATA."
    )


def folder(name: Path | str, what: str) -> Path:
    """A folder as it is named, or else below one of the places."""
    return _named(name, f"The folder {str(name)!r} of {what}", "a folder", Path.is_dir)


def file(name: Path | str, what: str) -> Path:
    """A file as it is named, or else below one of the places."""
    return _named(name, f"The file {str(name)!r} of {what}", "a file", Path.is_file)


def _named(name: Path | str, what: str, kind: str, there: Callable[[Path], bool]) -> Path:
    for candidate in (Path(name).expanduser(), *(place / name for place in places())):
        if there(candidate):
            return candidate
    raise DataError(
        f"{what} was not found, neither as it is named nor in "
        f"{_listed([str(place) for place in places()])}: name {kind} that is there."
    )


def remedy(source: Source) -> str:
    """What to do about files that are missing or spoilt."""
    if source.remotes:
        return f"run `natgrad data get {source.name}`"
    return "copy its files there"


def spoilt(path: Path, why: str, source: Source | None = None) -> DataError:
    """For a file that is not what it should be; ``why`` goes on after its name."""
    if source is None:
        return DataError(f"{path} {why}: replace it or remove it.")
    what = remedy(source) if source.remotes else "copy it anew"
    return DataError(f"{path} {why}: remove it and {what}.")


def _present(folder: Path, name: str, endings: Sequence[str]) -> Path | None:
    for ending in endings:
        if (path := folder / f"{name}{ending}").exists():
            return path
    return None


def _with_endings(name: str, source: Source) -> str:
    others = [f"{name}{ending}" for ending in source.endings]
    return " or ".join(others)


def _others(lacking: Sequence[str]) -> str:
    more = len(lacking) - 1
    return f" and {more} more file{'s' if more > 1 else ''}" if more else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
