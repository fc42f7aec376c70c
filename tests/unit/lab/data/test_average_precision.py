"""Average precision by hand, and against an oracle that follows COCO's words one by one."""

from collections import defaultdict
from fractions import Fraction

import pytest
import torch

from natgrad.lab.data import average_precision, box_matches, mask_matches
from natgrad.lab.data.average_precision import MOST, OVERLAPS

SIDE = 24


def objects(*each, crowds=()):
    """Of (label, box), with masks that fill the boxes."""
    boxes = torch.tensor([box for _, box in each], dtype=torch.float32).view(-1, 4)
    return {
        "labels": torch.tensor([label for label, _ in each], dtype=torch.int64),
        "boxes": boxes,
        "masks": filled(boxes).to(torch.uint8),
        "iscrowd": torch.tensor([int(i in crowds) for i in range(len(each))], dtype=torch.int64),
    }


def findings(*each):
    """Of (label, score, box)."""
    boxes = torch.tensor([box for *_, box in each], dtype=torch.float32).view(-1, 4)
    return {
        "labels": torch.tensor([label for label, *_ in each], dtype=torch.int64),
        "scores": torch.tensor([score for _, score, _ in each]),
        "boxes": boxes,
        "masks": filled(boxes).float().unsqueeze(1) * 0.8,
    }


def filled(boxes):
    rows, columns = torch.arange(SIDE).view(1, -1, 1), torch.arange(SIDE).view(1, 1, -1)
    left, top, right, bottom = (edge.view(-1, 1, 1) for edge in boxes.unbind(1))
    return (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)


def both(*pairs):
    """Boxes and masks, which must agree here."""
    found = average_precision([box_matches(*pair) for pair in pairs])
    assert average_precision([mask_matches(*pair) for pair in pairs]) == found
    return found


SQUARE = (2, 2, 12, 12)


def test_all_found():
    found = both(
        (
            findings((1, 0.9, SQUARE), (2, 0.3, (0, 0, 4, 4))),
            objects((1, SQUARE), (2, (0, 0, 4, 4))),
        )
    )
    assert (found.mean, found.half) == (1.0, 1.0)


def test_nothing_found():
    found = both((findings(), objects((1, SQUARE))))
    assert (found.mean, found.half) == (0.0, 0.0)


def test_the_wrong_class():
    assert both((findings((2, 0.9, SQUARE)), objects((1, SQUARE)))).half == 0.0


def test_how_far_a_box_may_be_off():
    """An overlap of 0.7 is enough for .5, .55, .6, .65 and .7, half of all."""
    found = both((findings((1, 0.9, (2, 2, 12, 9))), objects((1, SQUARE))))
    assert (found.mean, found.half) == (pytest.approx(0.5), 1.0)


def test_a_wrong_one_before_a_right_one():
    """Precision is 1/2 at every recall; after it, it would not matter."""
    wrong, right = (1, 0.9, (14, 14, 20, 20)), (1, 0.8, SQUARE)
    assert both((findings(wrong, right), objects((1, SQUARE)))).half == 0.5
    assert both((findings((1, 0.7, (14, 14, 20, 20)), right), objects((1, SQUARE)))).half == 1.0


def test_one_object_is_found_once():
    """The second finding is wrong: the third has a precision of 2/3, for recalls above 1/2."""
    pair = (
        findings((1, 0.9, SQUARE), (1, 0.8, SQUARE), (1, 0.7, (14, 14, 22, 22))),
        objects((1, SQUARE), (1, (14, 14, 22, 22))),
    )
    assert both(pair).half == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)


def test_scores_are_compared_over_images():
    """In the order of scores: right, wrong, right, as above."""
    pairs = [
        (findings((1, 0.9, SQUARE), (1, 0.2, (14, 14, 20, 20))), objects((1, SQUARE))),
        (findings((1, 0.5, (14, 14, 20, 20)), (1, 0.4, SQUARE)), objects((1, SQUARE))),
    ]
    expected = pytest.approx((51 * 1 + 50 * 2 / 3) / 101)
    assert both(*pairs).half == expected
    assert both(*reversed(pairs)).half == expected


