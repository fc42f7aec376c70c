"""Folders that KFAC.save wrote and that are damaged, or were made to do harm."""

import copy
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.optim import SGD

from natgrad import KFAC
from natgrad.comm import checkpoints, checksums
from natgrad.errors import CheckpointError
from training_loops import assert_equal


def made() -> tuple[KFAC, dict]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return KFAC(model, optimizer), {"model": model, "optimizer": optimizer, "step": 0}


def trained() -> tuple[KFAC, dict]:
    kfac, beside = made()
    for _ in range(3):
        beside["optimizer"].zero_grad()
        F.cross_entropy(beside["model"](torch.randn(16, 6)), torch.arange(16) % 3).backward()
        kfac.step()
        beside["optimizer"].step()
    return kfac, {**beside, "step": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "folder"
    kfac, beside = trained()
    kfac.save(folder, beside)
    return folder


def everything(kfac: KFAC, beside: dict) -> list:
    parts = [beside["model"].state_dict(), beside["optimizer"].state_dict(), beside["step"]]
    return copy.deepcopy([kfac.state_dict(), *parts])


def damaged(data: bytes, kind: str, chance: random.Random) -> bytes:
    wrong, place = bytearray(data), chance.randrange(len(data))
    if kind == "flip":
        wrong[place] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        wrong = wrong[:place]
    else:
        wrong[place : place + 64] = bytes(64)
    return bytes(wrong)


@pytest.mark.parametrize("kind", ["flip", "cut", "zeros"])
@pytest.mark.parametrize("summed", [True, False], ids=["with checksums", "without"])
def test_damage_is_refused_and_changes_nothing(saved, kind, summed):
    """Without checksums, as torch itself writes it, a flipped bit may be read as another number,
    but whatever is refused has changed nothing."""
    files = {path: path.read_bytes() for path in saved.iterdir()}
    chance = random.Random(0)
    kfac, beside = made()
    before = everything(kfac, beside)
    refused = 0
    try:
        if not summed:
            (saved / checksums.NAME).unlink()
        for _ in range(40):
            path = chance.choice([p for p in sorted(files) if summed or p.name != checksums.NAME])
            path.write_bytes(wrong := damaged(files[path], kind, chance))
            if wrong == files[path]:
                continue
            try:
                kfac.load(saved, beside)
            except CheckpointError:
                refused += 1
                assert_equal(everything(kfac, beside), before)
            else:
                assert not summed, path
                kfac, beside = made()
            path.write_bytes(files[path])
    finally:
        for path, data in files.items():
            path.write_bytes(data)
    assert refused == 40 or not summed
    kfac.load(saved, beside)
    assert beside["step"] == 3


def test_a_failure_while_reading_changes_nothing(saved, monkeypatch):
    kfac, beside = made()
    before = everything(kfac, beside)
    original = filesystem.FileSystemReader.read_data
    reads = []

    def read_data(self, plan, planner):
        found = original(self, plan, planner)
        reads.append(plan)
        if len(reads) > 1:  # the first reads the header alone
            raise OSError("the disk has gone")
        return found

    monkeypatch.setattr(filesystem.FileSystemReader, "read_data", read_data)
    with pytest.raises(CheckpointError, match=r"the disk has gone.*What was there before still is"):
        kfac.load(saved, beside)
    assert_equal(everything(kfac, beside), before)


def test_a_missing_file_is_named(saved, tmp_path):
    kfac, beside = trained()
    kfac.save(tmp_path / "one", beside)
    (tmp_path / "one" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp' is missing: take another copy"):
        kfac.load(tmp_path / "one", beside)


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["the table of contents", "a value"])
@pytest.mark.parametrize("summed", [True, False])
def test_no_code_of_a_folder_is_run(tmp_path, where, summed):
    """Whoever can write a folder can write its checksums, too."""
    kfac, beside = trained()
    folder, harm = tmp_path / "folder", tmp_path / "harm"
    if where == "a value":
        kfac.save(folder, {**beside, "value": Harm(harm)})
    else:
        kfac.save(folder, beside)
        (folder / ".metadata").write_bytes(pickle.dumps(Harm(harm)))
        if summed:
            found = checksums.digests(p for p in folder.iterdir() if p.name != checksums.NAME)
            checksums.write(folder, found)
    if not summed:
        (folder / checksums.NAME).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(it names posix|could not load"):
        kfac.load(folder, {**beside, "value": 0})
    assert not harm.exists()


def test_a_table_that_leads_out_of_the_folder(tmp_path):
    kfac, beside = trained()
    kfac.save(tmp_path / "folder", beside)
    path = tmp_path / "folder" / ".metadata"
    table = pickle.loads(path.read_bytes())
    next(iter(table.storage_data.values())).relative_path = "../elsewhere"
    path.write_bytes(pickle.dumps(table))
    (tmp_path / "folder" / checksums.NAME).unlink()
    with pytest.raises(CheckpointError, match=r"a file that is not in its folder \('../elsewhere'"):
        kfac.load(tmp_path / "folder", beside)


def test_all_is_on_the_disk_before_the_last_one_goes(tmp_path, monkeypatch):
    kfac, beside = trained()
    kfac.save(tmp_path / "folder", beside)
    happened = []

    def told(name, call):
        def does(*args, **kwargs):
            happened.append(name)
            return call(*args, **kwargs)

        return does

    monkeypatch.setattr(checksums, "write", told("checksums", checksums.write))
    monkeypatch.setattr(checksums, "flush", told("flush", checksums.flush))
    monkeypatch.setattr(Path, "rename", told("rename", Path.rename))
    monkeypatch.setattr(checkpoints.shutil, "rmtree", told("delete", checkpoints.shutil.rmtree))
    kfac.save(tmp_path / "folder", beside)
    begun = happened.index("checksums")
    assert happened[begun:] == [
        "checksums",
        "flush",
        "delete",
        "rename",
        "rename",
        "flush",
        "delete",
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_folder_of_torch_itself_is_read(tmp_path):
    """It has no checksums."""
    kfac, beside = trained()
    torch.distributed.checkpoint.save(
        {"kfac": kfac.shards(), "model": beside["model"].state_dict()},
        checkpoint_id=tmp_path / "folder",
        no_dist=True,
    )
    other, found = made()
    other.load(tmp_path / "folder", {"model": found["model"]})
    assert other.steps == 3
    assert torch.equal(found["model"][0].weight, beside["model"][0].weight)
