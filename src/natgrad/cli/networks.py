"""Networks by name, or by the import path of a function that builds one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from natgrad.cli import imports
from natgrad.errors import SettingError
from natgrad.models import Transformer, convnet, mlp, resnet, small_resnet


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
        *(
            Network(f"resnet{depth}", partial(resnet, depth), (3, 224, 224))
            for depth in (18, 34, 50, 101, 152)
        ),
        *(
            Network(f"resnet{depth}", partial(small_resnet, depth), (3, 32, 32))
            for depth in (20, 32, 56)
        ),
        Network("mlp", partial(mlp, (784, 1024, 1024, 1024, 10)), (784,)),
        Network("transformer", partial(Transformer, 12, 768, 12), (128, 768)),
        Network("small-transformer", partial(Transformer, 4, 256, 4), (64, 256)),
        Network("small-mlp", partial(mlp, (64, 16, 10)), (64,)),
        Network("small-cnn", partial(convnet, (1, 8, 8), channels=(4, 8)), (1, 8, 8)),
    )
}


def find(name: str) -> Network:
    """A named network, or ``module:function``, which is imported from the current folder too."""
    if name in NAMED:
        return NAMED[name]
    if not imports.is_path(name):
        raise SettingError(
            f"There is no network {name!r}: name one of {', '.join(NAMED)}, or a function as "
            "module:function."
        )
    return Network(name, imports.function(name, "Network", "a torch.nn.Module"))
