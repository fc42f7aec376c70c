"""Characters that predict the next one: windows of a text, ``(t₀ … tₗ₋₁, t₁ … tₗ)``."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from natgrad.errors import DataError, SettingError
from natgrad.lab.data import text as texts
from natgrad.lab.data.dataset import Rows, Split
from natgrad.lab.data.random_numbers import Chances


class Characters(Rows):
    """A text in windows, each with the same window one token later as its target.

    Arguments:
        tokens: ``[n]``, numbers of the characters of a text.
        vocabulary: the characters, in the order of their numbers.
        length: tokens of a window, at least 1.
        stride: tokens from the start of one window to the next, at least 1; ``None`` is ``length``,
            so that they do not overlap.
    """

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
        """Numbers ``[len(text)]`` of its characters.

        Arguments:
            text: of characters that are all in the vocabulary; others raise.
        """
        return encoded(text, self._number)

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """The text of some tokens.

        Arguments:
            tokens: their numbers.
        """
        return "".join(self.vocabulary[int(token)] for token in tokens)


def characters(
    text: str | None = None, length: int = 256, *, test: float = 0.1, stride: int | None = None
) -> Split[Characters]:
    """Windows of a text, to learn from and to judge by. The vocabulary is what characters the whole
    text has, in the order of their code points.

    Arguments:
        text: what is cut into windows; ``None`` is tinyshakespeare.
        length: tokens of a window.
        test: share of the text, between 0 and 1, that is kept to judge by: its end.
        stride: tokens from the start of one window to the next; ``None`` is ``length``.
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
