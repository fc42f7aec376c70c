"""Networks by name, for data of any shape."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from natgrad.errors import SettingError
from natgrad.models import GPT, UNet, autoencoder, convnet, he_normal_, mlp, resnet, small_resnet
from natgrad.train.settings import Settings

SMALL = (8, 20, 32, 56, 110)  # depths of residual networks for images of 32 x 32
BERT = {"layers": 24, "heads": 16, "width": 1024}  # BERT-Large


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
    if (name in ("gpt", "bert")) != bool(about.vocabulary):
        takes, are = ("tokens", "images") if name in ("gpt", "bert") else ("images", "tokens")
        raise SettingError(
            f"network {name} takes {takes} but the data {settings.data} are {are}: name another "
            "network, or other data."
        )
    model = _images(settings, about) if about.image is not None else _tokens(settings, about)
    return he_normal_(model) if settings.he_normal else model


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
    if settings.network == "bert":
        return _Bert(settings, about.vocabulary)
    sizes = {"layers": settings.layers, "heads": settings.heads, "width": settings.width}
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size}
    return GPT(about.vocabulary, settings.context, dropout=settings.dropout, **given)


class _Bert(nn.Module):
    """BERT with its masked-LM head, by transformers: ``[n, tokens] -> [n, tokens, vocabulary]``."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        super().__init__()
        try:
            transformers = import_module("transformers")
        except ImportError:
            raise SettingError(
                "network bert needs transformers, which is not installed: pip install "
                "'natgrad[train]'."
            ) from None
        width = settings.width or BERT["width"]
        config = transformers.BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=settings.layers or BERT["layers"],
            num_attention_heads=settings.heads or BERT["heads"],
            intermediate_size=4 * width,
            max_position_embeddings=max(512, settings.context),
            hidden_dropout_prob=settings.dropout,
            attention_probs_dropout_prob=settings.dropout,
        )
        self.model = transformers.BertForMaskedLM(config)

    def forward(self, tokens: Any) -> Tensor:
        """``tokens [n, tokens]``, or what transformers take by name."""
        named = dict(tokens) if not isinstance(tokens, Tensor) else {"input_ids": tokens}
        logits: Tensor = self.model(**named).logits
        return logits


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found