def test_classes_count_alike():
    """Class 1 is found, class 2 is not; class 3, which is not there, is no class."""
    pair = (
        findings((1, 0.9, SQUARE), (3, 0.9, (14, 14, 20, 20))),
        objects((1, SQUARE), (2, (14, 2, 20, 8)), (2, (14, 14, 20, 20))),
    )
    assert both(pair).half == 0.5


def test_what_is_found_in_a_crowd_does_not_count():
    crowd = (2, 14, 22, 22)
    inside = [(1, 0.9 - i / 100, (4 + 3 * i, 15, 7 + 3 * i, 20)) for i in range(4)]
    pair = (findings(*inside, (1, 0.5, SQUARE)), objects((1, SQUARE), (1, crowd), crowds=[1]))
    assert both(pair).half == 1.0
    alone = (findings(*inside), objects((1, crowd), crowds=[0]))
    assert both(alone).half == 0.0  # there is nothing to find


def test_no_images():
    assert average_precision([]).mean == 0.0


def test_at_most_so_many_of_a_class():
    wrong = [(1, 0.9, (14, 14, 20, 20))] * MOST
    pair = (findings(*wrong, (1, 0.5, SQUARE), (2, 0.1, SQUARE)), objects((1, SQUARE), (2, SQUARE)))
    assert both(pair).half == 0.5


def overlap(a, b, crowd):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = [(c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)]
    return width * height / (areas[0] if crowd else sum(areas) - width * height)


def oracle(pairs, least):
    """Of one overlap, with fractions and loops."""
    found, there = defaultdict(list), defaultdict(int)
    for findings, truth in pairs:
        taken = set()
        crowds = truth["iscrowd"].tolist()
        for label, crowd in zip(truth["labels"].tolist(), crowds, strict=True):
            there[label] += not crowd
        order = sorted(range(len(findings["scores"])), key=lambda i: -float(findings["scores"][i]))
        for i in order:
            label, box = int(findings["labels"][i]), findings["boxes"][i].tolist()
            best, ignored = None, False
            for j, other in enumerate(truth["boxes"].tolist()):
                if int(truth["labels"][j]) != label:
                    continue
                amount = overlap(box, other, crowds[j])
                if crowds[j]:
                    ignored = ignored or amount >= least
                elif j not in taken and amount >= least and (best is None or amount >= best[0]):
                    best = (amount, j)
            if best is not None:
                taken.add(best[1])
            if best is not None or not ignored:
                found[label].append((float(findings["scores"][i]), best is not None))
    precisions = []
    for label, count in there.items():
        if not count:
            continue
        points, hits = [], 0
        for n, (_, hit) in enumerate(sorted(found[label], key=lambda one: -one[0]), start=1):
            hits += hit
            points.append((hits / count, Fraction(hits, n)))
        for step in range(101):
            reached = [precision for recall, precision in points if recall >= step * 0.01]
            precisions.append(max(reached, default=Fraction(0)))
    return float(sum(precisions) / len(precisions))


@pytest.mark.parametrize("seed", range(4))
def test_random_images(seed):
    draw = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=draw))

    def box(near=None):
        if near is not None:
            left, top, right, bottom = (v + number(-1, 2) for v in near)
            return (left, top, max(right, left + 2), max(bottom, top + 2))
        left, top = number(0, 12), number(0, 12)
        return (left, top, left + number(4, 12), top + number(4, 12))

    pairs = []
    for _ in range(8):
        truth = [(number(1, 4), box()) for _ in range(number(0, 5))]
        crowds = [i for i in range(len(truth)) if number(0, 6) == 0]
        guesses = [(label, number(0, 8) / 8, box(near)) for label, near in truth * 2]
        guesses += [(number(1, 4), number(0, 8) / 8, box()) for _ in range(number(0, 4))]
        pairs.append((findings(*guesses), objects(*truth, crowds=crowds)))
    found = average_precision([box_matches(*pair) for pair in pairs])
    each = [oracle(pairs, least) for least in OVERLAPS]
    assert found.half == pytest.approx(each[0])
    assert found.mean == pytest.approx(sum(each) / len(each))
    assert 0 < found.mean < found.half < 1
