"""Data by name, from a file, or from a function: lists of batches ``(inputs, targets)``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.cli import checkpoints
from natgrad.cli.user_data import Loaded
from natgrad.curvature.losses import BinaryCrossEntropy, CrossEntropy, Loss
from natgrad.errors import DataError, SettingError
from natgrad.lab import registry
from natgrad.lab.data import digits
from natgrad.lab.models.by_name import NamedNetwork
from natgrad.operators.data import Batch as Call
from natgrad.operators.data import Data

FILES = (".npz", ".pt", ".pth", ".safetensors")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class WantedData:
    """``samples``: how many at most, chosen at random; ``shape`` of one input, if it was given."""

    samples: int | None
    batch_size: int | None
    seed: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device


def find(name: str, network: NamedNetwork, model: nn.Module, loss: Loss, wanted: WantedData) -> Any:
    """A list of batches, or what the function returned, in the model's dtype."""
    if name == "digits":
        return _cut(*_digits(model, wanted), wanted)
    if name == "random":
        return _cut(*_random(network, model, loss, wanted), wanted)
    if Path(name).suffix in FILES:
        inputs, targets = checkpoints.pair(Path(name))
        if not inputs.is_floating_point() and not _takes_tokens(model):
            inputs = inputs.to(wanted.dtype)  # such as bytes of images
        return _cut(*_typed(inputs, targets, wanted), wanted)
    if registry.is_path(name):
        made = _made(registry.function(name, "DATA", "batches (inputs, targets)"), name)
        loaded = Loaded(Data(made), wanted.dtype, wanted.device)
        if wanted.samples is None and wanted.batch_size is None:
            return loaded if loaded.differs() else made
        count = loaded.count(name)
        return _split(*loaded.take(_chosen(count, wanted)), wanted) if count else made
    raise SettingError(
        f"There are no data {name!r}: name digits, random, a file that ends in "
        f"{', '.join(FILES[:2])}, or a function as module:function."
    )


def _made(function: Callable[..., Any], name: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise SettingError(
            f"DATA {name!r} could not be made ({type(error).__name__}: {error}): name a function "
            "that takes no arguments and returns batches (inputs, targets)."
        ) from error


def _cut(inputs: Tensor, targets: Tensor, wanted: WantedData) -> list[Batch]:
    """Into batches; some samples at random if not all are wanted."""
    if wanted.samples is not None and wanted.samples < len(inputs):
        chosen = _chosen(len(inputs), wanted)
        inputs, targets = inputs[chosen], targets[chosen]
    return _split(inputs, targets, wanted)


def _chosen(count: int, wanted: WantedData) -> Tensor:
    """Which of ``count`` samples, in their order."""
    if wanted.samples is None or wanted.samples >= count:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(wanted.seed))
    return order[: wanted.samples].sort().values


def _split(inputs: Tensor, targets: Tensor, wanted: WantedData) -> list[Batch]:
    size = wanted.batch_size or len(inputs)
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def _takes_tokens(model: nn.Module) -> bool:
    """Whether the first layer with weights looks up integers."""
    layers = (m for m in model.modules() if next(m.parameters(recurse=False), None) is not None)
    return isinstance(next(layers, None), nn.Embedding | nn.EmbeddingBag)


def _typed(inputs: Tensor, targets: Tensor, wanted: WantedData) -> Batch:
    """Where the model is, real numbers in its dtype; indices of classes and tokens as torch wants
    them."""

    def typed(t: Tensor) -> Tensor:
        return t.to(wanted.device, wanted.dtype if t.is_floating_point() else torch.int64)

    return typed(inputs), typed(targets)


def _digits(model: nn.Module, wanted: WantedData) -> Batch:
    """All 1,797 images of 8 x 8, from 0 to 1; flat for a model that takes them so."""
    try:
        pairs = [part.unit().tensors() for part in digits()]
    except DataError as error:  # which is for what went wrong, not for what was asked wrongly
        raise SettingError(str(error)) from None
    images, labels = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    images, labels = _typed(images, labels, wanted)
    fits, why = [], ""
    for inputs in (images, images.flatten(1)):
        try:
            with torch.no_grad():
                if Call(inputs[:2], labels[:2], 2).call(model).ndim == 2:
                    fits.append(inputs)
        except SettingError:  # it took them, and returned no tensor
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            why = f" ({str(error).strip().splitlines()[0]})" if str(error).strip() else ""
    if not fits:
        raise SettingError(
            "The model takes neither images of shape [1, 8, 8] nor rows of 64 numbers, which the "
            f"digits are{why}: name a model for them, such as small-cnn, or other data."
        )
    return fits[0], labels


def _random(network: NamedNetwork, model: nn.Module, loss: Loss, wanted: WantedData) -> Batch:
    """Standard normal inputs, and targets of the kind that the loss takes."""
    shape = wanted.shape or network.sample
    if shape is None:
        raise SettingError(
            f"Network {network.name!r} does not say what its inputs are: pass the shape of one of "
            "them, such as --sample 3,32,32."
        )
    count = wanted.samples or 64
    generator = torch.Generator().manual_seed(wanted.seed)
    inputs = torch.randn(count, *shape, generator=generator, dtype=wanted.dtype).to(wanted.device)
    try:
        with torch.no_grad():
            output = model(inputs[:2])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise SettingError(
            f"The model does not take inputs of shape {list(shape)} "
            f"({str(error).strip().splitlines()[0]}): pass another shape with --sample."
        ) from error
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise SettingError(
            "Random targets need a model that returns one tensor [n, ...]: give data of your own."
        )
    if isinstance(loss, CrossEntropy):
        classes, rest = output.shape[1], output.shape[2:]
        labels = torch.randint(classes, (count, *rest), generator=generator)
        return inputs, labels.to(wanted.device)
    targets = torch.randn(count, *output.shape[1:], generator=generator, dtype=output.dtype)
    targets = (targets > 0).to(targets) if isinstance(loss, BinaryCrossEntropy) else targets
    return inputs, targets.to(wanted.device)
