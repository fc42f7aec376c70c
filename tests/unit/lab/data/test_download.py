"""Downloads that are interrupted, refused, wrong, or have nowhere to go."""

import errno
import hashlib
import os
import re
import socket
from pathlib import Path

import pytest

from natgrad.errors import DataError, SettingError
from natgrad.lab.data import download as module
from natgrad.lab.data.download import download, is_right
from natgrad.lab.data.sources import Remote
from unit.lab.data.error_text import says
from unit.lab.data.misbehaving_server import Server, serving, without_proxy

CONTENT = bytes(range(256)) * 4000  # four chunks


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.fixture
def server():
    with serving() as server:
        server.files["f.bin"] = CONTENT
        yield server


def remote(content=CONTENT, name="f.bin"):
    return Remote(name, hashlib.sha256(content).hexdigest(), len(content))


def fails(server, path, *reasons, mirrors=None, what=None):
    """With these reasons, one for each mirror, and nothing in place."""
    mirrors = mirrors or [server.address]
    told = "; ".join(
        f"{mirror}f.bin {reason}" for mirror, reason in zip(mirrors, reasons, strict=True)
    )
    says(
        DataError,
        f"f.bin could not be downloaded ({told}): try again later, or name another mirror with "
        "--from.",
        lambda: download(what or remote(), mirrors, path),
    )
    assert not path.exists()


def part_of(path):
    return path.with_name(f"{path.name}.part")


def test_all_at_once(server, tmp_path):
    path = tmp_path / "here"
    heard = []
    download(remote(), [server.address], path, lambda *news: heard.append(news))
    assert path.read_bytes() == CONTENT
    assert not part_of(path).exists()
    assert server.asked == [("f.bin", None)]
    assert [name for name, _, _ in heard] == ["f.bin"] * len(heard)
    assert len(heard) >= 4
    here = [count for _, count, _ in heard]
    assert here == sorted(here)
    assert heard[-1] == ("f.bin", len(CONTENT), len(CONTENT))


@pytest.mark.parametrize("lengths", [True, False])
def test_interrupted_and_resumed_by_itself(server, tmp_path, lengths):
    server.cuts, server.lengths = [300_000, 0, 0, 200_000], lengths
    path = tmp_path / "here"
    download(remote(), [server.address], path)
    assert path.read_bytes() == CONTENT
    ranges = [asked for _, asked in server.asked]
    assert ranges == [None, *["bytes=300000-"] * 3, "bytes=500000-"]


def test_interrupted_and_resumed_by_another_run(server, tmp_path):
    path = tmp_path / "here"
    part_of(path).write_bytes(CONTENT[:123_456])
    heard = []
    download(remote(), [server.address], path, lambda *news: heard.append(news))
    assert path.read_bytes() == CONTENT
    assert server.asked == [("f.bin", "bytes=123456-")]
    assert heard[0][1] > 123_456


def test_interrupted_just_before_its_end_was_noticed(server, tmp_path):
    path = tmp_path / "here"
    part_of(path).write_bytes(CONTENT)
    download(remote(), [server.address], path)
    assert path.read_bytes() == CONTENT
    assert not server.asked


def test_a_server_without_ranges(server, tmp_path):
    server.ranges, server.cuts = False, [300_000, 400_000]
    path = tmp_path / "here"
    part_of(path).write_bytes(CONTENT[:100])
    download(remote(), [server.address], path)
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == ["bytes=100-", "bytes=300000-", "bytes=400000-"]


def test_a_server_that_never_gets_far(server, tmp_path):
    """Without ranges it starts anew each time, which is no progress."""
    server.ranges, server.cuts = False, [1000] * 20
    path = tmp_path / "here"
    fails(server, path, "ended after 1,000 of 1,024,000 bytes, 4 times")
    assert len(server.asked) == 4
    assert part_of(path).read_bytes() == CONTENT[:1000]


