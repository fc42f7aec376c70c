"""Squares out of photographs: where they are, how large, and how often mirrored."""

import math

import numpy as np
import pytest

from natgrad.errors import SettingError
from natgrad.lab.data import Squeeze, Zoom
from natgrad.lab.data.random_numbers import uniform
from unit.lab.data.error_text import says
from unit.lab.data.image_fixtures import Image, noise


def image(height, width):
    return Image.fromarray(noise(height, width))


class TestSqueeze:
    def test_the_crop(self):
        given = image(30, 50)
        resized = np.asarray(given.resize((16, 16), Image.Resampling.BILINEAR))
        for chances in uniform(0, 0, np.arange(20), 3):
            left, top = int(chances[0] * 5), int(chances[1] * 5)
            expected = resized[top : top + 12, left : left + 12]
            expected = expected[:, ::-1] if chances[2] < 0.5 else expected
            found = np.asarray(Squeeze(16, 12).drawn(given, chances))
            assert np.array_equal(found, expected)

    def test_the_middle_and_the_corner(self):
        given = image(30, 50)
        resized = np.asarray(given.resize((16, 16), Image.Resampling.BILINEAR))
        crop = Squeeze(16, 12)
        assert np.array_equal(np.asarray(crop.middle(given)), resized[2:14, 2:14])
        assert np.array_equal(np.asarray(crop.corner(given)), resized[:12, :12])

    def test_the_papers_sizes(self):
        assert Squeeze() == Squeeze(side=256, size=224)
        assert Squeeze().middle(image(300, 200)).size == (224, 224)

    def test_all_of_it(self):
        given = image(8, 8)
        crop = Squeeze(8, 8)
        assert np.array_equal(np.asarray(crop.drawn(given, np.array([0.9, 0.9, 0.9]))), given)


class TestZoom:
    def test_boxes_lie_in_the_image_with_the_areas_asked_for(self):
        zoom = Zoom(area=(0.1, 0.5))
        shares, aspects = [], []
        for chances in uniform(0, 0, np.arange(3000), zoom.chances):
            left, top, width, height = zoom.box((400, 300), chances)
            assert 0 <= left <= left + width <= 400
            assert 0 <= top <= top + height <= 300
            shares.append(width * height / 120_000)
            aspects.append(math.log(width / height))
        assert min(shares) == pytest.approx(0.1, abs=0.005)
        assert max(shares) == pytest.approx(0.5, abs=0.005)
        assert np.mean(shares) == pytest.approx(0.3, abs=0.01)
        assert max(map(abs, aspects)) == pytest.approx(math.log(4 / 3), abs=0.02)
        assert np.mean(aspects) == pytest.approx(0, abs=0.02)

    def test_corners_are_drawn_over_all_the_room(self):
        zoom = Zoom(area=(0.25, 0.25), aspect=(1, 1))
        boxes = [zoom.box((100, 100), c) for c in uniform(0, 0, np.arange(3000), zoom.chances)]
        assert {box[2:] for box in boxes} == {(50, 50)}
        assert {box[0] for box in boxes} == set(range(51))
        assert {box[1] for box in boxes} == set(range(51))

    def test_the_middle_where_nothing_fits(self):
        zoom = Zoom(area=(1, 1))
        wide = zoom.box((1000, 10), np.full(23, 0.5))
        assert wide == (493, 0, 13, 10)
        assert zoom.box((10, 1000), np.full(23, 0.5)) == (0, 493, 10, 13)

    def test_the_cut(self):
        given, zoom = image(40, 60), Zoom(size=8, side=10)
        for chances in uniform(0, 0, np.arange(10), zoom.chances):
            left, top, width, height = zoom.box((60, 40), chances)
            box = (left, top, left + width, top + height)
            expected = given.resize((8, 8), Image.Resampling.BILINEAR, box)
            expected = np.asarray(expected)[:, ::-1] if chances[2] < 0.5 else np.asarray(expected)
            assert np.array_equal(np.asarray(zoom.drawn(given, chances)), expected)

    @pytest.mark.parametrize("size", [(40, 60), (60, 40), (40, 40), (7, 9)])
    def test_the_middle_keeps_the_aspect(self, size):
        given = image(*size)
        found = np.asarray(Zoom(size=8, side=10).middle(given))
        scale = 10 / min(size)
        width, height = round(size[1] * scale), round(size[0] * scale)
        resized = np.asarray(given.resize((width, height), Image.Resampling.BILINEAR))
        top, left = (height - 8) // 2, (width - 8) // 2
        assert np.array_equal(found, resized[top : top + 8, left : left + 8])


def test_messages():
    for make in (lambda: Squeeze(10, 12), lambda: Zoom(side=10, size=12)):
        says(
            SettingError,
            "A crop of 12 out of images of 10 pixels cannot be made: pass a size from 1 to the "
            "side.",
            make,
        )
    says(
        SettingError,
        "area is (0.5, 1.5) but must be two numbers above 0, in their order and at most 1: pass "
        "such a pair.",
        lambda: Zoom(area=(0.5, 1.5)),
    )
    says(
        SettingError,
        "aspect is (2, 1) but must be two numbers above 0, in their order and finite: pass such a "
        "pair.",
        lambda: Zoom(aspect=(2, 1)),
    )
