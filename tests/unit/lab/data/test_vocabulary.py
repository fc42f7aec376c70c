"""A vocabulary made of a text, against a slow one that counts all pairs anew each time."""

from collections import Counter
from itertools import pairwise

import pytest

from natgrad.errors import SettingError
from natgrad.lab.data import build_vocabulary
from natgrad.lab.data.sources import WIKITEXT2
from natgrad.lab.data.wordpiece import SPECIAL
from unit.lab.data.error_text import says

TEXT = "low low low low low lower lower newest newest newest newest newest newest widest widest"


def slow(text, size):
    counts = Counter(text.split())
    cuts = {word: [word[0], *(f"##{c}" for c in word[1:])] for word in counts}
    found = [*SPECIAL, *sorted({piece for cut in cuts.values() for piece in cut})]
    while len(found) < size:
        pairs = Counter()
        for word, cut in cuts.items():
            for pair in pairwise(cut):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        piece = best[0] + best[1].removeprefix("##")
        if piece not in found:
            found.append(piece)
        for word, cut in cuts.items():
            joined = []
            for one in cut:
                if joined and (joined[-1], one) == best:
                    joined[-1] = piece
                else:
                    joined.append(one)
            cuts[word] = joined
    return tuple(found)


@pytest.mark.parametrize("size", [20, 24, 30, 60])
def test_like_the_slow_one(size):
    assert build_vocabulary(TEXT, size).vocabulary == slow(TEXT, size)


@pytest.mark.parametrize("text", ["aaaa aaa aa a", "ababab abab cacaca", "x", "banana bandana ana"])
def test_pairs_that_overlap(text):
    assert build_vocabulary(text, 40).vocabulary == slow(text, 40)


def test_frequent_words_become_one_piece():
    found = build_vocabulary(TEXT, 60)
    assert found.pieces("newest lowest") == ["newest", "low", "##est"]


def test_like_the_slow_one_on_real_text(real):
    real(WIKITEXT2)
    from natgrad.lab.data import wikitext2

    text = " ".join(basic for basic in wikitext2().test[:6000].lower().split() if basic.isalpha())
    assert build_vocabulary(text, 400).vocabulary == slow(text, 400)


def test_rare_characters_are_left_out():
    found = build_vocabulary("aaa aab abc", 40, characters=2)
    assert "##c" not in found.number
    assert found.pieces("abc aab") == ["[UNK]", "aab"]


def test_case():
    assert "low" in build_vocabulary("LOW Low low", 20).number
    assert "low" not in build_vocabulary("LOW Low", 30, lower=False).number


def test_messages():
    says(
        SettingError,
        "size is 7 but the special pieces and the characters alone are 16: pass at least that, or "
        "fewer characters.",
        lambda: build_vocabulary(TEXT, 7),
    )
