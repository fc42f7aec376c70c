"""Networks by name: fitted to the data of a task, or of a size of their own where there are none.

A function of the user's stands beside them: `own_network` makes a `NamedNetwork` of it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.errors import SettingError
from natgrad.lab import models, registry


@dataclass(frozen=True)
class TaskShapes:
    """What a network must know of the data: the shape of one of their ``inputs``, that of an
    ``image`` ``[c, h, w]`` if they are images, how many ``classes`` a target may be of, and how
    many different tokens there are (``vocabulary``). 0 is none, or unknown."""

    image: tuple[int, int, int] | None = None
    classes: int = 0
    vocabulary: int = 0
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class NetworkSizes:
    """How large it should be, where its name leaves that open; 0 is as usual. ``image`` and
    ``context`` are the pixels of a side and the tokens that the data are asked for."""

    width: int = 0
    layers: int = 0
    heads: int = 0
    dropout: float = 0.0
    context: int = 128
    image: int = 0


ForTask = Callable[[TaskShapes, NetworkSizes], nn.Module]


@dataclass(frozen=True)
class NamedNetwork:
    """``for_task`` builds it for data, ``alone`` with a size of its own and inputs of shape
    ``sample``; None where there is no such thing. ``losses``: those that it has an output for;
    all of them if there are none."""

    name: str
    for_task: ForTask | None = None
    alone: Callable[[], object] | None = None
    sample: tuple[int, ...] | None = None
    losses: tuple[str, ...] = ("cross-entropy",)

    def build(self, shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
        """For a task."""
        if self.for_task is None:
            raise SettingError(
                f"network {self.name} takes sequences of vectors, which no data set has: name "
                "another one."
            )
        return self.for_task(shapes, sizes)

    def __call__(self) -> nn.Module:
        """With weights, and without data."""
        assert self.alone is not None  # whoever has no data asks for one that needs none
        return registry.call(self.alone, self.name, "Network", nn.Module)

    def without_weights(self) -> nn.Module:
        """Where it can be built so: a plan needs only sizes."""
        try:
            with torch.device("meta"), _Unfilled():
                return self()
        except SettingError:  # such as a network that reads numbers while it is built
            return self()


class _Unfilled(TorchFunctionMode):
    """Nothing is drawn or written where there are no numbers: torch would look up how, for every
    weight, and load its compiler for that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        if _fills(func) and isinstance(filled, Tensor) and filled.is_meta:
            return filled
        return func(*args, **kwargs)


def _fills(func: Any) -> bool:
    """Functions of ``nn.init``, which come here themselves, or methods of a tensor."""
    name = getattr(func, "__name__", "")
    by_init = getattr(func, "__module__", "") == "torch.nn.init" and name.endswith("_")
    return by_init or name in ("uniform_", "normal_", "fill_", "zero_")


