"""Two runs in one folder: the second is told whose the first is; a dead one stops nobody."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from natgrad.errors import SettingError
from natgrad.lab.train import run_lock
from natgrad.lab.train.run_lock import RunLock


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock."""
    text = (
        "import sys, pathlib; from natgrad.lab.train.run_lock import RunLock\n"
        "lock = RunLock(pathlib.Path(sys.argv[1])); lock.take(); print('has it', flush=True)\n"
        "sys.stdin.read(); lock.release()"
    )
    command = [sys.executable, "-c", text, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


def test_the_owner_is_named(tmp_path, holder):
    with pytest.raises(SettingError) as error:
        RunLock(tmp_path).take()
    assert f"process {holder.pid} on {socket.gethostname()}" in str(error.value)
    assert "name another folder with --out" in str(error.value)
    holder.stdin.close()
    holder.wait()
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
