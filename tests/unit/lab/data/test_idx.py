"""MNIST and Fashion-MNIST from idx files, plain and compressed, whole and spoilt."""

import gzip

import pytest
import torch

from natgrad.errors import DataError
from natgrad.lab.data import fashion_mnist, mnist
from natgrad.lab.data.sources import FASHION_MNIST, MNIST
from unit.lab.data.error_text import says


def idx(numbers):
    head = bytes((0, 0, 8, numbers.ndim))
    return head + b"".join(n.to_bytes(4, "big") for n in numbers.shape) + bytes(numbers.flatten())


def write(home, packed=False, train=12, test=5):
    home.mkdir(parents=True)
    made = {}
    for name, count in (("train", train), ("t10k", test)):
        images = torch.randint(256, (count, 28, 28), dtype=torch.uint8)
        labels = torch.randint(10, (count,), dtype=torch.uint8)
        made[name] = images, labels
        for kind, numbers in (("images-idx3", images), ("labels-idx1", labels)):
            data = idx(numbers.numpy())
            ending = ".gz" if packed else ""
            path = home / f"{name}-{kind}-ubyte{ending}"
            path.write_bytes(gzip.compress(data) if packed else data)
    return made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("read", "name"), [(mnist, "mnist"), (fashion_mnist, "fashion-mnist")])
def test_both_parts(places, read, name, packed):
    made = write(places.debian / name, packed)
    found = read()
    for part, (images, labels) in zip(found, (made["train"], made["t10k"]), strict=True):
        assert torch.equal(part.images, images.unsqueeze(1))
        assert torch.equal(part.labels, labels.long())
        assert len(part.classes) == 10
    x, y = found.train.tensors()
    mean, deviation = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}[name]
    expected = (made["train"][0].double().unsqueeze(1) / 255 - mean) / deviation
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-5)
    assert y.dtype == torch.int64


def test_a_folder_of_its_own(tmp_path):
    write(tmp_path / "x")
    assert len(mnist(tmp_path / "x").test) == 5


GET = "remove it and run `natgrad data get mnist`."


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:-1], "is truncated: 9,407 bytes for 12 x 28 x 28 numbers"),
        (lambda data: data[:10], "is truncated: it ends before its numbers begin"),
        (lambda data: data + b"x", "is too long: 9,409 bytes for 12 x 28 x 28 numbers"),
        (
            lambda data: b"<htm" + data,
            "is no idx file of bytes with 3 axes: it starts with 3c 68 74 6d",
        ),
        (lambda data: b"", "is no idx file of bytes with 3 axes: it starts with –"),
    ],
)
def test_spoilt_files(tmp_path, spoil, why):
    write(tmp_path / "x")
    path = tmp_path / "x" / "train-images-idx3-ubyte"
    path.write_bytes(spoil(path.read_bytes()))
    says(DataError, f"{path} {why}: {GET}", lambda: mnist(tmp_path / "x"))


def test_spoilt_compression(tmp_path):
    write(tmp_path / "x", packed=True)
    path = tmp_path / "x" / "t10k-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    says(
        DataError,
        f"{path} is truncated: the compressed data end too early: {GET}",
        lambda: mnist(tmp_path / "x"),
    )
    path.write_bytes(b"no gzip")
    says(
        DataError,
        f"{path} is no gzip file or is corrupt (Not a gzipped file (b'no')): {GET}",
        lambda: mnist(tmp_path / "x"),
    )
    path.write_bytes(whole[:12] + b"\xff\xff" + whole[14:])
    with pytest.raises(DataError, match=r"ubyte.gz is .* corrupt \(.*\): remove it and run"):
        mnist(tmp_path / "x")


def test_a_folder_in_the_place_of_a_file(tmp_path):
    write(tmp_path / "x")
    path = tmp_path / "x" / "train-labels-idx1-ubyte"
    path.unlink()
    path.mkdir()
    says(
        DataError,
        f"{path} cannot be read (Is a directory): {GET}",
        lambda: mnist(tmp_path / "x"),
    )


def test_files_that_do_not_fit_each_other(tmp_path):
    write(tmp_path / "x")
    path = tmp_path / "x" / "train-labels-idx1-ubyte"
    path.write_bytes(idx(torch.zeros(11, dtype=torch.uint8).numpy()))
    says(DataError, f"{path} has 11 labels for 12 images: {GET}", lambda: mnist(tmp_path / "x"))
    path.write_bytes(idx(torch.full((12,), 10, dtype=torch.uint8).numpy()))
    says(
        DataError,
        f"{path} has the label 10 but there are 10 classes: {GET}",
        lambda: mnist(tmp_path / "x"),
    )


@pytest.mark.parametrize(("read", "source"), [(mnist, MNIST), (fashion_mnist, FASHION_MNIST)])
def test_the_real_ones(real, read, source):
    real(source)
    train, test = read()
    assert train.images.shape == (60_000, 1, 28, 28)
    assert test.images.shape == (10_000, 1, 28, 28)
    x, _ = train.tensors()
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    assert train.labels.bincount().min() > 5_000
