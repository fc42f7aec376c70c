"""Characters that predict the next one: windows of a text, ``(t₀ … tₗ₋₁, t₁ … tₗ)``."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from natgrad.data import text as texts
from natgrad.data.chances import Chances
from natgrad.data.rows import Rows, Split
from natgrad.errors import DataError, SettingError


class Characters(Rows):
    """``tokens [n]`` in windows of ``length`` that begin every ``stride`` tokens."""

    def __init__(
        self, tokens: Tensor, vocabulary: Sequence[str], length: int, stride: int | None = None
    ) -> None:
        for name, value in (("length", length), ("stride", length if stride is None else stride)):
            if value < 1:
                raise SettingError(f"{name} is {value} but must be at least 1: pass such an int.")
        self.tokens, self.vocabulary, self.length = tokens, tuple(vocabulary), length
        self.stride = length if stride is None else stride
        if len(self) < 1:
            raise DataError(
                f"The text has {len(tokens)} characters but a window of {length} and the next one "
                f"take {length + 1}: give more text, or pass a shorter length."
            )
        self._number = {character: i for i, character in enumerate(self.vocabulary)}

    def __len__(self) -> int:
        return (len(self.tokens) - 1 - self.length) // self.stride + 1

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Tensor, Tensor]:
        """``[n, length]``, ``[n, length]``"""
        starts = torch.as_tensor(rows) * self.stride
        windows = self.tokens[starts[:, None] + torch.arange(self.length + 1)]
        return windows[:, :-1], windows[:, 1:]

    def encode(self, text: str) -> Tensor:
        """``[len(text)]``"""
        return encoded(text, self._number)

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        return "".join(self.vocabulary[int(token)] for token in tokens)


def characters(
    text: str | None = None, length: int = 256, *, test: float = 0.1, stride: int | None = None
) -> Split[Characters]:
    """Of ``text``, by default tinyshakespeare; its last share ``test`` is kept to judge by.

    The vocabulary is what characters the text has, in the order of their code points.
    """
    if not 0 < test < 1:
        raise SettingError(
            f"test is {test} but must be in (0, 1): pass the share of the text to judge by."
        )
    text = texts.tinyshakespeare() if text is None else text
    vocabulary = sorted(set(text))
    tokens = encoded(text, {character: i for i, character in enumerate(vocabulary)})
    cut = round(len(tokens) * (1 - test))
    return Split(
        Characters(tokens[:cut], vocabulary, length, stride),
        Characters(tokens[cut:], vocabulary, length, stride),
    )


def encoded(text: str, number: dict[str, int]) -> Tensor:
    """``[len(text)]``"""
    try:
        return torch.tensor([number[character] for character in text], dtype=torch.int64)
    except KeyError as error:
        raise SettingError(
            f"The text has the character {error.args[0]!r}, which is not in the vocabulary: leave "
            "it out, or make the vocabulary of a text that has it."
        ) from None
