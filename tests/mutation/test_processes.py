"""Forked processes tell how the work in them has ended."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from mutation.processes import Ended, watched


def fails(teller):
    teller.begins("first", 30.0)
    teller.begins("second", 30.0)
    teller.ends("failed", "second")


def hangs(teller):
    teller.begins("first", 30.0)
    teller.begins("second", 0.2)
    time.sleep(60)


def dies(teller):
    teller.begins("first", 30.0)
    os.kill(os.getpid(), signal.SIGKILL)


def raises(teller):
    teller.begins("first", 30.0)
    raise ValueError("no test says this")


@pytest.mark.parametrize(
    ("work", "ended"),
    [
        (fails, Ended("failed", "second")),
        (hangs, Ended("hung", "second")),
        (dies, Ended("died", "first")),
        (raises, Ended("died", "first")),
        (lambda teller: teller.ends("passed"), Ended("passed")),
        (lambda teller: teller.ends("stopped", "last"), Ended("stopped", "last")),
    ],
)
def test_how_it_has_ended(work, ended, tmp_path):
    assert watched(work, tmp_path / "scratch") == ended
    assert ended.noticed == (ended.how in ("failed", "hung", "died"))


def test_what_it_has_started_ends_with_it_and_its_files_go(tmp_path):
    note = tmp_path / "note"

    def work(teller):
        folder = Path(tempfile.mkdtemp())
        started = os.fork()
        if not started:
            time.sleep(60)
        note.write_text(f"{started} {folder}")
        teller.ends("passed")
        time.sleep(60)

    assert watched(work, tmp_path / "scratch") == Ended("passed")
    started, folder = note.read_text().split()
    assert Path(folder).is_relative_to(tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()
    state = Path(f"/proc/{started}/stat")
    end = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"
