"""What Mask R-CNN is asked for is checked before torchvision is; the rest is in integrations."""

import sys

import pytest

from natgrad.errors import SettingError
from natgrad.lab.models import mask_rcnn, small_mask_rcnn, vision


@pytest.fixture(autouse=True)
def _without_torchvision(monkeypatch):
    vision.torchvision.cache_clear()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    yield
    vision.torchvision.cache_clear()


@pytest.mark.parametrize("build", [mask_rcnn, small_mask_rcnn], ids=["full", "small"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"classes": 1},
            "classes is 1 but there must be at least 2, of which the background is one: pass how "
            "many there are with it.",
        ),
        (
            {"classes": 4, "side": 31},
            "side is 31 but must be at least 32 pixels, the step of the coarsest features: pass a "
            "larger one.",
        ),
        (
            {"classes": 4},
            "Mask R-CNN needs torchvision, which is not installed: pip install 'natgrad[vision]'.",
        ),
    ],
    ids=["classes", "side", "torchvision"],
)
def test_what_is_refused(build, given, message):
    with pytest.raises(SettingError) as error:
        build(**given)
    assert str(error.value) == message


@pytest.mark.parametrize("width", [2, 18])
def test_a_width_that_norms_cannot_share(width):
    with pytest.raises(SettingError) as error:
        small_mask_rcnn(4, width=width)
    assert str(error.value) == (
        f"width is {width} but must be a multiple of 4, the groups of a norm: pass such a number."
    )