def test_a_server_that_goes_on_elsewhere(server, tmp_path):
    server.starts = [50]
    path = tmp_path / "here"
    part_of(path).write_bytes(CONTENT[:100])
    download(remote(), [server.address], path)
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == ["bytes=100-", None]


def test_a_part_that_is_too_long(server, tmp_path):
    path = tmp_path / "here"
    part_of(path).write_bytes(CONTENT + b"x")
    download(remote(), [server.address], path)
    assert path.read_bytes() == CONTENT
    assert server.asked == [("f.bin", None)]


def test_a_server_that_has_less_than_the_part(server, tmp_path):
    """It answers 416; what is there then is not what was asked for."""
    server.files["f.bin"] = CONTENT[:50]
    path = tmp_path / "here"
    part_of(path).write_bytes(CONTENT[:100])
    fails(server, path, "has 50 bytes instead of 1024000")
    assert not part_of(path).exists()


def test_a_part_of_something_else(server, tmp_path):
    """The checksum shows it, and a second attempt is made from the start."""
    path = tmp_path / "here"
    part_of(path).write_bytes(b"x" * 100)
    download(remote(), [server.address], path)
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == ["bytes=100-", None]


def test_a_wrong_checksum(server, tmp_path):
    wrong = bytes(reversed(CONTENT))
    server.files["f.bin"] = wrong
    path = tmp_path / "here"
    had, right = (hashlib.sha256(data).hexdigest()[:12] for data in (wrong, CONTENT))
    fails(server, path, f"has the checksum {had}… instead of {right}…")
    assert not part_of(path).exists()
    assert len(server.asked) == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_another_size(server, tmp_path, resumed):
    server.files["f.bin"] = CONTENT + b"x"
    path = tmp_path / "here"
    if resumed:
        part_of(path).write_bytes(CONTENT[:100])
    fails(server, path, "has 1024001 bytes instead of 1024000")


def test_another_size_that_is_not_told(server, tmp_path):
    server.files["f.bin"], server.lengths = CONTENT * 2, False
    path = tmp_path / "here"
    fails(server, path, "is longer than 1,024,000 bytes")
    assert not part_of(path).exists()


def test_a_passing_failure(server, tmp_path):
    server.statuses = [503, 429, 500]
    path = tmp_path / "here"
    download(remote(), [server.address], path)
    assert path.read_bytes() == CONTENT
    assert len(server.asked) == 4


def test_failures_that_do_not_pass(server, tmp_path):
    server.statuses = [503] * 4
    fails(server, tmp_path / "here", "answers 503 Service Unavailable, 4 times")
    assert len(server.asked) == 4


