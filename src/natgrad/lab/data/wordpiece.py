"""WordPiece, as in BERT: words are cut greedily into the longest pieces that a vocabulary has.

``unwanted`` becomes ``un ##want ##ed``; a word that cannot be cut is ``[UNK]``.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from natgrad.errors import DataError
from natgrad.lab.data import text as texts
from natgrad.lab.data.locations import spoilt

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLS, SEP, MASK)
_LONGEST = 100  # characters of a word, above which it is unknown
# Ideographs, each of which is a word.
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPiece:
    """A vocabulary, and how words are cut into its pieces.

    Arguments:
        vocabulary: the pieces in the order of their numbers; ``[PAD]``, ``[UNK]``, ``[CLS]``,
            ``[SEP]`` and ``[MASK]`` must be among them.
        lower: whether texts are brought to lower case, and accents are taken away.
    """

    def __init__(self, vocabulary: Sequence[str], *, lower: bool = True) -> None:
        self.vocabulary, self.lower = tuple(vocabulary), lower
        self.number = {piece: i for i, piece in enumerate(self.vocabulary)}
        if missing := [piece for piece in SPECIAL if piece not in self.number]:
            raise DataError(
                f"The vocabulary of {len(self.vocabulary)} pieces has no {', '.join(missing)}: "
                "give one in BERT's format, which has them."
            )
        self._known: dict[str, tuple[int, ...]] = {}  # what is between two spaces -> its pieces

    @classmethod
    def from_file(cls, path: Path | str, *, lower: bool = True) -> "WordPiece":
        """A vocabulary from a file.

        Arguments:
            path: of a file with a piece a line, as the ``vocab.txt`` of a BERT; may be compressed
                by gzip.
            lower: whether texts are brought to lower case, and accents are taken away.
        """
        pieces = [line.rstrip("\r") for line in texts.read(path).split("\n")]
        while pieces and not pieces[-1]:
            pieces.pop()
        if len(set(pieces)) < len(pieces):
            twice = next(piece for piece in pieces if pieces.count(piece) > 1)
            raise spoilt(Path(path), f"is no vocabulary: it has the piece {twice!r} twice")
        return cls(pieces, lower=lower)

    def write(self, path: Path | str) -> None:
        """Write the vocabulary, a piece a line.

        Arguments:
            path: of the file, which is overwritten.
        """
        Path(path).write_text("".join(f"{piece}\n" for piece in self.vocabulary), encoding="utf-8")

    def __len__(self) -> int:
        return len(self.vocabulary)

    @cached_property
    def ordinary(self) -> tuple[int, ...]:
        """Numbers of all pieces but the special and the unused ones."""
        return tuple(
            i
            for piece, i in self.number.items()
            if piece not in SPECIAL and not piece.startswith("[unused")
        )

    def encode(self, text: str) -> list[int]:
        """Numbers of the pieces of a text, without ``[CLS]`` and ``[SEP]``.

        Arguments:
            text: any text.
        """
        found: list[int] = []
        known = self._known
        for chunk in spaced(text).split():
            pieces = known.get(chunk)
            if pieces is None:
                pieces = tuple(n for word in words(chunk, self.lower) for n in self._cut(word))
                known[chunk] = pieces
            found.extend(pieces)
        return found

    def pieces(self, text: str) -> list[str]:
        """The pieces themselves, in place of their numbers.

        Arguments:
            text: any text.
        """
        return [self.vocabulary[number] for number in self.encode(text)]

    def decode(self, numbers: Iterable[int]) -> str:
        """Pieces joined to words, with spaces between them.

        Arguments:
            numbers: of pieces.
        """
        found = " ".join(self.vocabulary[int(number)] for number in numbers)
        return found.replace(" ##", "")

    def _cut(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        if len(word) > _LONGEST:
            return [self.number[UNKNOWN]]
        while start < len(word):
            before = "##" if start else ""
            for end in range(len(word), start, -1):
                number = self.number.get(before + word[start:end])
                if number is not None:
                    break
            else:
                return [self.number[UNKNOWN]]
            found.append(number)
            start = end
        return found


def words(chunk: str, lower: bool) -> Iterator[str]:
    """What lies between two spaces, cut at punctuation."""
    if lower:
        chunk = unicodedata.normalize("NFD", chunk.lower())
        chunk = "".join(c for c in chunk if unicodedata.category(c) != "Mn")
    word = ""
    for character in chunk:
        if not is_punctuation(character):
            word += character
            continue
        if word:
            yield word
            word = ""
        yield character
    if word:
        yield word


def spaced(text: str) -> str:
    """Without control characters, with every space plain, and with spaces around ideographs."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_SPACED)


class _Spaced(dict[int, str | None]):
    """A table for `str.translate` that is filled in as characters come up."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        if character in "\t\n\r" or unicodedata.category(character) == "Zs":
            found: str | None = " "
        elif code in (0, 0xFFFD) or unicodedata.category(character).startswith("C"):
            found = None
        elif any(low <= code <= high for low, high in _IDEOGRAPHS):
            found = f" {character} "
        else:
            found = character
        self[code] = found
        return found


_SPACED = _Spaced()


def is_punctuation(character: str) -> bool:
    """All of ASCII that is neither letter nor digit counts, also where Unicode calls it else."""
    if character.isascii():
        return not character.isalnum() and character.isprintable() and character != " "
    return unicodedata.category(character).startswith("P")
