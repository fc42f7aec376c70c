"""Words in pieces, as BERT cuts them."""

import pytest

from natgrad.errors import DataError
from natgrad.lab.data import WordPiece
from natgrad.lab.data.wordpiece import SPECIAL, is_punctuation, spaced, words
from unit.lab.data.error_text import says

PIECES = ("want", "##want", "##ed", "wa", "un", "runn", "##ing", ",", "low", "##est", "l")


@pytest.fixture
def pieces():
    return WordPiece((*SPECIAL, *PIECES))


def basic(text, lower=True):
    return [word for chunk in spaced(text).split() for word in words(chunk, lower)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("unwanted running", ["un", "##want", "##ed", "runn", "##ing"]),
        ("unwantedX running", ["[UNK]", "runn", "##ing"]),
        ("UNwantéd,running", ["un", "##want", "##ed", ",", "runn", "##ing"]),
        ("lowest low l", ["low", "##est", "low", "l"]),
        ("l" * 101, ["[UNK]"]),
        ("un" + "want" * 24 + "ed", ["un", *["##want"] * 24, "##ed"]),  # of 100 characters
    ],
)
def test_the_longest_piece_first(pieces, text, expected):
    assert pieces.pieces(text) == expected
    assert pieces.encode(text) == [pieces.number[piece] for piece in expected]


def test_words():
    assert basic(" \tHeLLo!how  \n Are yoU?  ") == ["hello", "!", "how", "are", "you", "?"]
    assert basic(" \tHeLLo!how ", lower=False) == ["HeLLo", "!", "how"]
    assert basic("Héllo Çava ñ") == ["hello", "cava", "n"]
    assert basic("Héllo", lower=False) == ["Héllo"]
    assert basic("ah博推zz") == ["ah", "博", "推", "zz"]
    assert basic("a\u00a0b\u2003c") == ["a", "b", "c"]  # spaces of other kinds
    assert basic("x\u200by\ufffdz\x00\x07") == ["xyz"]  # no width, no meaning, control
    assert basic("3.5% — “don't” [MASK]") == [
        *("3", ".", "5", "%", "—", "“", "don", "'", "t", "”", "[", "mask", "]")
    ]


@pytest.mark.parametrize("character", "-$^`|~<+=@_—“¿、")
def test_punctuation(character):
    assert is_punctuation(character)


@pytest.mark.parametrize("character", "aZ0 é日€")
def test_no_punctuation(character):
    assert not is_punctuation(character)


def test_decode(pieces):
    assert pieces.decode(pieces.encode("unwanted, running")) == "unwanted , running"
    assert pieces.decode([pieces.number["[CLS]"], pieces.number["low"]]) == "[CLS] low"


def test_ordinary_pieces():
    found = WordPiece((*SPECIAL, "[unused0]", "a", "[unused1]", "##b"))
    assert [found.vocabulary[i] for i in found.ordinary] == ["a", "##b"]


def test_files(tmp_path, pieces):
    pieces.write(tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8").split("\n")[:6] == [
        *SPECIAL,
        "want",
    ]
    found = WordPiece.from_file(tmp_path / "vocab.txt", lower=False)
    assert found.vocabulary == pieces.vocabulary
    assert found.pieces("Unwanted low") == ["[UNK]", "low"]
    (tmp_path / "windows.txt").write_bytes("\r\n".join([*SPECIAL, "a", "\u2028"]).encode())
    assert WordPiece.from_file(tmp_path / "windows.txt").vocabulary == (*SPECIAL, "a", "\u2028")


def test_messages(tmp_path):
    says(
        DataError,
        "The vocabulary of 2 pieces has no [PAD], [CLS], [SEP], [MASK]: give one in BERT's format, "
        "which has them.",
        lambda: WordPiece(("[UNK]", "a")),
    )
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, "a", "b", "a"]))
    says(
        DataError,
        f"{path} is no vocabulary: it has the piece 'a' twice: replace it or remove it.",
        lambda: WordPiece.from_file(path),
    )
    with pytest.raises(DataError, match="There is no text"):
        WordPiece.from_file(tmp_path / "nothing.txt")
