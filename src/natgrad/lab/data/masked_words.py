"""Words that are hidden and guessed from their context, as BERT is trained (Devlin et al. 2018).

Of a window's pieces 15% are to be guessed; of these 80% are replaced by ``[MASK]``, 10% by a random
piece, and 10% are left as they are.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.errors import DataError, SettingError
from natgrad.lab.data import text as texts
from natgrad.lab.data.dataset import IGNORED, Rows, Split
from natgrad.lab.data.random_numbers import Chances
from natgrad.lab.data.vocabulary import build_vocabulary
from natgrad.lab.data.wordpiece import CLS, MASK, SEP, WordPiece

PIECES = 8192  # of a vocabulary


class MaskedWords(Rows):
    """A text in windows ``[CLS] … [SEP]``; a rest at the end is left out.

    Batches are ``(inputs, targets)``, ``[n, length]`` each; targets are -100 but where a piece is
    to be guessed. What is hidden depends on seed, epoch and window alone.

    Arguments:
        tokens: ``[n]``, numbers of a text's pieces.
        words: the vocabulary.
        length: tokens of a window, with ``[CLS]`` and ``[SEP]``; at least 3.
        share: of a window's pieces that are to be guessed, above 0 and at most 1; at least one of
            them.
    """

    def __init__(
        self, tokens: Tensor, words: WordPiece, length: int = 128, share: float = 0.15
    ) -> None:
        if length < 3:
            raise SettingError(
                f"length is {length} but [CLS], a piece and [SEP] take 3: pass at least that."
            )
        if not 0 < share <= 1:
            raise SettingError(
                f"share is {share} but must be in (0, 1]: pass the share of pieces to guess."
            )
        self.words, self.length, inner = words, length, length - 2
        count = len(tokens) // inner
        if not count:
            raise DataError(
                f"The text has {len(tokens)} pieces but a window takes {inner}: give more text, or "
                "pass a shorter length."
            )
        self.windows = tokens[: count * inner].view(count, inner)
        self.guessed = max(1, round(share * inner))  # pieces of a window
        self.chances = 3 * inner
        self._ordinary = torch.tensor(words.ordinary)

    def __len__(self) -> int:
        return len(self.windows)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Tensor, Tensor]:
        windows = self.windows[torch.as_tensor(rows)]
        where, how, what = torch.from_numpy(chances).view(len(windows), 3, -1).unbind(1)
        hidden = torch.zeros_like(windows, dtype=torch.bool)
        hidden.scatter_(1, where.argsort(1)[:, : self.guessed], True)
        other = self._ordinary[(what * len(self._ordinary)).long()]
        seen = torch.where(how < 0.9, other, windows)
        seen = torch.where(how < 0.8, self.words.number[MASK], seen)
        seen = torch.where(hidden, seen, windows)
        targets = torch.where(hidden, windows, IGNORED)
        return self._framed(seen, CLS, SEP), self._framed(targets, IGNORED, IGNORED)

    def _framed(self, inner: Tensor, before: str | int, after: str | int) -> Tensor:
        """``[n, length - 2] -> [n, length]``"""
        first, last = (
            torch.full((len(inner), 1), self.words.number[end] if isinstance(end, str) else end)
            for end in (before, after)
        )
        return torch.cat([first, inner, last], 1)


def masked_words(
    text: Split[str] | None = None,
    words: WordPiece | None = None,
    length: int = 128,
    *,
    share: float = 0.15,
    pieces: int = PIECES,
) -> Split[MaskedWords]:
    """Windows of hidden words, to learn from and to judge by.

    Arguments:
        text: what to learn from and what to judge by; ``None`` is WikiText-2.
        words: the vocabulary. ``None`` makes one of the text to learn from, which takes a while:
            write it to a file to use it again.
        length: tokens of a window, with ``[CLS]`` and ``[SEP]``.
        share: of a window's pieces that are to be guessed.
        pieces: how many a vocabulary has that is made here.
    """
    text = texts.wikitext2() if text is None else text
    words = _vocabulary(text.train, pieces) if words is None else words
    train, judged = (MaskedWords(_numbers(words, part), words, length, share) for part in text)
    return Split(train, judged)


# Several runs in one process read the same text.
@lru_cache(maxsize=1)
def _vocabulary(text: str, pieces: int) -> WordPiece:
    return build_vocabulary(text, pieces)


@lru_cache(maxsize=2)
def _numbers(words: WordPiece, text: str) -> Tensor:
    return torch.tensor(words.encode(text), dtype=torch.int64)
