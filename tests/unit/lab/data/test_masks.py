"""Masks from polygons and run lengths; strings are what pycocotools 2.0.11 wrote."""

import numpy as np
import pytest

from natgrad.lab.data.masks import mask, polygon, runs
from unit.lab.data.error_text import says


def blocks():
    """Three masks of [h, w]."""
    small = np.zeros((6, 9), np.uint8)
    small[1:4, 2:7] = 1
    small[4, 5] = 1
    hole = np.zeros((50, 40), np.uint8)
    hole[10:40, 5:30] = 1
    hole[20:25, 10:20] = 0
    hole[0, 39] = 1
    return small, hole, np.ones((3, 4), np.uint8)


STRINGS = (
    "=3300001OO<",
    r"T8n0d000000000\OA5?KA5?KA5?KA5?KA5?KA5?KA5?KA5?KA5?KA5??000000000000000000h=SOUC",
    "0<",
)


@pytest.mark.parametrize(("made", "text"), list(zip(blocks(), STRINGS, strict=True)))
def test_compressed(made, text):
    found = runs({"size": list(made.shape), "counts": text}, *made.shape)
    assert np.array_equal(found, made)
    assert found.dtype == np.uint8


def test_numbers():
    found = runs({"size": [2, 3], "counts": [1, 3, 2]}, 2, 3)
    assert found.tolist() == [[0, 1, 0], [1, 1, 0]]  # down the columns
    assert runs({"size": [2, 2], "counts": [0, 4]}, 2, 2).tolist() == [[1, 1], [1, 1]]
    assert runs({"size": [2, 2], "counts": [4]}, 2, 2).tolist() == [[0, 0], [0, 0]]
    assert np.array_equal(
        runs({"size": [4, 4], "counts": [5, 2, 2, 2, 5]}, 4, 4),
        runs({"size": [4, 4], "counts": "52203"}, 4, 4),
    )


def inside(outline, x, y):
    """By the winding of the outline around a point, for one that does not cross itself."""
    points = np.asarray(outline, float).reshape(-1, 2) - (x, y)
    angles = np.arctan2(points[:, 1], points[:, 0])
    turns = np.diff(np.append(angles, angles[0]))
    return abs(((turns + np.pi) % (2 * np.pi) - np.pi).sum()) > np.pi


@pytest.mark.parametrize("seed", range(10))
def test_a_pixel_is_inside_if_its_middle_is(seed):
    rng = np.random.default_rng(seed)
    angles, radius = np.sort(rng.random(7)) * 2 * np.pi, 4 + 12 * rng.random(7)
    points = np.stack([14 + radius * np.cos(angles), 9 + radius * np.sin(angles)], 1)
    found = polygon(points.flatten().tolist(), 18, 25)  # parts of it lie outside of the image
    for y in range(18):
        for x in range(25):
            assert found[y, x] == inside(points, x + 0.5, y + 0.5), (x, y)


def test_rectangles_have_their_area():
    found = polygon([2, 1, 7, 1, 7, 4, 2, 4], 6, 9)
    assert found.sum() == 15
    assert found[1:4, 2:7].all()
    assert polygon([2.4, 1.4, 7.4, 1.4, 7.4, 4.4, 2.4, 4.4], 6, 9).sum() == 15
    assert polygon([-5, -5, 50, -5, 50, 50, -5, 50], 6, 9).all()
    assert not polygon([20, 1, 30, 1, 30, 4, 20, 4], 6, 9).any()


def test_several_polygons_are_one_mask():
    left, right = [0, 0, 2, 0, 2, 2, 0, 2], [1, 0, 4, 0, 4, 2, 1, 2]
    assert mask([left, right], 2, 5).tolist() == [[1, 1, 1, 1, 0]] * 2


@pytest.mark.parametrize(
    ("segmentation", "why"),
    [
        (None, "has neither polygons nor run lengths"),
        ([], "has neither polygons nor run lengths"),
        ("abc", "has neither polygons nor run lengths"),
        ([[0, 0, 1, 1]], "has a polygon that is not three or more pairs of x and y"),
        ([[0, 0, 1, 1, 2, 2, 3]], "has a polygon that is not three or more pairs of x and y"),
        ([3], "has a polygon that is not three or more pairs of x and y"),
        ([[0, 0, 1, 1, 2, float("nan")]], "has a polygon with a number that is not finite"),
        (
            {"size": [3, 2], "counts": [6]},
            "has run lengths of size [3, 2] for an image of [2, 3]",
        ),
        ({"counts": [6]}, "has run lengths of size None for an image of [2, 3]"),
        ({"size": [2, 3], "counts": [5]}, "has run lengths of 5 pixels for an image of 6"),
        ({"size": [2, 3]}, "has run lengths that are no numbers of at least 0"),
        ({"size": [2, 3], "counts": [-1, 7]}, "has run lengths that are no numbers of at least 0"),
        ({"size": [2, 3], "counts": "é"}, "has run lengths with the letter 'é'"),
        ({"size": [2, 3], "counts": "f"}, "has run lengths that end too early"),
    ],
)
def test_messages(segmentation, why):
    says(ValueError, why, lambda: mask(segmentation, 2, 3))
