"""Windows of characters, each with the next ones as its target."""

import pytest
import torch

from natgrad.errors import DataError, SettingError
from natgrad.lab.data import Characters, characters, loader
from natgrad.lab.data.sources import TINYSHAKESPEARE
from unit.lab.data.error_text import says

TEXT = "the quick brown fox jumps over the lazy dog"


def test_targets_are_the_next_characters():
    train, test = characters(TEXT, 5, test=0.25)
    assert train.decode(train.tokens) + test.decode(test.tokens) == TEXT
    assert len(train.tokens) == 32
    assert train.vocabulary == test.vocabulary == tuple(sorted(set(TEXT)))
    ((x, y),) = loader(train, 10, shuffle=False)
    assert [train.decode(row) for row in x] == [
        "the q",
        "uick ",
        "brown",
        " fox ",
        "jumps",
        " over",
    ]
    assert [train.decode(row) for row in y] == [
        "he qu",
        "ick b",
        "rown ",
        "fox j",
        "umps ",
        "over ",
    ]
    assert x.dtype == y.dtype == torch.int64


@pytest.mark.parametrize(("count", "windows"), [(6, 1), (10, 1), (11, 2), (12, 2)])
def test_every_whole_window(count, windows):
    data = Characters(torch.arange(count), "abcdefghijkl", 5)
    assert len(data) == windows
    assert int(data[windows - 1][1].max()) == windows * 5


def test_overlapping_windows():
    data = Characters(torch.arange(10), "abcdefghij", 5, stride=1)
    assert len(data) == 5
    assert data[4][0].tolist() == [4, 5, 6, 7, 8]
    assert data[4][1].tolist() == [5, 6, 7, 8, 9]


def test_encode_and_decode():
    train, _ = characters(TEXT, 5, test=0.25)
    assert train.decode(train.encode("fox over dog")) == "fox over dog"


def test_messages():
    says(
        SettingError,
        "test is 0 but must be in (0, 1): pass the share of the text to judge by.",
        lambda: characters(TEXT, 5, test=0),
    )
    says(
        SettingError,
        "length is 0 but must be at least 1: pass such an int.",
        lambda: characters(TEXT, 0),
    )
    says(
        SettingError,
        "stride is 0 but must be at least 1: pass such an int.",
        lambda: characters(TEXT, 5, stride=0),
    )
    says(
        DataError,
        "The text has 4 characters but a window of 5 and the next one take 6: give more text, or "
        "pass a shorter length.",
        lambda: characters(TEXT, 5),
    )
    says(
        SettingError,
        "The text has the character 'X', which is not in the vocabulary: leave it out, or make the "
        "vocabulary of a text that has it.",
        lambda: characters(TEXT, 3)[0].encode("foX"),
    )


def test_the_real_one(real):
    real(TINYSHAKESPEARE)
    train, test = characters()
    assert len(train.vocabulary) == 65
    assert len(train.tokens) + len(test.tokens) == 1_115_394
    x, y = train[0]
    assert x.shape == y.shape == (256,)
    assert train.decode(x).startswith("First Citizen:\nBefore we proceed")