def own_network(path: str, found: Any) -> NamedNetwork:
    """Of a function without arguments, or one that needs `TaskShapes`."""
    if isinstance(found, NamedNetwork):
        return found
    function = registry.function(path, "Network", "a torch.nn.Module", found)

    def for_task(shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
        arguments = (shapes,) if _needed(function) == 1 else ()
        takes = "takes no arguments, or the shapes of the task,"
        return registry.call(function, path, "Network", nn.Module, *arguments, takes=takes)

    return NamedNetwork(path, for_task, function, losses=())


def _needed(function: Callable[..., Any]) -> int:
    """How many arguments it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins do not say
        return 0
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.default is p.empty and p.kind not in several for p in parameters)


def _image(name: str, shapes: TaskShapes) -> tuple[int, int, int]:
    if shapes.image is None:
        are = "tokens" if shapes.vocabulary else f"inputs of shape {list(shapes.inputs)}"
        raise SettingError(
            f"network {name} takes images [channels, height, width] but the data are {are}: name "
            "another network, or other data."
        )
    return shapes.image


def _classes(name: str, shapes: TaskShapes) -> int:
    if not shapes.classes:
        raise SettingError(
            f"network {name} has an output for each class but the data do not say how many there "
            "are: give the training data an attribute classes, a number or their names, or name a "
            "network of your own."
        )
    return shapes.classes


def _vocabulary(name: str, shapes: TaskShapes) -> int:
    if not shapes.vocabulary:
        raise SettingError(
            f"network {name} takes tokens but the data do not say how many different ones there "
            "are: give the training data an attribute vocabulary, a number or the tokens, or name "
            "another network."
        )
    return shapes.vocabulary


def _convnet(
    name: str, usual: int, shapes: TaskShapes, sizes: NetworkSizes, *, norms: bool = False
) -> nn.Module:
    width = sizes.width or usual
    image, classes = _image(name, shapes), _classes(name, shapes)
    return models.convnet(image, channels=(width, 2 * width), classes=classes, batch_norm=norms)


def _mlp(name: str, hidden: tuple[int, ...], shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
    units = [sizes.width or usual for usual in hidden]
    inputs = prod(shapes.inputs or _image(name, shapes))
    return nn.Sequential(nn.Flatten(), *models.mlp((inputs, *units, _classes(name, shapes))))


def _autoencoder(
    name: str, usual: int, code: int, shapes: TaskShapes, sizes: NetworkSizes
) -> nn.Module:
    """``usual``: width of the first layer, or 0 for twice the pixels."""
    pixels = prod(_image(name, shapes))
    first = sizes.width or usual or 2 * pixels
    return nn.Sequential(
        nn.Flatten(), *models.autoencoder((pixels, first, first // 2, first // 4, code))
    )


def _unet(shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
    return models.UNet(_image("unet", shapes)[0], 1, width=sizes.width or 32)


def _resnet(depth: int, shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
    name = f"resnet{depth}"
    channels, classes = _image(name, shapes)[0], _classes(name, shapes)
    if channels != 3:
        raise SettingError(
            f"network {name} takes images of 3 channels but those of the data have {channels}: "
            "name another network, or other data."
        )
    build = models.small_resnet if depth in SMALL else models.resnet
    return build(depth, classes)


def _alexnet(shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
    if (image := _image("alexnet", shapes)) != (3, 224, 224):
        raise SettingError(
            f"network alexnet takes images of 3 x 224 x 224 but those of the data are "
            f"{' x '.join(map(str, image))}: name another network, or other data."
        )
    return models.alexnet(_classes("alexnet", shapes))


def _given(sizes: NetworkSizes) -> dict[str, Any]:
    wanted = {"layers": sizes.layers, "heads": sizes.heads, "width": sizes.width}
    return {name: size for name, size in wanted.items() if size}


def _bert(shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
    size = replace(models.BERT_LARGE, **_given(sizes))
    # Weights of short windows are then those of long ones.
    context = max(512, sizes.context)
    return models.bert(_vocabulary("bert", shapes), size, context=context, dropout=sizes.dropout)


def _gpt(shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
    vocabulary = _vocabulary("gpt", shapes)
    return models.GPT(vocabulary, sizes.context, dropout=sizes.dropout, **_given(sizes))


def _mask_rcnn(shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
    return models.mask_rcnn(shapes.classes, **({"side": sizes.image} if sizes.image else {}))


def _small_mask_rcnn(shapes: TaskShapes, sizes: NetworkSizes) -> nn.Module:
    wanted = {"side": sizes.image, "width": sizes.width}
    return models.small_mask_rcnn(shapes.classes, **{k: v for k, v in wanted.items() if v})


SMALL = (8, 20, 32, 56, 110)  # depths of residual networks for images of 32 x 32
LARGE = (18, 34, 50, 101, 152)  # and of 224 x 224


def _resnets() -> list[NamedNetwork]:
    found = []
    for depths, build, side in ((SMALL, models.small_resnet, 32), (LARGE, models.resnet, 224)):
        for depth in depths:
            alone = partial(build, depth)
            fitted = partial(_resnet, depth)
            found.append(NamedNetwork(f"resnet{depth}", fitted, alone, (3, side, side)))
    return found


def _named() -> list[NamedNetwork]:
    wide, flat = (784, 1024, 1024, 1024, 10), (64, 16, 10)
    small_cnn = partial(models.convnet, (1, 8, 8), channels=(4, 8))
    return [
        NamedNetwork("convnet", partial(_convnet, "convnet", 16)),
        NamedNetwork("convnet-norm", partial(_convnet, "convnet-norm", 16, norms=True)),
        NamedNetwork("mlp", partial(_mlp, "mlp", (128, 128)), partial(models.mlp, wide), (784,)),
        NamedNetwork(
            "autoencoder", partial(_autoencoder, "autoencoder", 0, 12), losses=("reconstruction",)
        ),
        # 784-1000-500-250-30 (Hinton and Salakhutdinov 2006), a usual test of second-order methods.
        NamedNetwork(
            "deep-autoencoder",
            partial(_autoencoder, "deep-autoencoder", 1000, 30),
            losses=("reconstruction",),
        ),
        NamedNetwork("unet", _unet, losses=("pixels",)),
        NamedNetwork("gpt", _gpt, losses=("tokens",)),
        NamedNetwork("bert", _bert, losses=("masked-tokens",)),
        *_resnets(),
        NamedNetwork("alexnet", _alexnet, models.alexnet, (3, 224, 224)),
        NamedNetwork("mask-rcnn", _mask_rcnn, losses=("instances",)),
        NamedNetwork("mask-rcnn-small", _small_mask_rcnn, losses=("instances",)),
        NamedNetwork(
            "transformer", alone=partial(models.Transformer, 12, 768, 12), sample=(128, 768)
        ),
        NamedNetwork(
            "small-transformer", alone=partial(models.Transformer, 4, 256, 4), sample=(64, 256)
        ),
        NamedNetwork(
            "small-mlp", partial(_mlp, "small-mlp", (16,)), partial(models.mlp, flat), (64,)
        ),
        NamedNetwork("small-cnn", partial(_convnet, "small-cnn", 4), small_cnn, (1, 8, 8)),
    ]


NAMED = {network.name: network for network in _named()}
