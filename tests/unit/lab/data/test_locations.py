"""Where data are looked for, in what order, and what is said if they are not there."""

from pathlib import Path

import pytest

from natgrad.errors import DataError, NatgradError
from natgrad.lab.data.locations import cache, find, folder, spoilt
from natgrad.lab.data.locations import places as all_places
from natgrad.lab.data.sources import CIFAR10, MEMBRANE, MNIST, TINYSHAKESPEARE
from unit.lab.data.error_text import says


def put(home, *names):
    home.mkdir(parents=True, exist_ok=True)
    for name in names:
        (home / name).write_bytes(b"")


def test_the_order(places, monkeypatch):
    assert all_places() == (places.data, places.cache, places.debian)
    monkeypatch.delenv("NATGRAD_DATA")
    assert all_places() == (places.cache, places.debian)


def test_the_cache(monkeypatch):
    monkeypatch.setenv("NATGRAD_CACHE", "~/somewhere")
    assert cache() == Path.home() / "somewhere"
    monkeypatch.delenv("NATGRAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/user")
    assert cache() == Path("/tmp/user/natgrad")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache() == Path.home() / ".cache" / "natgrad"


def test_debian_has_a_place(monkeypatch):
    assert Path("/usr/share/datasets") in all_places()


def test_the_first_place_with_all_files(places):
    for place in (places.debian, places.cache, places.data):
        put(place / "mnist", *MNIST.files)
        assert find(MNIST) == {name: place / "mnist" / name for name in MNIST.files}


def test_an_incomplete_place_is_passed_over(places):
    put(places.data / "mnist", *MNIST.files[:3])
    put(places.debian / "MNIST" / "raw", *(f"{name}.gz" for name in MNIST.files))
    assert find(MNIST)[MNIST.files[0]] == places.debian / f"MNIST/raw/{MNIST.files[0]}.gz"


def test_a_folder_that_is_named(places, tmp_path):
    put(tmp_path / "own", "tinyshakespeare.txt")
    assert find(TINYSHAKESPEARE, tmp_path / "own") == {
        "tinyshakespeare.txt": tmp_path / "own" / "tinyshakespeare.txt"
    }
    put(places.data / "text", "tinyshakespeare.txt")
    says(
        DataError,
        f"tinyshakespeare is not in {tmp_path / 'other'}, which has no tinyshakespeare.txt: name "
        "the folder that has it.",
        lambda: find(TINYSHAKESPEARE, tmp_path / "other"),
    )


def test_missing(places):
    says(
        DataError,
        "CIFAR-10 was not found: there is no data_batch_1.bin in "
        f"{places.data / 'cifar-10-batches-bin'}, {places.cache / 'cifar-10-batches-bin'} or "
        f"{places.debian / 'cifar-10-batches-bin'}; run `natgrad data get cifar10`, or name the "
        "folder above cifar-10-batches-bin in NATGRAD_DATA.",
        lambda: find(CIFAR10),
    )
    says(
        DataError,
        f"The membrane set was not found: there is no image in {places.data / 'membrane'}, "
        f"{places.cache / 'membrane'} or {places.debian / 'membrane'}; copy its files there, or "
        "name the folder above membrane in NATGRAD_DATA.",
        lambda: find(MEMBRANE),
    )
    with pytest.raises(
        DataError, match=r"no train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"
    ):
        find(MNIST)


@pytest.mark.parametrize(
    ("present", "lacking"),
    [
        (3, "t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz"),
        (2, "t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz and 1 more file"),
        (1, "train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz and 2 more files"),
    ],
)
def test_incomplete(places, present, lacking):
    put(places.cache / "mnist", *MNIST.files[:present])
    says(
        DataError,
        f"MNIST in {places.cache / 'mnist'} lacks {lacking}: run `natgrad data get mnist`.",
        lambda: find(MNIST),
    )


def test_a_folder_by_its_name(places, tmp_path, monkeypatch):
    (places.cache / "mine").mkdir(parents=True)
    assert folder("mine", "images") == places.cache / "mine"
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert folder("mine", "images") == Path("mine")
    says(
        DataError,
        "The folder 'yours' of images was not found, neither as it is named nor in "
        f"{places.data}, {places.cache} or {places.debian}: name a folder that is there.",
        lambda: folder("yours", "images"),
    )


def test_spoilt():
    path = Path("/x/y")
    assert str(spoilt(path, "is short")) == "/x/y is short: replace it or remove it."
    assert str(spoilt(path, "is short", MNIST)) == (
        "/x/y is short: remove it and run `natgrad data get mnist`."
    )
    assert str(spoilt(path, "is short", MEMBRANE)) == ("/x/y is short: remove it and copy it anew.")


def test_the_kind_of_error():
    assert issubclass(DataError, NatgradError)
    assert issubclass(DataError, RuntimeError)
