"""Networks of a size of their own that are planned for, not trained here: those of the papers and
larger ones, and any that a configuration file of transformers describes."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from natgrad.errors import SettingError, first_line
from natgrad.lab import models
from natgrad.lab.models.by_name import NamedNetwork
from natgrad.lab.models.llama import LLAMA_7B, LLAMA_13B, LLAMA_70B, Llama

_TOKENS = 50257  # of GPT-2


def _networks() -> list[NamedNetwork]:
    small = partial(models.GPT, _TOKENS, 1024, layers=12, heads=12, width=768)
    large = partial(models.GPT, _TOKENS, 1024, layers=48, heads=25, width=1600)
    bert = partial(models.bert, 30522, models.BERT_LARGE)
    found = [
        NamedNetwork("bert-large", alone=bert, sample=(512,)),
        NamedNetwork("gpt2", alone=small, sample=(1024,)),
        NamedNetwork("gpt2-xl", alone=large, sample=(1024,)),
        # Of KAISA: images of three channels, 256 x 256, and one mask.
        NamedNetwork("unet", alone=partial(models.UNet, 3, 1), sample=(3, 256, 256)),
        # With the classes of COCO. How many regions it looks at depends on the image, so that a
        # training step is not counted, and K-FAC alone is planned.
        NamedNetwork("mask-rcnn", alone=partial(models.mask_rcnn, 91)),
    ]
    for name, size in {"7b": LLAMA_7B, "13b": LLAMA_13B, "70b": LLAMA_70B}.items():
        found.append(NamedNetwork(f"llama-{name}", alone=partial(Llama, size), sample=(4096,)))
    return found


PLANNED = {network.name: network for network in _networks()}


def configured(path: Path) -> NamedNetwork:
    """The network that a ``config.json`` of transformers describes, without a head.

    Arguments:
        path: of the file, with the ``model_type`` of a model that transformers know.
    """
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise SettingError(
            f"Network {str(path)!r} is a configuration of transformers, which is not installed: "
            "pip install 'natgrad[train]'."
        ) from None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(**given)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SettingError(
            f"Network {str(path)!r} is no configuration that transformers can read "
            f"({first_line(error)}): name a config.json with a model_type that they know."
        ) from error
    build = partial(transformers.AutoModel.from_config, config)
    return NamedNetwork(str(path), alone=build, sample=_sample(config))


def _sample(config: Any) -> tuple[int, ...] | None:
    """Tokens, as many as the model has positions for but at most 512; or an image."""
    if (side := getattr(config, "image_size", None)) is not None:
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        return (getattr(config, "num_channels", 3), *sides)
    if getattr(config, "vocab_size", None) is None:
        return None
    return (min(512, getattr(config, "max_position_embeddings", None) or 512),)
