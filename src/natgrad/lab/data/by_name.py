"""Data sets by name, with what each of them allows to be asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from natgrad.lab import data
from natgrad.lab.data.dataset import Rows, Split
from natgrad.lab.data.image_folder import USUAL


@dataclass(frozen=True)
class DataRequest:
    """How they should be read: from which ``folder``, if not from their usual place; with how many
    tokens (``context``) or pixels of a side (``image``; 0 is as usual); whether with random crops
    (``augment``), and between 0 and 1 (``unit``); and how many pieces text is cut into
    (``vocabulary``; 0 is as usual)."""

    folder: str = ""
    context: int = 128
    image: int = 0
    crop: str = "squeeze"
    augment: bool = False
    unit: bool = False
    vocabulary: int = 0


@dataclass(frozen=True)
class NamedData:
    """``read`` gives training and test data. ``losses`` that go with them (all but "instances" if
    there are none), what they ``are``, and what may be asked for."""

    name: str
    read: Callable[[DataRequest], tuple[Rows, Rows]]
    losses: tuple[str, ...] = ("cross-entropy",)
    are: str = "images"
    augments: bool = False
    has_sizes: bool = False
    has_crops: bool = False
    has_folder: bool = True
    has_vocabulary: bool = False


def _images(
    read: Callable[[str | None], Split[Any]], shift: data.Shift | None
) -> Callable[[DataRequest], tuple[Rows, Rows]]:
    def reader(asked: DataRequest) -> tuple[Rows, Rows]:
        train, test = read(asked.folder or None)
        if asked.unit:
            train, test = train.unit(), test.unit()
        if asked.augment:
            train = train.augmented(shift)
        return train, test

    return reader


def _imagenet(asked: DataRequest) -> tuple[Rows, Rows]:
    size, name = asked.image or 224, asked.folder or "imagenet"
    side = round(size * 256 / 224)
    if asked.crop == "zoom":
        return data.image_folder(name, data.Zoom(size, side), USUAL)
    return data.image_folder(name, data.Squeeze(side, size))


def _membrane(asked: DataRequest) -> tuple[Rows, Rows]:
    size = asked.image or 256
    if asked.folder:
        return data.segmentation_folder(asked.folder, size=size)
    return data.membrane(size=size)


def _coco(asked: DataRequest) -> tuple[Rows, Rows]:
    return data.coco_folder(asked.folder or "coco", flip=asked.augment)


def _shakespeare(asked: DataRequest) -> tuple[Rows, Rows]:
    return data.characters(data.tinyshakespeare(asked.folder or None), asked.context)


def _wikitext2(asked: DataRequest) -> tuple[Rows, Rows]:
    text = data.wikitext2(asked.folder or None)
    size: dict[str, Any] = {"pieces": asked.vocabulary} if asked.vocabulary else {}
    return data.masked_words(text, length=asked.context, **size)


def _named() -> list[NamedData]:
    # Those that can be read between 0 and 1: an autoencoder's outputs are logits of such numbers.
    both = ("cross-entropy", "reconstruction")
    digit = data.Shift(padding=2, flip=False)  # a mirrored digit is no digit
    # Readers are looked up when they are called, as tests put others in their place.
    mnist = _images(lambda folder: data.mnist(folder), digit)
    fashion = _images(lambda folder: data.fashion_mnist(folder), digit)
    cifar10 = _images(lambda folder: data.cifar10(folder), data.Shift())
    return [
        NamedData("digits", _images(lambda _: data.digits(), digit), both, has_folder=False),
        NamedData("mnist", mnist, both, augments=True),
        NamedData("fashion-mnist", fashion, both, augments=True),
        NamedData("cifar10", cifar10, both, augments=True),
        NamedData("imagenet", _imagenet, has_sizes=True, has_crops=True),
        NamedData("membrane", _membrane, ("pixels",), has_sizes=True),
        NamedData(
            "coco", _coco, ("instances",), "objects to be found", augments=True, has_sizes=True
        ),
        NamedData("shakespeare", _shakespeare, ("tokens",), "text"),
        NamedData("wikitext2", _wikitext2, ("masked-tokens",), "text", has_vocabulary=True),
    ]


NAMED = {one.name: one for one in _named()}
