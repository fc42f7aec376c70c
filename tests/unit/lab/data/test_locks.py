"""A lock that one has, others wait for, and that nothing is left of."""

import os

import pytest

from natgrad.lab.data import locks
from natgrad.lab.data.locks import Lock

fcntl = pytest.importorskip("fcntl")


def free(path):
    """Whether nobody has it."""
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_it_is_taken_and_gone(tmp_path):
    path = tmp_path / "lock"
    with Lock(path):
        assert not free(path)
    assert not path.exists()
    with pytest.raises(ValueError, match="inside"), Lock(path):
        raise ValueError("inside")
    assert not path.exists()


def test_what_a_killed_process_has_left_is_no_lock(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    with Lock(path):
        assert not free(path)


def test_who_waited_for_a_file_that_is_gone_takes_a_new_one(tmp_path, monkeypatch):
    """Else a third process, which finds none and makes one, would be inside as well."""
    path, lock, removed = tmp_path / "lock", fcntl.flock, []

    def after_another(handle, how):
        if not removed:
            removed.append(path.unlink())
        lock(handle, how)

    monkeypatch.setattr(locks.fcntl, "flock", after_another)
    with Lock(path):
        assert removed
        monkeypatch.undo()
        assert not free(path)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(handle, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with Lock(tmp_path / "lock"), Lock(tmp_path / "lock"):
        pass
    assert not list(tmp_path.iterdir())


def test_interrupted_while_it_waits(tmp_path, monkeypatch):
    before = len(os.listdir("/dev/fd"))

    def interrupt(handle, how):
        raise KeyboardInterrupt

    monkeypatch.setattr(locks.fcntl, "flock", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Lock(tmp_path / "lock")
    assert len(os.listdir("/dev/fd")) == before
