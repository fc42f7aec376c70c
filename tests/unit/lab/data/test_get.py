"""Whole data sets are brought into their folders, and archives unpacked."""

import gzip
import hashlib
import importlib
import io
import os
import shutil
import tarfile
import time
from collections import namedtuple

import pytest

import forked
from natgrad.errors import DataError, SettingError
from natgrad.lab.data import get
from natgrad.lab.data.get import named
from natgrad.lab.data.locations import find
from natgrad.lab.data.sources import MNIST, Remote, Source
from unit.lab.data.error_text import says
from unit.lab.data.misbehaving_server import serving

module = importlib.import_module("natgrad.lab.data.get")

FILES = {"one.txt": b"1" * 100, "two.txt": b"2" * 100}


def remote(name, content, to=""):
    return Remote(name, hashlib.sha256(content).hexdigest(), len(content), to)


def tar(files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture
def server(places):
    with serving() as server:
        yield server


def plain(server, names=("one.txt", "two.txt")):
    server.files |= {name: FILES[name] for name in names}
    remotes = (remote("one.txt", FILES["one.txt"]), remote("two.txt", FILES["two.txt"]))
    return Source(
        "s", "S", "", ("sub/s",), ("one.txt", "two.txt"), ("",), remotes, (server.address,)
    )


def packed(server, content=None, file_size=100):
    content = content if content is not None else tar({f"x/{k}": v for k, v in FILES.items()})
    server.files["s.tar.gz"] = content
    return Source(
        "s",
        "S",
        "",
        ("s",),
        tuple(FILES),
        remotes=(remote("s.tar.gz", content),),
        mirrors=(server.address,),
        archive=True,
        file_size=file_size,
    )


def test_files_go_to_the_cache(server, places):
    source = plain(server)
    heard = []
    assert get(source, report=lambda *news: heard.append(news)) == places.cache / "sub/s"
    assert {name: path.read_bytes() for name, path in find(source).items()} == FILES
    assert [name for name, _, _ in heard] == ["one.txt", "two.txt"]


def test_what_is_right_is_left_alone(server, places):
    source = plain(server)
    get(source)
    server.asked.clear()
    get(source)
    assert not server.asked
    (places.cache / "sub/s/two.txt").write_bytes(b"x" * 100)
    get(source)
    assert server.asked == [("two.txt", None)]
    assert (places.cache / "sub/s/two.txt").read_bytes() == FILES["two.txt"]


def test_to_a_folder_and_from_a_mirror(server, tmp_path, monkeypatch):
    source = plain(server)
    server.files = {f"mirror/{name}": content for name, content in server.files.items()}
    with pytest.raises(DataError, match="404"):
        get(source, tmp_path / "own")
    found = get(source, str(tmp_path / "own"), [f"{server.address}mirror"])
    assert found == tmp_path / "own/sub/s"
    monkeypatch.setenv("NATGRAD_DATA", str(tmp_path / "own"))
    assert find(source)["one.txt"] == tmp_path / "own/sub/s/one.txt"


def test_another_name_here(server, places):
    server.files["input.txt"] = b"text"
    source = Source(
        "s", "S", "", ("s",), ("s.txt",), ("",), (remote("input.txt", b"text", "s.txt"),),
        (server.address,),
    )  # fmt: skip
    get(source)
    assert find(source)["s.txt"].read_bytes() == b"text"


def test_one_file_is_missing(server, places):
    source = plain(server, ["one.txt"])
    with pytest.raises(DataError, match=r"two.txt could not be downloaded .*404"):
        get(source)
    assert (places.cache / "sub/s/one.txt").read_bytes() == FILES["one.txt"]
    server.files["two.txt"] = FILES["two.txt"]
    server.asked.clear()
    get(source)
    assert server.asked == [("two.txt", None)]


def test_an_archive_is_unpacked_and_goes_away(server, places):
    source = packed(server)
    assert get(source) == places.cache / "s"
    assert {name: path.read_bytes() for name, path in find(source).items()} == FILES
    assert sorted(path.name for path in places.cache.rglob("*")) == ["one.txt", "s", "two.txt"]
    server.asked.clear()
    get(source)
    assert not server.asked
    (places.cache / "s/one.txt").write_bytes(b"short")
    get(source)
    assert len(server.asked) == 1
    assert (places.cache / "s/one.txt").read_bytes() == FILES["one.txt"]


def test_an_archive_that_was_not_unpacked_yet(server, places):
    source = packed(server)
    places.cache.mkdir()
    (places.cache / "s.tar.gz").write_bytes(server.files["s.tar.gz"])
    get(source)
    assert not server.asked
    assert {name: path.read_bytes() for name, path in find(source).items()} == FILES


def test_an_archive_cannot_write_elsewhere(server, places):
    """Names lead out of the folder; only the last part of those that are wanted is looked at."""
    evil = {
        "../../evil.txt": b"x",
        "/tmp/natgrad-evil.txt": b"x",
        "../../one.txt": FILES["one.txt"],
    }
    get(packed(server, tar({**evil, "x/two.txt": FILES["two.txt"]})))
    assert sorted(path.name for path in places.cache.rglob("*")) == ["one.txt", "s", "two.txt"]
    assert sorted(path.name for path in places.cache.parent.iterdir()) == ["cache"]


def test_an_archive_without_a_file(server, places):
    source = packed(server, tar({"x/one.txt": FILES["one.txt"]}))
    says(
        DataError,
        f"{places.cache / 's.tar.gz'} has no two.txt: remove it and run `natgrad data get s`.",
        lambda: get(source),
    )


@pytest.mark.parametrize(
    "content",
    [b"no archive", tar({"x/one.txt": b"1" * 5000})[:-30]],
    ids=["none", "cut off"],  # bytes would differ from run to run
)
def test_a_broken_archive(server, places, content):
    source = packed(server, content)
    with pytest.raises(DataError) as caught:
        get(source)
    assert str(caught.value).startswith(f"{places.cache / 's.tar.gz'} cannot be unpacked (")
    assert str(caught.value).endswith("): remove it and run `natgrad data get s`.")


def test_too_little_room(server, places, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(150))
    says(
        DataError,
        f"S needs 200 B but {places.cache / 'sub/s'} has room for 150 B: make way for it, or name "
        "another folder with --to.",
        lambda: get(plain(server)),
    )
    source = packed(server)
    with pytest.raises(DataError, match=f"S needs {source.size + 200} B but"):
        get(source)
    assert not server.asked


def test_a_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    says(
        DataError,
        f"{tmp_path / 'file/own/sub/s'} cannot be written (Not a directory): make way for it, or "
        "name another folder with 200 B of room with --to.",
        lambda: get(plain(server), tmp_path / "file/own"),
    )
    assert not server.asked


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(server, tmp_path):
    (tmp_path / "own").mkdir(mode=0o555)
    with pytest.raises(DataError, match=r"cannot be written \(Permission denied\)"):
        get(plain(server), tmp_path / "own")


@pytest.mark.slow
def test_two_processes_at_once(server, tmp_path, monkeypatch):
    """This one comes while nothing has arrived at the other yet, and waits for it."""
    fcntl = pytest.importorskip("fcntl")
    source, own, lock = packed(server), tmp_path / "own", fcntl.flock

    def at_the_lock(handle, how):
        server.gate.set()
        lock(handle, how)

    server.gate.clear()
    with forked.started(get, source, own) as other:
        try:
            while not server.asked:
                assert other.poll() is None
                time.sleep(0.01)
            monkeypatch.setattr(fcntl, "flock", at_the_lock)
            assert get(source, own) == own / "s"
            assert other.wait(60) == 0
        finally:
            server.gate.set()
    assert server.asked == [("s.tar.gz", None)]
    assert {path.name: path.read_bytes() for path in (own / "s").iterdir()} == FILES


def test_names():
    assert named("mnist") is MNIST
    says(
        SettingError,
        "There is no data set 'membrane' to get: name one of mnist, fashion-mnist, cifar10, "
        "tinyshakespeare.",
        lambda: named("membrane"),
    )


def test_what_was_brought_is_read(server, places):
    """MNIST's own files, small ones, from end to end."""
    from natgrad.lab.data import mnist

    remotes = []
    for name in MNIST.files:
        axes = 3 if "images" in name else 1
        shape = (4, 28, 28)[:axes]
        head = bytes((0, 0, 8, axes)) + b"".join(n.to_bytes(4, "big") for n in shape)
        content = gzip.compress(head + bytes(4 * 28 * 28 if axes == 3 else 4))
        server.files[f"{name}.gz"] = content
        remotes.append(remote(f"{name}.gz", content))
    source = Source(
        "mnist", "MNIST", "", MNIST.folders, MNIST.files, MNIST.endings, tuple(remotes),
        (server.address,),
    )  # fmt: skip
    get(source)
    assert len(mnist().train) == 4


def test_a_folder_in_the_place_of_an_unpacked_file(server, places):
    (places.cache / "s" / "one.txt").mkdir(parents=True)
    says(
        DataError,
        f"{places.cache / 's' / 'one.txt'} cannot be written (Is a directory): make way for it, or "
        "name another folder with 100 B of room with --to.",
        lambda: get(packed(server)),
    )