def test_it_waits_longer_each_time(server, tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(module, "PAUSE", 0.5)
    monkeypatch.setattr(module.time, "sleep", waited.append)
    server.statuses = [503] * 4
    fails(server, tmp_path / "here", "answers 503 Service Unavailable, 4 times")
    assert waited == [0.5, 1.0, 2.0]


def test_not_found(server, tmp_path):
    del server.files["f.bin"]
    fails(server, tmp_path / "here", "answers 404 Not Found")
    assert len(server.asked) == 1  # it will not be there a second later


def test_the_next_mirror(server, tmp_path):
    server.files["b/f.bin"] = server.files.pop("f.bin")
    path = tmp_path / "here"
    mirrors = [f"{server.address}a/", f"{server.address}b"]  # with or without a slash
    download(remote(), mirrors, path)
    assert path.read_bytes() == CONTENT
    assert [asked for asked, _ in server.asked] == ["a/f.bin", "b/f.bin"]


def test_no_mirror_at_all(server, tmp_path):
    server.files.clear()
    server.statuses = [404, 403]
    mirrors = [f"{server.address}a/", f"{server.address}b/"]
    path = tmp_path / "here"
    fails(server, path, "answers 404 Not Found", "answers 403 Forbidden", mirrors=mirrors)


def test_nobody_answers(tmp_path):
    """A port that is taken, so that nobody else listens there, but not listened to."""
    with socket.socket() as taken, without_proxy():
        taken.bind(("127.0.0.1", 0))
        server = Server(taken.getsockname()[1])
        fails(server, tmp_path / "here", "cannot be reached: Connection refused, 4 times")


def test_a_proxy_is_not_asked_for_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
    with serving() as server:
        server.files["f.bin"] = CONTENT
        download(remote(), [server.address], tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == CONTENT


def test_a_connection_that_breaks_off(server, tmp_path, monkeypatch):
    class Answer:
        status, headers = 200, {}

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def read(self, count):
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(module.urllib.request, "urlopen", lambda *args, **options: Answer())
    fails(server, tmp_path / "here", "broke off: Connection reset by peer, 4 times")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("size", [100, len(CONTENT)])
def test_a_full_disk(server, tmp_path, size):
    """Writing to /dev/full fails as it does on a full disk, at once or when the file is closed."""
    path = tmp_path / "here"
    part_of(path).symlink_to("/dev/full")
    server.files["f.bin"] = CONTENT[:size]
    room = {100: "100 B", len(CONTENT): "1000 KiB"}[size]
    says(
        DataError,
        f"{part_of(path)} cannot be written (No space left on device): make way for it, or name "
        f"another folder with {room} of room with --to.",
        lambda: download(remote(CONTENT[:size]), [server.address], path),
    )
    assert not path.exists()


def test_a_disk_that_fills_up_keeps_what_has_arrived(server, tmp_path, monkeypatch):
    path = tmp_path / "here"
    opened = Path.open

    def limited(self, mode="r", *args):
        file = opened(self, mode, *args)
        if mode in ("ab", "wb"):
            write = file.write

            def full(data):
                if file.tell() + len(data) > 600_000:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(data)

            return _Limited(file, full)
        return file

    class _Limited:
        def __init__(self, file, write):
            self.file, self.write = file, write

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "open", limited)
        with pytest.raises(DataError, match="No space left on device"):
            download(remote(), [server.address], path)
    here = part_of(path).stat().st_size
    assert 0 < here <= 600_000
    download(remote(), [server.address], path)
    assert path.read_bytes() == CONTENT
    assert server.asked[-1] == ("f.bin", f"bytes={here}-")


def test_no_folder_to_write_to(server, tmp_path):
    path = tmp_path / "nowhere" / "here"
    with pytest.raises(DataError, match=re.escape(f"{part_of(path)} cannot be written (No such")):
        download(remote(), [server.address], path)


def test_a_folder_in_its_place(server, tmp_path):
    path = tmp_path / "here"
    path.mkdir()
    with pytest.raises(DataError, match=re.escape(f"{path} cannot be written (Is a directory)")):
        download(remote(), [server.address], path)
    assert part_of(path).exists()


@pytest.mark.parametrize(
    "mirror",
    [
        "file:///etc/",
        "file://localhost/etc/",
        "ftp://x/",
        "example.org/data",
        "http:///x",
        "http://[x",
    ],
)
def test_addresses(tmp_path, mirror):
    says(
        SettingError,
        f"The mirror is {mirror!r} but must be an address that starts with http:// or https://: "
        "name the folder that has the files.",
        lambda: download(remote(), [mirror], tmp_path / "here"),
    )


def test_names_are_quoted(server, tmp_path):
    server.files["a%20b.bin"] = CONTENT
    download(remote(name="a b.bin"), [server.address], tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == CONTENT


def test_is_right(tmp_path):
    path = tmp_path / "here"
    assert not is_right(path, remote())
    path.write_bytes(CONTENT[:-1])
    assert not is_right(path, remote())
    path.write_bytes(CONTENT[:-1] + b"x")
    assert not is_right(path, remote())
    path.write_bytes(CONTENT)
    assert is_right(path, remote())
