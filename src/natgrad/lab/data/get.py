"""A data set from its mirrors into a folder; what is there already and right is left alone."""

import os
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from natgrad.errors import DataError, SettingError
from natgrad.lab.data.download import Report, download, is_right, writing
from natgrad.lab.data.locations import cache
from natgrad.lab.data.locks import Lock
from natgrad.lab.data.sources import ALL, Source
from natgrad.tables import bytes_text


def named(name: str) -> Source:
    """The data set that can be brought here by this name."""
    there = [source for source in ALL if source.remotes]
    for source in there:
        if source.name == name:
            return source
    raise SettingError(
        f"There is no data set {name!r} to get: name one of "
        f"{', '.join(source.name for source in there)}."
    )


def get(
    source: Source,
    to: Path | str | None = None,
    mirrors: Sequence[str] | None = None,
    report: Report | None = None,
) -> Path:
    """Bring a data set here, unless it is; returns its folder. Files are checked by SHA-256, and
    what was interrupted is resumed. Where another process is about to bring the same, it is waited
    for.

    Arguments:
        source: one of `natgrad.lab.data.sources.ALL` that has ``remotes``; `named`, in the same
            file, finds one by its name.
        to: folder in which the data set's own folder is made; ``None`` is the cache.
        mirrors: addresses that are tried in this order, each with the files below it; ``None`` is
            the data set's own.
        report: is called as ``report(name, bytes that are here, bytes in all)`` while a file comes;
            ``None`` tells nobody.
    """
    folder = (cache() if to is None else Path(to).expanduser()) / source.folders[0]
    if _complete(source, folder):
        return folder
    with writing(folder, source.size):
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder / ".lock")
    with lock:
        if not _complete(source, folder):
            _bring(source, folder, mirrors or source.mirrors, report)
    return folder


def _complete(source: Source, folder: Path) -> bool:
    if source.archive:
        paths = [folder / name for name in source.files]
        return all(path.is_file() and path.stat().st_size == source.file_size for path in paths)
    return all(is_right(folder / remote.local, remote) for remote in source.remotes)


def _bring(source: Source, folder: Path, mirrors: Sequence[str], report: Report | None) -> None:
    # An archive lies beside its folder, and goes away when it has been unpacked.
    home = folder.parent if source.archive else folder
    missing = [remote for remote in source.remotes if not is_right(home / remote.local, remote)]
    with writing(folder, source.size):
        _check_room(source, folder, sum(remote.size for remote in missing))
    for remote in missing:
        download(remote, mirrors, home / remote.local, report)
    if source.archive:
        for remote in source.remotes:
            _unpack(home / remote.local, source, folder)
            (home / remote.local).unlink()


def _check_room(source: Source, folder: Path, download_size: int) -> None:
    needed = download_size + source.file_size * len(source.files)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{source.title} needs {bytes_text(needed)} but {folder} has room for "
            f"{bytes_text(free)}: make way for it, or name another folder with --to."
        )


def _unpack(archive: Path, source: Source, folder: Path) -> None:
    """The files of the data set and no others, whatever folders they have in the archive."""
    lacking = set(source.files)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if name in lacking else None
                if content is None:
                    continue
                part = folder / f"{name}.part"
                with writing(folder / name, source.file_size):
                    with part.open("wb") as file:
                        shutil.copyfileobj(content, file)
                    os.replace(part, folder / name)
                lacking.remove(name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(
            f"{archive} cannot be unpacked ({error}): remove it and run `natgrad data get "
            f"{source.name}`."
        ) from error
    if lacking:
        raise DataError(
            f"{archive} has no {min(lacking)}: remove it and run `natgrad data get {source.name}`."
        )
