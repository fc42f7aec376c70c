"""BERT with its masked-LM head, by transformers: pieces that are hidden, guessed from those around
them (Devlin et al. 2018). ``x <- norm(x + f(x))``, and a head that is the transposed embedding."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError, first_line


@dataclass(frozen=True)
class BertSize:
    """How large a BERT is.

    Arguments:
        layers: of attention, each followed by an MLP of four times the width.
        heads: of attention in each layer; must divide ``width``.
        width: of the embeddings and hidden states.
    """

    layers: int
    heads: int
    width: int

    def __post_init__(self) -> None:
        if min(getattr(self, one.name) for one in fields(self)) < 1 or self.width % self.heads:
            raise SettingError(
                f"A BERT has {self.layers} layers, {self.heads} heads and width {self.width} but "
                "each must be at least 1, and heads divide the width: pass such numbers."
            )


BERT_BASE = BertSize(layers=12, heads=12, width=768)
BERT_LARGE = BertSize(layers=24, heads=16, width=1024)


class Bert(nn.Module):
    """A masked-LM model of transformers as ``[n, tokens] -> [n, tokens, vocabulary]`` logits.

    Arguments:
        model: a masked-LM model of transformers, such as ``BertForMaskedLM``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.context = int(model.config.max_position_embeddings)

    def forward(self, tokens: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Logits ``[n, tokens, vocabulary]``.

        Arguments:
            tokens: ``[n, tokens]``, or a mapping with ``input_ids`` and what else the model takes,
                such as an ``attention_mask``. More tokens than the model has positions raise.
        """
        named = {"input_ids": tokens} if isinstance(tokens, Tensor) else dict(tokens)
        ids = named["input_ids"]
        if (length := ids.shape[1]) > self.context:
            raise SettingError(
                f"A BERT of context {self.context} was given {length} tokens: give it at most "
                f"{self.context}."
            )
        # Left to itself it looks positions up once for all samples, and their gradients come back
        # as a sum, in which K-FAC cannot tell samples apart.
        places = torch.arange(length, device=ids.device).expand_as(ids)
        logits: Tensor = self.model(**{"position_ids": places, **named}).logits
        return logits


def bert(
    vocabulary: int, size: BertSize = BERT_BASE, *, context: int = 512, dropout: float = 0.1
) -> Bert:
    """A BERT with new weights. Needs transformers.

    Arguments:
        vocabulary: number of different tokens.
        size: such as ``BERT_BASE`` or ``BERT_LARGE``.
        context: largest number of tokens of a sample.
        dropout: of layers and of attention, in training.
    """
    if min(vocabulary, context) < 1:
        raise SettingError(
            f"A BERT has vocabulary {vocabulary} and context {context} but each must be at least "
            "1: pass such numbers."
        )
    config, model = _classes()
    return Bert(
        model(
            config(
                vocab_size=vocabulary,
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                intermediate_size=4 * size.width,
                max_position_embeddings=context,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )
    )


def _classes() -> tuple[Any, Any]:
    """Only when asked for: transformers take seconds to import."""
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise SettingError(
            "BERT needs transformers, which is not installed: pip install 'natgrad[train]'."
        ) from None
    try:
        return transformers.BertConfig, transformers.BertForMaskedLM
    except (ImportError, RuntimeError, AttributeError) as error:
        # It imports what else it finds, and a torchvision of another torch ends here.
        raise SettingError(
            f"BERT could not be imported from transformers ({first_line(error)}): repair or remove "
            "the package that fails, or pip install 'natgrad[train]' in a new environment."
        ) from error
