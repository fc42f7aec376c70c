"""Networks by name, for data of any shape."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from natgrad.errors import SettingError
from natgrad.models import (
    BERT_LARGE,
    GPT,
    UNet,
    autoencoder,
    bert,
    convnet,
    he_normal_,
    mask_rcnn,
    mlp,
    resnet,
    small_mask_rcnn,
    small_resnet,
)
from natgrad.train.settings import MASK_RCNNS, Settings

SMALL = (8, 20, 32, 56, 110)  # depths of residual networks for images of 32 x 32


@dataclass(frozen=True)
class About:
    """What a network must know of the data: the shape of an ``image`` ``[c, h, w]`` and how many
    ``classes`` it may be of, or how many different tokens there are (``vocabulary``)."""

    image: tuple[int, int, int] | None = None
    classes: int = 0
    vocabulary: int = 0


def build(settings: Settings, about: About) -> nn.Module:
    """With weights as they are drawn now."""
    name = settings.network
    if (settings.loss == "instances") != (name in MASK_RCNNS):
        raise SettingError(
            f"network {name} and loss {settings.loss} do not go together: a mask-rcnn has loss "
            "instances, and it alone."
        )
    if (name in ("gpt", "bert")) != bool(about.vocabulary):
        takes, are = ("tokens", "images") if name in ("gpt", "bert") else ("images", "tokens")
        raise SettingError(
            f"network {name} takes {takes} but the data {settings.data} are {are}: name another "
            "network, or other data."
        )
    if name in MASK_RCNNS:
        model = _instances(settings, about)
    else:
        model = _images(settings, about) if about.image is not None else _tokens(settings, about)
    return he_normal_(model) if settings.he_normal else model


def _instances(settings: Settings, about: About) -> nn.Module:
    side = {"side": settings.image} if settings.image else {}
    if settings.network == "mask-rcnn":
        return mask_rcnn(about.classes, **side)
    width = {"width": settings.width} if settings.width else {}
    return small_mask_rcnn(about.classes, **side, **width)


def _images(settings: Settings, about: About) -> nn.Module:
    assert about.image is not None
    name, width, pixels = settings.network, settings.width, _product(about.image)
    if (settings.loss == "reconstruction") != (name == "autoencoder"):
        raise SettingError(
            f"network {name} and loss {settings.loss} do not go together: an autoencoder has loss "
            "reconstruction, and it alone."
        )
    if (settings.loss == "pixels") != (name == "unet"):
        raise SettingError(
            f"network {name} and loss {settings.loss} do not go together: a unet has loss pixels, "
            "and it alone."
        )
    match name:
        case "convnet":
            return convnet(
                about.image, channels=(width or 16, 2 * (width or 16)), classes=about.classes
            )
        case "mlp":
            return nn.Sequential(
                nn.Flatten(), *mlp((pixels, width or 128, width or 128, about.classes))
            )
        case "autoencoder":
            first = width or 2 * pixels
            return nn.Sequential(
                nn.Flatten(), *autoencoder((pixels, first, first // 2, first // 4, 12))
            )
        case "unet":
            return UNet(about.image[0], 1, width=width or 32)
    depth = int(name.removeprefix("resnet"))
    if about.image[0] != 3:
        raise SettingError(
            f"network {name} takes images of 3 channels but those of {settings.data} have "
            f"{about.image[0]}: name another network, or other data."
        )
    return small_resnet(depth, about.classes) if depth in SMALL else resnet(depth, about.classes)


def _tokens(settings: Settings, about: About) -> nn.Module:
    wanted = "tokens" if settings.network == "gpt" else "masked-tokens"
    if settings.loss != wanted:
        raise SettingError(
            f"network {settings.network} and loss {settings.loss} do not go together: pass loss "
            f"{wanted}."
        )
    sizes = {"layers": settings.layers, "heads": settings.heads, "width": settings.width}
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size}
    if settings.network == "bert":
        size = replace(BERT_LARGE, **given)
        # Weights of short windows are then those of long ones.
        context = max(512, settings.context)
        return bert(about.vocabulary, size, context=context, dropout=settings.dropout)
    return GPT(about.vocabulary, settings.context, dropout=settings.dropout, **given)


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found
