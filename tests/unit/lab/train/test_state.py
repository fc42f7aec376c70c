"""Checkpoints are complete or not there; whatever fails, the last good one stays."""

import os
import random
import resource

import pytest
import torch

import forked
from natgrad.comm import Alone
from natgrad.errors import CheckpointError
from natgrad.lab.train.state import Checkpoints, writable, write_text


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", 2, Alone())


def save(checkpoints, step, share=None):
    checkpoints.save(step, {"x": torch.full((3,), float(step))}, share)


def test_the_last_ones_stay(checkpoints):
    assert checkpoints.load() is None
    for step in (1, 5, 9):
        save(checkpoints, step, [{"first": step}])
    assert checkpoints.steps() == [5, 9]
    state, shares = checkpoints.load()
    assert state["step"] == 9
    assert state["x"].tolist() == [9, 9, 9]
    assert shares == [[{"first": 9}]]
    assert sorted(os.listdir(checkpoints.folder)) == ["step-00000005", "step-00000009"]


def test_a_step_may_be_written_again(checkpoints):
    save(checkpoints, 3)
    checkpoints.save(3, {"x": torch.zeros(1)}, None)
    assert checkpoints.load()[0]["x"].tolist() == [0]


def test_what_a_killed_process_left_is_removed(checkpoints):
    left = checkpoints.folder / ".step-00000004.unfinished"
    left.mkdir(parents=True)
    (left / "state.pt").write_bytes(b"half")
    assert checkpoints.load() is None
    save(checkpoints, 5)
    assert os.listdir(checkpoints.folder) == ["step-00000005"]


def test_one_that_cannot_be_read_gives_way_to_the_one_before(checkpoints):
    for step in (1, 2):
        save(checkpoints, step)
    file = checkpoints.folder / "step-00000002" / "state.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(UserWarning, match="step-00000002 cannot be read"):
        assert checkpoints.load()[0]["step"] == 1
    file.unlink()
    (checkpoints.folder / "step-00000001" / "state.pt").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(CheckpointError) as error,
    ):
        checkpoints.load()
    assert str(error.value) == (
        f"None of the checkpoints in {checkpoints.folder} can be read: copy a good one there, or "
        "begin anew in another folder."
    )


def test_another_format(checkpoints):
    checkpoints.save(1, {"format": 2}, None)
    with pytest.raises(CheckpointError) as error:
        checkpoints.load()
    assert str(error.value) == (
        f"The checkpoint {checkpoints.folder / 'step-00000001'} has format 2 but this version of "
        "natgrad reads 1: go on with the version that wrote it."
    )


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_an_error_of_the_disk(checkpoints, monkeypatch, stage):
    save(checkpoints, 1)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, stage, fail)
    with pytest.raises(CheckpointError) as error:
        save(checkpoints, 2)
    assert str(error.value) == (
        f"The checkpoint of step 2 could not be written to {checkpoints.folder} (No space left on "
        "device), and that of step 1 is intact: make room, or name another folder with --out."
    )
    assert os.listdir(checkpoints.folder) == ["step-00000001"]
    assert checkpoints.load()[0]["x"].tolist() == [1, 1, 1]


def saves_too_much(folder):
    checkpoints = Checkpoints(folder, 2, Alone())
    checkpoints.save(1, {"x": torch.zeros(10)}, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    checkpoints.save(2, {"x": torch.zeros(1_000_000)}, None)


@pytest.mark.slow
def test_a_file_that_may_not_grow(tmp_path):
    """The system itself refuses to write, in the middle of torch.save."""
    said = forked.run(saves_too_much, tmp_path / "c")
    assert said.code == 1
    assert "could not be written to" in said.err
    assert "(File too large), and that of step 1 is intact" in said.err
    assert os.listdir(tmp_path / "c") == ["step-00000001"]
    assert Checkpoints(tmp_path / "c", 2, Alone()).load()[0]["step"] == 1


def test_an_unwritable_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(CheckpointError) as error:
        writable(file / "run")
    assert str(error.value) == (
        f"The folder {file / 'run'} cannot be written to (Not a directory): name another one with "
        "--out."
    )
    writable(tmp_path / "new" / "run")
    assert os.listdir(tmp_path / "new" / "run") == []


def test_text_is_replaced_as_a_whole(tmp_path, monkeypatch):
    file = tmp_path / "settings.toml"
    write_text(file, "old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "replace", fail)
        with pytest.raises(CheckpointError, match=r"cannot be written to \(No space left"):
            write_text(file, "new")
    assert file.read_text() == "old"


@pytest.mark.parametrize("kind", ["flip", "cut", "zeros", "of another object"])
@pytest.mark.parametrize("file", ["state.pt", "share-0.pt", "checksums.json"])
def test_damage_anywhere_gives_way_to_the_one_before(checkpoints, kind, file):
    """A flipped bit in a tensor is a tensor as well; only its checksum tells."""
    chance = random.Random(0)
    for step in (1, 2):
        save(checkpoints, step, [{"first": torch.full((50,), float(step))}])
    path = checkpoints.folder / "step-00000002" / file
    good = path.read_bytes()
    for _ in range(1 if kind == "of another object" else 12):
        wrong, place = bytearray(good), chance.randrange(len(good))
        if kind == "flip":
            wrong[place] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            wrong = wrong[:place]
        elif kind == "zeros":
            wrong[place : place + 40] = bytes(40)
        else:
            torch.save(["something"], path)
            wrong = bytearray(path.read_bytes())
        path.write_bytes(wrong)
        if bytes(wrong) == good:
            continue
        with pytest.warns(UserWarning, match="step-00000002 cannot be read"):
            state, shares = checkpoints.load()
        assert state["step"] == 1
        assert shares[0][0]["first"][0] == 1
    path.write_bytes(good)
    assert checkpoints.load()[0]["step"] == 2


@pytest.mark.parametrize("content", [["something"], {"format": 1}, 3.0, {"step": 2}])
def test_one_without_checksums_that_is_no_state(checkpoints, content):
    for step in (1, 2):
        save(checkpoints, step)
    folder = checkpoints.folder / "step-00000002"
    (folder / "checksums.json").unlink()
    torch.save(content, folder / "state.pt")
    with pytest.warns(UserWarning, match="it is no state of a run"):
        assert checkpoints.load()[0]["step"] == 1
