"""`natgrad data`: what there is, and how it comes here."""

import hashlib
import importlib
import sys

import pytest

from natgrad.lab.data import locations as module
from natgrad.lab.data.sources import Remote, Source
from unit.cli.test_terminal import in_terminal
from unit.lab.data.misbehaving_server import serving

__all__ = ["in_terminal"]

get = importlib.import_module("natgrad.lab.data.get")
download = importlib.import_module("natgrad.lab.data.download")
TEXT = b"some text\n" * 50_000


@pytest.fixture
def server(tmp_path, monkeypatch):
    """With one data set, which is the only one; folders are the test's own."""
    monkeypatch.setenv("NATGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NATGRAD_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(module, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with serving() as server:
        server.files["notes.txt"] = TEXT
        remote = Remote("notes.txt", hashlib.sha256(TEXT).hexdigest(), len(TEXT))
        source = Source(
            "notes", "Notes", "some text", ("text",), ("notes.txt",), ("",), (remote,),
            (server.address,),
        )  # fmt: skip
        monkeypatch.setattr(get, "ALL", (source,))
        monkeypatch.setattr("natgrad.cli.data.ALL", (source,))
        yield server


def test_get(natgrad, server, tmp_path):
    said = natgrad("data", "get", "notes")
    assert said == type(said)(0, f"Notes is in {tmp_path / 'cache/text'}.\n", "")
    assert (tmp_path / "cache/text/notes.txt").read_bytes() == TEXT
    assert natgrad("data", "get", "notes").code == 0
    assert len(server.asked) == 1


def test_from_and_to(natgrad, server, tmp_path):
    server.files = {"mirror/notes.txt": TEXT}
    said = natgrad(
        "data", "get", "notes", "--from", f"{server.address}mirror", "--to", str(tmp_path / "own")
    )
    assert said.code == 0
    assert (tmp_path / "own/text/notes.txt").read_bytes() == TEXT


def test_progress_in_a_terminal(natgrad, server, in_terminal):
    seen = in_terminal()
    assert natgrad("data", "get", "notes").code == 0
    text = seen.getvalue()
    assert "Getting Notes: notes.txt" in text
    assert "488.3/488.3 KiB" in text
    assert text.endswith("\x1b[2K")


def test_interrupted(natgrad, server, tmp_path, monkeypatch):
    """By Ctrl-C after a part has arrived; the same command goes on from there."""
    server.cuts = [100_000]
    sleep = download.time.sleep

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(download.time, "sleep", interrupt)
    said = natgrad("data", "get", "notes")
    assert said.code == 1
    assert said.err.rstrip() == (
        "natgrad: Stopped: what has arrived is kept, and the same command goes on from there."
    )
    assert (tmp_path / "cache/text/notes.txt.part").stat().st_size == 100_000
    monkeypatch.setattr(download.time, "sleep", sleep)
    assert natgrad("data", "get", "notes").code == 0
    assert server.asked[-1] == ("notes.txt", "bytes=100000-")


def test_errors_are_one_sentence(natgrad, server, tmp_path):
    said = natgrad("data", "get", "nothing")
    assert said.code == 2
    assert said.err.rstrip() == "natgrad: There is no data set 'nothing' to get: name one of notes."
    server.files.clear()
    said = natgrad("data", "get", "notes")
    assert said.code == 1
    assert said.err.rstrip() == (
        f"natgrad: notes.txt could not be downloaded ({server.address}notes.txt answers 404 Not "
        "Found): try again later, or name another mirror with --from."
    )
    (tmp_path / "file").write_bytes(b"")
    said = natgrad("data", "get", "notes", "--to", str(tmp_path / "file"))
    assert "cannot be written (Not a directory)" in said.err
    assert "\n" not in said.err.rstrip()
    said = natgrad("data", "get", "notes", "--from", "nowhere")
    assert said.err.startswith("natgrad: The mirror is 'nowhere' but must be an address")


def test_list(natgrad, server, tmp_path):
    said = natgrad("data", "list")
    assert said.code == 0
    lines = {line.split()[0]: line for line in said.out.splitlines() if line.split()}
    assert "1,797 handwritten digits" in lines["digits"]
    assert lines["notes"].split("  ")[-1].strip() == "natgrad data get notes (488 KiB)"
    natgrad("data", "get", "notes")
    assert str(tmp_path / "cache/text") in natgrad("data", "list").out


def test_list_without_an_address(natgrad, server, monkeypatch):
    own = Source("own", "Own", "about", ("own",), ("x",))
    monkeypatch.setattr("natgrad.cli.data.ALL", (own,))
    monkeypatch.setattr("natgrad.cli.data.find_spec", lambda name: None)
    said = natgrad("data", "list")
    assert "not found; bring your own" in said.out
    assert "pip install 'natgrad[demo]'" in said.out


def test_help_fits_a_screen_and_has_an_example(natgrad, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command, example in (("get", "natgrad data get mnist cifar10"), ("list", "data list")):
        said = natgrad("data", command, "--help")
        assert said.code == 0
        assert example in said.out
        assert len(said.out.splitlines()) <= 24
    assert {"get", "list"} <= set(natgrad("data", "--help").out.split())


def test_without_torchvision_and_pillow(natgrad, server, monkeypatch):
    """The command needs neither."""
    for name in ("PIL", "PIL.Image", "torchvision", "sklearn"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("natgrad.cli.data.find_spec", lambda name: None)
    assert natgrad("data", "get", "notes").code == 0
