"""Hidden words: how many, by what they are replaced, and that it is the same in every run."""

import numpy as np
import pytest
import torch

from natgrad.errors import DataError, SettingError
from natgrad.lab.data import MaskedWords, Split, WordPiece, build_vocabulary, loader, masked_words
from natgrad.lab.data.random_numbers import uniform
from natgrad.lab.data.sources import WIKITEXT2
from natgrad.lab.data.wordpiece import SPECIAL
from unit.lab.data.error_text import says

WORDS = WordPiece((*SPECIAL, *(f"w{i}" for i in range(1000))))
MASK, CLS, SEP = (WORDS.number[name] for name in ("[MASK]", "[CLS]", "[SEP]"))


def data(windows=200, length=66, share=0.15):
    tokens = torch.randint(5, 1005, (windows * (length - 2) + 7,))
    return MaskedWords(tokens, WORDS, length, share)


def batch(it, epoch=0, seed=0):
    return it.take(range(len(it)), uniform(seed, epoch, np.arange(len(it)), it.chances))


def test_windows_are_framed_and_hold_all_but_the_rest():
    it = data()
    inputs, targets = batch(it)
    assert len(it) == 200
    assert inputs.shape == targets.shape == (200, 66)
    assert (inputs[:, 0] == CLS).all()
    assert (inputs[:, -1] == SEP).all()
    assert (targets[:, [0, -1]] == -100).all()
    guessed = targets != -100
    original = torch.where(guessed, targets, inputs)[:, 1:-1]
    assert torch.equal(original, it.windows)


@pytest.mark.parametrize(("share", "count"), [(0.15, 10), (0.5, 32), (1.0, 64), (0.001, 1)])
def test_as_many_as_asked_for_in_every_window(share, count):
    _, targets = batch(data(share=share))
    assert (targets != -100).sum(1).unique().tolist() == [count]


@pytest.mark.parametrize(("windows", "share"), [(200, 1.0), (1300, 0.15)])
def test_eighty_ten_ten(windows, share):
    """Over about 13,000 guessed pieces; four standard deviations."""
    inputs, targets = batch(data(windows, share=share))
    guessed = targets != -100
    inputs, targets = inputs[guessed], targets[guessed]
    total = len(inputs)
    hidden = (inputs == MASK).sum() / total
    left = (inputs == targets).sum() / total
    other = ((inputs != MASK) & (inputs != targets)).sum() / total
    assert float(hidden) == pytest.approx(0.8, abs=0.015)
    assert float(left) == pytest.approx(0.1, abs=0.012)
    assert float(other) == pytest.approx(0.1, abs=0.012)
    replaced = inputs[(inputs != MASK) & (inputs != targets)]
    assert replaced.min() >= 5  # no special ones
    assert len(replaced.unique()) > 600  # of 1000, by 1280 draws


def test_positions_are_as_likely():
    """All positions, and independent of how and by what."""
    it = data(windows=2000, length=12, share=0.3)
    _, targets = batch(it)
    share = (targets[:, 1:-1] != -100).double().mean(0)
    assert share.tolist() == pytest.approx([0.3] * 10, abs=0.045)


def test_the_same_for_seed_and_epoch_on_any_ranks():
    it = data(windows=24)
    alone = {}
    first = loader(it.part(range(24)), 24, seed=3)
    for inputs, targets in first:
        for window, target in zip(inputs, targets, strict=True):
            original = tuple(torch.where(target != -100, target, window)[1:-1].tolist())
            alone[original] = window
    for rank in range(2):
        for inputs, targets in loader(it, 4, seed=3, rank=rank, ranks=2):
            for window, target in zip(inputs, targets, strict=True):
                original = tuple(torch.where(target != -100, target, window)[1:-1].tolist())
                assert torch.equal(alone[original], window)
    assert not torch.equal(batch(it)[0], batch(it, epoch=1)[0])
    assert not torch.equal(batch(it)[0], batch(it, seed=1)[0])


def test_of_a_text():
    text = Split("the cat sat on the mat . " * 40, "the cat sat . " * 20)
    words = build_vocabulary(text.train, 40)
    train, test = masked_words(text, words, 12)
    assert len(train) == 28
    assert len(test) == 8
    assert words.decode(train.windows[0]) == "the cat sat on the mat . the cat sat"


def test_messages():
    tokens = torch.zeros(10, dtype=torch.int64)
    says(
        SettingError,
        "length is 2 but [CLS], a piece and [SEP] take 3: pass at least that.",
        lambda: MaskedWords(tokens, WORDS, 2),
    )
    says(
        SettingError,
        "share is 0 but must be in (0, 1]: pass the share of pieces to guess.",
        lambda: MaskedWords(tokens, WORDS, 5, 0),
    )
    says(
        DataError,
        "The text has 10 pieces but a window takes 126: give more text, or pass a shorter length.",
        lambda: MaskedWords(tokens, WORDS),
    )


def test_the_default_text(places, real, monkeypatch):
    """WikiText-2 with a vocabulary of its own, here a small excerpt in its place."""
    home = places.cache / "wikitext-2"
    home.mkdir(parents=True)
    for name in WIKITEXT2.files:
        (home / name).write_text("the cat sat on the mat . " * 60)
    train, test = masked_words(length=16)
    assert len(train) == len(test) == 30
    assert len(train.words) < 8192
