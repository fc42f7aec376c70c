"""Networks by name, or by the import path of a function that builds one."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.errors import SettingError

DEPTHS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}


class Residual(nn.Module):
    """``relu(branch(x) + shortcut(x))``, where the shortcut of a new shape is a projection, or has
    no parameters: every second pixel, and zeros for the new channels."""

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        *,
        bottleneck: bool = False,
        project: bool = True,
    ) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:  # the 3x3 convolution has the stride
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        layers = [layer for size in sizes for layer in (*_convolution(*size), nn.ReLU())]
        self.branch = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module | None = None
        self.stride, self.new = stride, outputs - inputs
        if project and (stride != 1 or inputs != outputs):
            self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """``[n, c, h, w]``"""
        if self.shortcut is not None:
            short = self.shortcut(x)
        else:
            short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new))
        return F.relu(self.branch(x) + short)


class Transformer(nn.Module):
    """A pre-norm encoder over embedded tokens, classified by their mean."""

    def __init__(self, layers: int, width: int, heads: int, classes: int = 10) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, heads, 4 * width, **options)  # type: ignore[arg-type]
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, tokens, width]`` -> ``[n, classes]``"""
        logits: Tensor = self.head(self.layers(x).mean(1))
        return logits


def resnet(name: str) -> nn.Module:
    """He et al.'s for images of 224 x 224."""
    counts, bottleneck = DEPTHS[name]
    layers = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage and not index else 1
            layers.append(Residual(inputs, 64 << stage, stride, bottleneck=bottleneck))
            inputs = (256 if bottleneck else 64) << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def small_resnet(depth: int) -> nn.Module:
    """He et al.'s of ``depth`` = 6n + 2 for images of 32 x 32."""
    layers = [*_convolution(3, 16, 3, 1), nn.ReLU()]
    inputs = 16
    for width in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            layers.append(Residual(inputs, width, 1 if inputs == width else 2, project=False))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mlp(widths: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


@dataclass(frozen=True)
class Network:
    """``build`` takes nothing; ``sample`` is the shape of one input, where that is known."""

    name: str
    build: Callable[[], object]
    sample: tuple[int, ...] | None = None

    def __call__(self) -> nn.Module:
        """With weights."""
        try:
            model = self.build()
        except Exception as error:
            raise SettingError(
                f"Network {self.name!r} could not be built ({type(error).__name__}: {error}): name "
                "a function that takes no arguments and returns a torch.nn.Module."
            ) from error
        if not isinstance(model, nn.Module):
            raise SettingError(
                f"Network {self.name!r} gives an object of type {type(model).__name__} but must "
                "give a torch.nn.Module: name a function that returns one."
            )
        return model

    def shapes(self) -> nn.Module:
        """Without weights, where it can be built so: a plan needs only sizes."""
        try:
            with torch.device("meta"):
                return self()
        except SettingError:  # such as a network that reads numbers while it is built
            return self()


NAMED: dict[str, Network] = {
    network.name: network
    for network in (
        *(Network(name, partial(resnet, name), (3, 224, 224)) for name in DEPTHS),
        *(
            Network(f"resnet{depth}", partial(small_resnet, depth), (3, 32, 32))
            for depth in (20, 32, 56)
        ),
        Network("mlp", partial(mlp, (784, 1024, 1024, 1024, 10)), (784,)),
        Network("transformer", partial(Transformer, 12, 768, 12), (128, 768)),
        Network("small-transformer", partial(Transformer, 4, 256, 4), (64, 256)),
    )
}


def find(name: str) -> Network:
    """A named network, or ``module:function``, which is imported from the current folder too."""
    if name in NAMED:
        return NAMED[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingError(
            f"There is no network {name!r}: name one of {', '.join(NAMED)}, or a function as "
            "module:function."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"Network {name!r} cannot be imported ({error}): name a function that Python finds "
            "from here, as module:function."
        ) from error
    if not callable(found):
        raise SettingError(
            f"Network {name!r} is of type {type(found).__name__} but must be a function that "
            "returns a torch.nn.Module: name one as module:function."
        )
    return Network(name, found)
