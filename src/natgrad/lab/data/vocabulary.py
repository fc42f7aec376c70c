"""A small WordPiece vocabulary from a text: its characters, and then, again and again, the most
frequent pair of neighbouring pieces as a further one."""

import heapq
from collections import Counter, defaultdict
from itertools import pairwise

from natgrad.errors import SettingError
from natgrad.lab.data.wordpiece import SPECIAL, WordPiece, spaced, words

Pair = tuple[str, str]


def build_vocabulary(
    text: str, size: int, *, lower: bool = True, characters: int = 1000
) -> WordPiece:
    """A WordPiece vocabulary of a text. Equal counts are decided by the alphabet.

    Arguments:
        text: whose words are counted.
        size: largest number of pieces, special ones and characters included.
        lower: whether the text is brought to lower case, and accents are taken away.
        characters: largest number of single characters, the most frequent ones; words with others
            are left out.
    """
    counts: Counter[str] = Counter()
    for chunk, count in Counter(spaced(text).split()).items():
        for word in words(chunk, lower):
            counts[word] += count
    alphabet = _alphabet(counts, characters)
    cuts = {word: _single(word) for word in counts if set(word) <= alphabet}
    single = sorted({piece for pieces in cuts.values() for piece in pieces})
    room = size - len(SPECIAL) - len(single)
    if room < 0:
        raise SettingError(
            f"size is {size} but the special pieces and the characters alone are {size - room}: "
            "pass at least that, or fewer characters."
        )
    merged = _merged(cuts, counts, room)
    return WordPiece((*SPECIAL, *single, *merged), lower=lower)


def _alphabet(counts: Counter[str], most: int) -> set[str]:
    frequent: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            frequent[character] += count
    ranked = sorted(frequent, key=lambda character: (-frequent[character], character))
    return set(ranked[:most])


def _single(word: str) -> list[str]:
    return [word[0], *(f"##{character}" for character in word[1:])]


def _joined(pair: Pair) -> str:
    return pair[0] + pair[1].removeprefix("##")


def _merged(cuts: dict[str, list[str]], counts: Counter[str], most: int) -> list[str]:
    """Further pieces, the most frequent first; ``cuts`` are changed."""
    frequent: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[str]] = defaultdict(set)
    for word, pieces in cuts.items():
        for pair in pairwise(pieces):
            frequent[pair] += counts[word]
            where[pair].add(word)
    heap = [(-count, pair) for pair, count in frequent.items()]
    heapq.heapify(heap)
    found: list[str] = []
    while heap and len(found) < most:
        count, pair = heapq.heappop(heap)
        if -count != frequent[pair]:  # it has changed since
            continue
        if not count:
            break
        found.append(piece := _joined(pair))
        changed = set()
        for word in where.pop(pair):
            pieces = cuts[word]
            for old in pairwise(pieces):
                frequent[old] -= counts[word]
                changed.add(old)
            cuts[word] = pieces = _with(pieces, pair, piece)
            for new in pairwise(pieces):
                frequent[new] += counts[word]
                where[new].add(word)
                changed.add(new)
        for other in changed:
            if frequent[other] > 0:
                heapq.heappush(heap, (-frequent[other], other))
    return found


def _with(pieces: list[str], pair: Pair, piece: str) -> list[str]:
    """The pair replaced wherever it stands, from the left."""
    found: list[str] = []
    i = 0
    while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair:
            found.append(piece)
            i += 2
        else:
            found.append(pieces[i])
            i += 1
    return found
