"""Two runs in one folder: the second is told whose the first is; a dead one stops nobody."""

import errno
import json
import os
import signal
import socket
import sys
import time

import pytest

import forked
from natgrad.errors import SettingError
from natgrad.lab.train import run_lock
from natgrad.lab.train.run_lock import RunLock


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock, until it is told to end."""
    with forked.started(holds, tmp_path) as process:
        while process.said("out") != "has it\n":
            assert process.poll() is None, process.said("err")
            time.sleep(0.01)
        yield process


def holds(folder):
    lock = RunLock(folder)
    lock.take()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print("has it", flush=True)
    try:
        time.sleep(60)
    finally:
        lock.release()


def test_the_owner_is_named(tmp_path, holder):
    with pytest.raises(SettingError) as error:
        RunLock(tmp_path).take()
    assert f"process {holder.pid} on {socket.gethostname()}" in str(error.value)
    assert "name another folder with --out" in str(error.value)
    holder.terminate()
    assert holder.wait(20) == 0
    assert not (tmp_path / run_lock.NAME).exists()
    RunLock(tmp_path).take()


def test_a_killed_run_stops_nobody(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / run_lock.NAME).exists()
    lock = RunLock(tmp_path)
    lock.take()
    with pytest.raises(SettingError, match=f"process {os.getpid()} on"):  # also of one process
        RunLock(tmp_path).take()
    lock.release()
    lock.release()
    assert not (tmp_path / run_lock.NAME).exists()


@pytest.mark.parametrize(
    ("owner", "free"),
    [
        ({}, True),
        ({"host": "elsewhere", "process": 1}, False),
        ({"host": socket.gethostname(), "process": 1}, False),
        ({"host": socket.gethostname(), "process": 2**22 + 1}, True),
        (["nobody"], True),
    ],
)
def test_where_the_file_system_has_no_locks(tmp_path, monkeypatch, owner, free):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", none)
    (tmp_path / run_lock.NAME).write_text(json.dumps(owner))
    if free:
        RunLock(tmp_path).take()
    else:
        with pytest.raises(SettingError, match="if it is over for certain, remove"):
            RunLock(tmp_path).take()
