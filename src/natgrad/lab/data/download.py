"""A file over HTTP: resumed where it was interrupted, checked by SHA-256, in place all at once."""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

from natgrad.errors import DataError, SettingError
from natgrad.lab.data.sources import Remote
from natgrad.tables import bytes_text

Report: TypeAlias = Callable[[str, int, int], None]  # name, bytes that are here, bytes in all

TRIES = 4  # without a further byte
PAUSE = 1.0  # seconds before the second of them, doubled each time
TIMEOUT = 30.0  # seconds without an answer
CHUNK = 1 << 18
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # answers that may be other ones a moment later


class _PassingError(Exception):
    """May go better the next time."""


class _MirrorError(Exception):
    """This mirror does not have it."""


def download(
    remote: Remote, mirrors: Sequence[str], path: Path, report: Report | None = None
) -> None:
    """Bring ``remote`` from the first of ``mirrors`` that has it to ``path``.

    What has arrived lies in ``path`` with the ending ``.part`` until all of it is here and right.
    """
    part = path.with_name(f"{path.name}.part")
    reasons = []
    for mirror in mirrors:
        address = _address(mirror, remote.name)
        try:
            _complete(address, part, remote, report)
        except _MirrorError as error:
            reasons.append(f"{address} {error}")
            continue
        with writing(path):
            os.replace(part, path)
        return
    raise DataError(
        f"{remote.name} could not be downloaded ({'; '.join(reasons)}): try again later, or name "
        "another mirror with --from."
    )


def is_right(path: Path, remote: Remote) -> bool:
    """Whether the file is there and has the size and the checksum."""
    try:
        return path.stat().st_size == remote.size and _sha256(path) == remote.sha256
    except OSError:
        return False


@contextmanager
def writing(path: Path, size: int = 0) -> Iterator[None]:
    """Says in one sentence why something cannot be written; ``size`` in bytes is what it takes."""
    try:
        yield
    except OSError as error:
        room = f" with {bytes_text(size)} of room" if size else ""
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}): make way for it, or name "
            f"another folder{room} with --to."
        ) from error


def _complete(address: str, part: Path, remote: Remote, report: Report | None) -> None:
    """All of the file in ``part``, with the right checksum."""
    resumed = _size(part) > 0
    _patiently(address, part, remote, report)
    found = _sha256(part)
    if found != remote.sha256 and resumed:  # an earlier part may have come from elsewhere
        part.unlink()
        _patiently(address, part, remote, report)
        found = _sha256(part)
    if found != remote.sha256:
        part.unlink()
        raise _MirrorError(f"has the checksum {found[:12]}… instead of {remote.sha256[:12]}…")


def _patiently(address: str, part: Path, remote: Remote, report: Report | None) -> None:
    tries, most = 0, _size(part)
    while True:
        try:
            return _go_on(address, part, remote, report)
        except _PassingError as error:
            # Only what is more than ever counts as progress: without ranges all starts anew.
            if (size := _size(part)) > most:
                tries, most = 0, size
            tries += 1
            if tries >= TRIES:
                raise _MirrorError(f"{error}, {tries} times") from error
        time.sleep(PAUSE * 2 ** (tries - 1))


def _go_on(address: str, part: Path, remote: Remote, report: Report | None) -> None:
    here = _size(part)
    if here > remote.size:
        part.unlink()
        here = 0
    if here == remote.size:
        return
    # Without this a server may compress on the fly, and sizes mean nothing.
    headers = {"User-Agent": "natgrad", "Accept-Encoding": "identity"}
    if here:
        headers["Range"] = f"bytes={here}-"
    with _opened(urllib.request.Request(address, headers=headers), part) as answer:
        start = _start(answer, here, part, remote)
        with writing(part, remote.size), part.open("ab" if start else "wb") as file:
            here = start
            for chunk in _chunks(answer):
                here += len(chunk)
                if here > remote.size:
                    break
                file.write(chunk)
                if report is not None:
                    report(remote.name, here, remote.size)
    if here > remote.size:
        part.unlink()
        raise _MirrorError(f"is longer than {remote.size:,} bytes")
    if here < remote.size:
        raise _PassingError(f"ended after {here:,} of {remote.size:,} bytes")


@contextmanager
def _opened(request: urllib.request.Request, part: Path) -> Iterator[Any]:
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is no beginning of what is there
            part.unlink()
            raise _PassingError("refused to go on from there") from error
        kind = _PassingError if error.code in _PASSING else _MirrorError
        raise kind(f"answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _PassingError(f"cannot be reached: {_why(error)}") from error
    with answer:
        yield answer


def _start(answer: Any, here: int, part: Path, remote: Remote) -> int:
    """Where in the file the answer begins."""
    if answer.status == 206:
        unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
        span, _, total = rest.partition("/")
        if unit != "bytes" or span.partition("-")[0] != str(here):
            part.unlink()
            raise _PassingError("did not go on where it was asked to")
        if total not in ("*", str(remote.size)):
            raise _MirrorError(f"has {total} bytes instead of {remote.size}")
        return here
    length = answer.headers.get("Content-Length")
    if length is not None and length != str(remote.size):
        raise _MirrorError(f"has {length} bytes instead of {remote.size}")
    return 0


def _chunks(answer: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk: bytes = answer.read(CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(f"broke off: {_why(error)}") from error
        if not chunk:
            return
        yield chunk


def _address(mirror: str, name: str) -> str:
    try:
        parts = urlsplit(mirror)
        right = parts.scheme in ("http", "https") and bool(parts.netloc)
    except ValueError:  # of brackets that hold no address
        right = False
    if not right:
        raise SettingError(
            f"The mirror is {mirror!r} but must be an address that starts with http:// or "
            "https://: name the folder that has the files."
        )
    return f"{mirror.rstrip('/')}/{quote(name)}"


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason or type(error).__name__)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
