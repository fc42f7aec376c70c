"""A small GPT: pre-norm layers of causal attention and an MLP, ``x <- x + f(norm(x))``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.errors import SettingError


class GPT(nn.Module):
    """``[n, tokens] -> [n, tokens, vocabulary]``: logits at position t of the token after t.

    Arguments:
        vocabulary: number of different tokens.
        context: largest number of tokens of a sample; more of them raise.
        layers: pairs of attention and MLP.
        heads: of attention in each layer; must divide ``width``.
        width: of the embeddings; the MLPs have four times as many hidden units.
        dropout: share of the embeddings, and of what layers add, that is left out in training.
        tied: whether the head is the embedding of tokens, transposed, as in GPT-2; otherwise it is
            a matrix of its own.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        *,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if min(vocabulary, context, layers, heads, width) < 1 or width % heads:
            raise SettingError(
                f"A GPT has vocabulary {vocabulary}, context {context}, {layers} layers, {heads} "
                f"heads and width {width} but each must be at least 1, and heads divide the width: "
                "pass such numbers."
            )
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Layer):
                # 2 x layers branches add up: each starts smaller, so that their sum does not grow.
                for last in (module.attention.out, module.out):
                    nn.init.normal_(last.weight, std=0.02 / (2 * layers) ** 0.5)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[n, tokens, vocabulary]``.

        Arguments:
            tokens: ``[n, tokens]``, their numbers.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise SettingError(
                f"A GPT of context {self.context} was given {length} tokens: give it at most "
                f"{self.context}."
            )
        places = torch.arange(length, device=tokens.device).expand_as(tokens)
        x = self.dropout(self.token(tokens) + self.place(places))
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


class Layer(nn.Module):
    """Attention, then an MLP of four times the width."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.inner, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, tokens, width]``"""
        x = x + self.dropout(self.attention(self.norm1(x)))
        y = F.gelu(self.inner(self.norm2(x)), approximate="tanh")
        x = x + self.dropout(self.out(y))
        return x


class Attention(nn.Module):
    """Every position looks at itself and those before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, tokens, width]``"""
        split = self.inner(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [n, heads, tokens, width / heads]
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out
