"""What a data set, a network and a loss make together."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError
from natgrad.lab import data
from natgrad.lab.data import own_data, random_numbers
from natgrad.lab.data.by_name import DataRequest, NamedData
from natgrad.lab.data.dataset import Rows
from natgrad.lab.models.by_name import TaskShapes
from natgrad.lab.names import DATA, TASK_LOSSES
from natgrad.lab.registry import is_path
from natgrad.lab.train import networks
from natgrad.lab.train.instances import InstanceObjective
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.task_losses import (
    Classes,
    OwnObjective,
    Pixels,
    Reconstruction,
    TaskObjective,
    Tokens,
)

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Task:
    """``train`` and ``test`` data, ``fit``, those training data that are tested as well, what the
    network must know of their ``shapes``, and the objective."""

    settings: Settings
    train: Rows
    test: Rows
    fit: Rows | None
    shapes: TaskShapes
    objective: TaskObjective

    def network(self) -> nn.Module:
        """With weights by the seed, in the precision in which they are kept."""
        torch.manual_seed(self.settings.seed)
        model = networks.build(self.settings, self.shapes)
        return model.to(PRECISIONS[self.settings.precision])

    def prepared(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        """Inputs and targets as network and objective take them."""
        if self.settings.loss == "instances":
            images, objects = batch
            named = [{n: self._moved(t, device) for n, t in one.items()} for one in objects]
            return [self._moved(image, device) for image in images], named
        inputs, targets = (self._moved(one, device) for one in batch)
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
    found = DATA[settings.data]
    _check(settings, found)
    train, test = found.read(_request(settings))
    shapes = _shapes(settings, train, test)
    _check_shapes(settings, shapes)
    objective = _objective(settings, shapes, train)
    some, tested = _some(train, settings.train_samples), _some(test, settings.test_samples)
    return Task(settings, some, tested, _fit(settings, train), shapes, objective)


def _request(s: Settings) -> DataRequest:
    unit = s.loss == "reconstruction"
    return DataRequest(s.folder, s.context, s.image, s.crop, s.augment, unit, s.vocabulary)


def _some(rows: Rows, count: int) -> Rows:
    """So many of them, always the same ones and drawn from all; all if it is 0."""
    if not count:
        return rows
    if count > len(rows):
        raise SettingError(
            f"{count} samples are asked for but the data have {len(rows)}: pass fewer, or 0 for "
            "all of them."
        )
    return rows.part(random_numbers.order(0, 0, len(rows))[:count].tolist())


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


def _check(settings: Settings, found: NamedData) -> None:
    """Before data are read, which may take long."""
    name, loss = settings.data, settings.loss
    if found.losses and loss not in found.losses:
        raise SettingError(
            f"The data {name} go with loss {' or '.join(found.losses)} but the loss is {loss}: "
            "name that, or other data."
        )
    if not found.losses and loss == "instances":
        raise SettingError(
            f"The data {name} are batches of tensors but loss instances is for those of coco: name "
            "another loss, or other data."
        )
    if settings.erasing and found.are in ("text", "objects to be found"):
        raise SettingError(
            f"erasing is for images but the data {name} are {found.are}: leave it out, or name "
            "other data."
        )
    if settings.augment and not found.augments:
        those = ", ".join(one.name for one in DATA.entries().values() if one.augments)
        raise SettingError(
            f"augment is for the data {those} but they are {name}: leave it out (imagenet and "
            "membrane are always cut at random)."
        )
    if settings.image and not found.has_sizes:
        *most, last = (one.name for one in DATA.entries().values() if one.has_sizes)
        raise SettingError(
            f"image sets the size of images of {', '.join(most)} and {last} but the data are "
            f"{name}: leave it out."
        )
    if not found.has_crops and (settings.mean_image or settings.crop != "squeeze"):
        raise SettingError(
            f"crop and mean_image are for the data imagenet but they are {name}: leave them out."
        )
    if settings.network == "unet" and settings.image % UNET:
        raise SettingError(
            f"image is {settings.image} but a unet needs sides that {UNET} divides: pass "
            f"{max(UNET, settings.image // UNET * UNET)}, or another network."
        )
    if settings.vocabulary and not found.has_vocabulary:
        raise SettingError(
            f"vocabulary is for the data wikitext2, whose text is cut into pieces, but they are "
            f"{name}: leave it out."
        )
    if settings.folder and not found.has_folder:
        come = "come with scikit-learn" if name == "digits" else "come from your own function"
        raise SettingError(f"folder is where data are, but {name} {come}: leave it out.")


UNET = 16  # for four levels


def _check_shapes(settings: Settings, shapes: TaskShapes) -> None:
    """What data of the user's must have for some settings."""
    if not is_path(settings.data):
        return
    for name in ("mixup", "label_smoothing"):
        if getattr(settings, name) and not shapes.classes:
            raise SettingError(
                f"{name} mixes classes but the data {settings.data} do not say how many there are: "
                "give the training data an attribute classes, a number or their names."
            )
    if settings.erasing and shapes.image is None:
        raise SettingError(
            f"erasing is for images [channels, height, width] but inputs of the data "
            f"{settings.data} have shape {list(shapes.inputs)}: leave it out."
        )


def _shapes(settings: Settings, train: Rows, test: Rows) -> TaskShapes:
    tokens = (settings.context,)
    if isinstance(train, data.Characters):
        return TaskShapes(vocabulary=len(train.vocabulary), inputs=tokens)
    if isinstance(train, data.MaskedWords):
        return TaskShapes(vocabulary=len(train.words.vocabulary), inputs=tokens)
    if isinstance(train, data.Images):
        channels, height, width = train.images.shape[1:]
        return _of_images((channels, height, width), len(train.classes))
    if isinstance(train, data.Segmentation):
        size = settings.image or 256
        return _of_images((3 if train.colour else 1, size, size), train.classes)
    if isinstance(train, data.Instances):
        return TaskShapes(classes=len(train.classes))
    if isinstance(train, data.ImageFolder):
        size = settings.image or 224
        return _of_images((3, size, size), len(train.classes))
    inputs, _ = own_data.first_shapes(train)
    classes, vocabulary = own_data.classes_of(train, test), own_data.vocabulary_of(train)
    image = (inputs[0], inputs[1], inputs[2]) if len(inputs) == 3 else None
    return TaskShapes(image, classes, vocabulary, inputs)


def _of_images(shape: tuple[int, int, int], classes: int) -> TaskShapes:
    return TaskShapes(shape, classes, inputs=shape)


def _objective(settings: Settings, shapes: TaskShapes, train: Rows) -> TaskObjective:
    function = TASK_LOSSES[settings.loss].function
    if function is not None:
        return OwnObjective(function, settings.loss)
    match settings.loss:
        case "cross-entropy":
            return Classes(shapes.classes, settings.label_smoothing)
        case "reconstruction":
            return Reconstruction()
        case "pixels":
            height, width = (shapes.image or shapes.inputs)[-2:]
            return Pixels(height * width)
        case "instances":
            return InstanceObjective()
    return Tokens(_guessed(settings, train))


def _guessed(settings: Settings, train: Rows) -> float:
    """Tokens of a sample whose targets count."""
    if isinstance(train, data.MaskedWords):
        return train.guessed
    if isinstance(train, data.Characters):
        return settings.context
    return float(prod(own_data.first_shapes(train)[1]))
