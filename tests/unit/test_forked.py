"""Processes that are forked end, speak and obey as new ones do."""

import os
import signal
import subprocess
import sys
import time

import pytest

import forked

pytestmark = pytest.mark.distributed


def ends(how):
    print("said", os.environ["OF_THE_TEST"], os.getcwd())
    print("on the side", file=sys.stderr)
    os.write(1, b"past Python\n")
    if how == "message":
        sys.exit("what went wrong")
    if how == "number":
        sys.exit(7)
    if how == "error":
        raise ValueError("a mistake")


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("well", 0, ""),
        ("message", 1, "what went wrong\n"),
        ("number", 7, ""),
        ("error", 1, "ValueError: a mistake\n"),
    ],
)
def test_what_it_says_and_how_it_ends(monkeypatch, tmp_path, how, code, said):
    monkeypatch.setenv("OF_THE_TEST", "here")
    monkeypatch.chdir(tmp_path)
    ended = forked.run(ends, how)
    assert ended.code == code
    assert f"said here {tmp_path}\n" in ended.out
    assert "past Python\n" in ended.out
    assert ended.err.startswith("on the side\n")
    assert ended.err.endswith(said)
    assert ("Traceback" in ended.err) == (how == "error")


def waits(seconds):
    print("begun", "torch" in sys.modules, os.getpid(), flush=True)
    time.sleep(seconds)


def begun(process):
    while not process.said("out").endswith("\n"):
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals(number):
    with forked.started(waits, 60) as process:
        begun(process)
        assert process.said("out") == f"begun True {process.pid}\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.01)
        process.send_signal(number)
        assert process.wait(20) == process.poll() == -number


def test_an_interrupt_is_one():
    """Also where the tests themselves run in the background, in which shells ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with forked.started(interrupted) as process:
            begun(process)
            process.send_signal(signal.SIGINT)
            assert process.communicate(20)[0] == "begun\ninterrupted\n"
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("begun", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")


def test_none_lives_longer_than_its_block():
    with forked.started(waits, 60) as process:
        begun(process)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def tells_its_rank(failing):
    print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")), flush=True)
    if int(os.environ["RANK"]) == failing:
        sys.exit(3)
    if failing is not None:
        time.sleep(60)


def test_ranks_have_what_torchrun_gives_them():
    found = forked.ranks(3, tells_its_rank, None)
    assert [(one.code, one.out) for one in found] == [(0, f"{r} {r} 3\n") for r in range(3)]


def test_when_a_rank_fails_the_others_end():
    found = forked.ranks(2, tells_its_rank, 1)
    assert [one.code for one in found] == [-signal.SIGKILL, 3]


def test_the_command_a_module_and_a_script(tmp_path):
    said = forked.run(forked.module, "json.tool", "--help")
    assert said.code == 0
    assert said.out.startswith("usage:")
    said = forked.run(forked.command, "plan", "--network", "nothing", "--ranks", 2)
    assert said.code == 2
    assert said.err.startswith("natgrad: ")
    file = tmp_path / "script.py"
    file.write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv, sys.path[0])\n")
    said = forked.run(forked.script, file, "--one", 2)
    assert said.out == f"{[str(file), '--one', '2']} {tmp_path}\n"
