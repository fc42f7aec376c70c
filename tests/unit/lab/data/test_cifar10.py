"""CIFAR-10 from its binary version."""

import hashlib
import importlib

import pytest
import torch

from natgrad.errors import DataError
from natgrad.lab.data import cifar10
from natgrad.lab.data.sources import CIFAR10
from unit.lab.data.error_text import says

module = importlib.import_module("natgrad.lab.data.cifar10")


@pytest.fixture
def small(places, monkeypatch):
    """Seven records a file instead of ten thousand."""
    monkeypatch.setattr(module, "RECORDS", 7)
    home = places.cache / "cifar-10-batches-bin"
    home.mkdir(parents=True)
    records = torch.randint(256, (42, 3073), dtype=torch.uint8)
    records[:, 0] = torch.arange(42) % 10
    for name, part in zip(CIFAR10.files, records.split(7), strict=True):
        (home / name).write_bytes(bytes(part.flatten().tolist()))
    return home, records


def test_planes_and_order(small):
    _, records = small
    train, test = cifar10()
    assert train.images.shape == (35, 3, 32, 32)
    assert test.images.shape == (7, 3, 32, 32)
    assert train.labels.tolist() == [i % 10 for i in range(35)]
    # Red, green, blue; within each, row by row.
    for channel, y, x in ((0, 0, 0), (1, 5, 7), (2, 31, 31)):
        at = 1 + channel * 1024 + y * 32 + x
        assert torch.equal(train.images[:, channel, y, x], records[:35, at])
        assert torch.equal(test.images[:, channel, y, x], records[35:, at])
    assert train.classes[3] == "cat"
    assert len(train.classes) == 10


GET = "remove it and run `natgrad data get cifar10`."


def test_spoilt_files(small):
    home, _ = small
    path = home / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    says(DataError, f"{path} is truncated: 21,510 of 21,511 bytes: {GET}", cifar10)
    path.write_bytes(whole[:-3073])  # of whole records
    says(DataError, f"{path} is truncated: 18,438 of 21,511 bytes: {GET}", cifar10)
    path.write_bytes(whole + b"x")
    says(DataError, f"{path} is too long: 21,512 of 21,511 bytes: {GET}", cifar10)
    path.write_bytes(b"\x0b" + whole[1:])
    says(DataError, f"{path} is corrupt: it has the label 11 of 10 classes: {GET}", cifar10)
    path.unlink()
    path.mkdir()
    says(DataError, f"{path} cannot be read (Is a directory): {GET}", cifar10)


def test_the_real_one(real):
    real(CIFAR10)
    train, test = cifar10()
    assert train.labels.bincount().tolist() == [5_000] * 10
    assert test.labels.bincount().tolist() == [1_000] * 10
    values, count = torch.arange(256.0, dtype=torch.float64), 50_000 * 1024
    shares = (
        torch.stack(
            [
                torch.stack([part[:, channel].flatten().bincount(minlength=256) for part in parts])
                for parts in [train.images.split(2_000)]
                for channel in range(3)
            ]
        )
        .sum(1)
        .double()
        / count
    )
    mean = shares @ values
    deviation = (shares @ values**2 - mean**2).sqrt()
    assert (mean / 255).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert (deviation / 255).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-5)
    distinct = {hashlib.md5(image.numpy().tobytes()).digest() for image in train.images}
    assert len(distinct) == 50_000
