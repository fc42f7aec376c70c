"""What a data set, a network and a loss make together."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from natgrad import data
from natgrad.data import chances
from natgrad.data.image_folder import USUAL
from natgrad.data.rows import Rows, Split
from natgrad.errors import SettingError
from natgrad.train import networks
from natgrad.train.instances import Instances
from natgrad.train.networks import About
from natgrad.train.objectives import Classes, Objective, Pixels, Reconstruction, Tokens
from natgrad.train.settings import Settings

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Task:
    """``train`` and ``test`` data, ``fit``, those training data that are tested as well, what the
    network knows ``about`` them, and the objective."""

    settings: Settings
    train: Rows
    test: Rows
    fit: Rows | None
    about: About
    objective: Objective

    def network(self) -> nn.Module:
        """With weights by the seed, in the precision in which they are kept."""
        torch.manual_seed(self.settings.seed)
        model = networks.build(self.settings, self.about)
        return model.to(PRECISIONS[self.settings.precision])

    def prepared(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        """Inputs and targets as network and objective take them."""
        if self.settings.loss == "instances":
            images, objects = batch
            named = [{n: self._moved(t, device) for n, t in one.items()} for one in objects]
            return [self._moved(image, device) for image in images], named
        inputs, targets = self._moved(batch[0], device), batch[1].to(device, non_blocking=True)
        if self.settings.loss == "reconstruction":
            return inputs, inputs.flatten(1)
        if self.settings.loss == "pixels":
            return inputs, targets.unsqueeze(1).to(inputs.dtype)
        return inputs, targets

    def _moved(self, one: Tensor, device: torch.device) -> Tensor:
        dtype = PRECISIONS[self.settings.precision] if one.is_floating_point() else one.dtype
        return one.to(device, dtype, non_blocking=True)


def task(settings: Settings) -> Task:
    """Finds the data, and refuses what does not fit together."""
    _check(settings)
    train, test = READERS[settings.data](settings)
    about = _about(settings, train)
    objective = _objective(settings, about, train)
    some, tested = _some(train, settings.train_samples), _some(test, settings.test_samples)
    return Task(settings, some, tested, _fit(settings, train), about, objective)


def _some(rows: Rows, count: int) -> Rows:
    """So many of them, always the same ones and drawn from all; all if it is 0."""
    if not count:
        return rows
    if count > len(rows):
        raise SettingError(
            f"{count} samples are asked for but the data have {len(rows)}: pass fewer, or 0 for "
            "all of them."
        )
    return rows.part(chances.order(0, 0, len(rows))[:count].tolist())


def _fit(settings: Settings, train: Rows) -> Rows | None:
    """Some of those samples that are trained on, as they are before random crops."""
    if not settings.fit_samples:
        return None
    if isinstance(train, data.Images):
        train = replace(train, augment=None)
    if isinstance(train, data.Instances):
        train = train.unflipped()
    used = _some(train, settings.train_samples)
    return _some(used, min(settings.fit_samples, len(used)))


def _check(settings: Settings) -> None:
    """Before data are read, which may take long."""
    name, loss = settings.data, settings.loss
    allowed = _losses(name)
    if loss not in allowed:
        raise SettingError(
            f"The data {name} go with loss {' or '.join(allowed)} but the loss is {loss}: name "
            "that, or other data."
        )
    if settings.erasing and (name in TEXTS or name == "coco"):
        what = "text" if name in TEXTS else "objects to be found"
        raise SettingError(
            f"erasing is for images but the data {name} are {what}: leave it out, or name other "
            "data."
        )
    if settings.augment and name not in AUGMENTED:
        raise SettingError(
            f"augment is for the data {', '.join(AUGMENTED)} but they are {name}: leave it out "
            "(imagenet and membrane are always cut at random)."
        )
    if settings.image and name not in ("imagenet", "membrane", "coco"):
        raise SettingError(
            f"image sets the size of images of imagenet, membrane and coco but the data are "
            f"{name}: leave it out."
        )
    if name != "imagenet" and (settings.mean_image or settings.crop != "squeeze"):
        raise SettingError(
            f"crop and mean_image are for the data imagenet but they are {name}: leave them out."
        )
    if settings.network == "unet" and settings.image % UNET:
        raise SettingError(
            f"image is {settings.image} but a unet needs sides that {UNET} divides: pass "
            f"{max(UNET, settings.image // UNET * UNET)}, or another network."
        )
    if settings.folder and name == "digits":
        raise SettingError(
            "folder is where data are, but digits come with scikit-learn: leave it out."
        )


TEXTS = {"shakespeare": "tokens", "wikitext2": "masked-tokens"}  # and their losses
_PIXELS = ("mnist", "fashion-mnist", "cifar10")
AUGMENTED = (*_PIXELS, "coco")
UNIT = ("digits", *_PIXELS)  # those that can be read between 0 and 1
UNET = 16  # for four levels


def _losses(name: str) -> tuple[str, ...]:
    if name in TEXTS:
        return (TEXTS[name],)
    if name in ("membrane", "coco"):
        return ("pixels",) if name == "membrane" else ("instances",)
    # An autoencoder's outputs are logits of numbers between 0 and 1.
    return ("cross-entropy", "reconstruction") if name in UNIT else ("cross-entropy",)


def _images(read: Callable[[Settings], Split[Any]]) -> Callable[[Settings], tuple[Rows, Rows]]:
    def reader(settings: Settings) -> tuple[Rows, Rows]:
        train, test = read(settings)
        if settings.loss == "reconstruction":
            train, test = train.unit(), test.unit()
        if settings.augment:
            shift = data.Shift(padding=2, flip=False)  # a mirrored digit is no digit
            train = train.augmented(data.Shift() if settings.data == "cifar10" else shift)
        return train, test

    return reader


def _imagenet(settings: Settings) -> tuple[Rows, Rows]:
    size, name = settings.image or 224, settings.folder or "imagenet"
    side = round(size * 256 / 224)
    if settings.crop == "zoom":
        return data.image_folder(name, data.Zoom(size, side), USUAL)
    return data.image_folder(name, data.Squeeze(side, size))


def _membrane(settings: Settings) -> tuple[Rows, Rows]:
    size = settings.image or 256
    if settings.folder:
        return data.segmentation_folder(settings.folder, size=size)
    return data.membrane(size=size)


def _coco(settings: Settings) -> tuple[Rows, Rows]:
    return data.coco_folder(settings.folder or "coco", flip=settings.augment)


def _shakespeare(settings: Settings) -> tuple[Rows, Rows]:
    text = data.tinyshakespeare(settings.folder or None)
    return data.characters(text, settings.context)


def _wikitext2(settings: Settings) -> tuple[Rows, Rows]:
    text = data.wikitext2(settings.folder or None)
    return data.masked_words(text, length=settings.context)


READERS: dict[str, Callable[[Settings], tuple[Rows, Rows]]] = {
    "digits": _images(lambda s: data.digits()),
    "mnist": _images(lambda s: data.mnist(s.folder or None)),
    "fashion-mnist": _images(lambda s: data.fashion_mnist(s.folder or None)),
    "cifar10": _images(lambda s: data.cifar10(s.folder or None)),
    "imagenet": _imagenet,
    "membrane": _membrane,
    "coco": _coco,
    "shakespeare": _shakespeare,
    "wikitext2": _wikitext2,
}


def _about(settings: Settings, train: Rows) -> About:
    if isinstance(train, data.Characters):
        return About(vocabulary=len(train.vocabulary))
    if isinstance(train, data.MaskedWords):
        return About(vocabulary=len(train.words.vocabulary))
    if isinstance(train, data.Images):
        channels, height, width = train.images.shape[1:]
        return About((channels, height, width), len(train.classes))
    if isinstance(train, data.Segmentation):
        size = settings.image or 256
        return About((3 if train.colour else 1, size, size), train.classes)
    if isinstance(train, data.Instances):
        return About(classes=len(train.classes))
    assert isinstance(train, data.ImageFolder)
    size = settings.image or 224
    return About((3, size, size), len(train.classes))


def _objective(settings: Settings, about: About, train: Rows) -> Objective:
    match settings.loss:
        case "cross-entropy":
            return Classes(about.classes, settings.label_smoothing)
        case "reconstruction":
            return Reconstruction()
        case "pixels":
            assert about.image is not None
            return Pixels(about.image[1] * about.image[2])
        case "instances":
            return Instances()
    guessed = train.guessed if isinstance(train, data.MaskedWords) else settings.context
    return Tokens(guessed)
