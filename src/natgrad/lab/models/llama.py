"""A decoder like Llama: RMSNorm, rotary attention with grouped keys and a gated MLP, without biases
(Touvron et al. 2023)."""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.errors import SettingError


@dataclass(frozen=True)
class LlamaSize:
    """How large a Llama is.

    Arguments:
        layers: of attention, each followed by a gated MLP.
        width: of the embeddings and hidden states.
        heads: of queries in each layer; must divide ``width``.
        key_heads: of keys and values; must divide ``heads``.
        hidden: units of the gated MLP.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int

    def __post_init__(self) -> None:
        sizes = [getattr(self, one.name) for one in fields(self)]
        if min(sizes) < 1 or self.width % (2 * self.heads) or self.heads % self.key_heads:
            raise SettingError(
                f"A Llama has {self.layers} layers, width {self.width}, {self.heads} heads, "
                f"{self.key_heads} heads of keys and {self.hidden} hidden units but each must be "
                "at least 1, twice the heads divide the width and heads of keys the heads: pass "
                "such numbers."
            )


LLAMA_7B = LlamaSize(layers=32, width=4096, heads=32, key_heads=32, hidden=11008)
LLAMA_13B = LlamaSize(layers=40, width=5120, heads=40, key_heads=40, hidden=13824)
LLAMA_70B = LlamaSize(layers=80, width=8192, heads=64, key_heads=8, hidden=28672)


class Llama(nn.Module):
    """``[n, tokens] -> [n, tokens, vocabulary]``: logits at position t of the token after t.

    Arguments:
        size: such as ``LLAMA_7B``.
        vocabulary: number of different tokens.
    """

    def __init__(self, size: LlamaSize, vocabulary: int = 32000) -> None:
        super().__init__()
        if vocabulary < 1:
            raise SettingError(
                f"A Llama has vocabulary {vocabulary} but needs at least 1: pass such a number."
            )
        self.token = nn.Embedding(vocabulary, size.width)
        self.layers = nn.Sequential(*(LlamaLayer(size) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[n, tokens, vocabulary]``.

        Arguments:
            tokens: ``[n, tokens]``, their numbers.
        """
        logits: Tensor = self.head(self.norm(self.layers(self.token(tokens))))
        return logits


class LlamaLayer(nn.Module):
    """``x <- x + f(norm(x))`` for attention and for the gated MLP."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = GroupedAttention(size)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.inner = nn.Linear(size.width, size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, tokens, width]``"""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        x = x + self.out(F.silu(self.gate(y)) * self.inner(y))
        return x


class GroupedAttention(nn.Module):
    """Every position looks at itself and those before; several queries share a key."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.heads, self.key_heads = size.heads, size.key_heads
        each = size.width // size.heads
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, each * size.key_heads, bias=False)
        self.value = nn.Linear(size.width, each * size.key_heads, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, tokens, width]``"""
        query = rotated(self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        key = rotated(self.key(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2))
        value = self.value(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        repeats = self.heads // self.key_heads
        key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def rotated(x: Tensor, base: float = 10000.0) -> Tensor:
    """Pairs of numbers turned by an angle that grows with the position (Su et al. 2021).

    Arguments:
        x: ``[n, heads, tokens, 2 d]``; number i and number d + i are a pair.
        base: of the angles ``t base^(-i / d)``.
    """
    half = x.shape[-1] // 2
    speeds = base ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
