"""What stands in for torchvision's compiled operators, against loops; and torchvision itself."""

import sys
from types import ModuleType

import pytest
import torch

from natgrad.errors import SettingError
from natgrad.lab.models import vision


@pytest.fixture(autouse=True)
def _asked_anew():
    vision.torchvision.cache_clear()
    yield
    vision.torchvision.cache_clear()


def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(0.0, width) * max(0.0, height)
    areas = [(c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)]
    return both / (sum(areas) - both)


@pytest.mark.parametrize("at_once", [1024, 7])
@pytest.mark.parametrize("most", [0.0, 0.3, 0.7])
def test_non_maximum_suppression(most, at_once, monkeypatch):
    monkeypatch.setattr(vision, "_AT_ONCE", at_once)
    corners = torch.rand(40, 2) * 4
    boxes = torch.cat([corners, corners + 0.5 + 6 * torch.rand(40, 2)], 1)
    scores = (torch.rand(40) * 10).round()  # some of them equal
    kept = []
    for i in sorted(range(40), key=lambda i: -scores[i]):
        if all(iou(boxes[i].tolist(), boxes[j].tolist()) <= most for j in kept):
            kept.append(i)
    assert vision.nms(boxes, scores, most).tolist() == kept
    assert 0 < len(kept) < 40


def test_nothing_to_suppress():
    assert vision.nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []


def bilinear(plane, y, x):
    """Of ``plane [h, w]`` at a point: 0 more than a pixel outside, at the edge what is there."""
    h, w = plane.shape
    if not (-1 <= y <= h and -1 <= x <= w):
        return 0.0
    y, x = min(max(y, 0.0), h - 1.0), min(max(x, 0.0), w - 1.0)
    top, left = int(y), int(x)
    below, right = min(top + 1, h - 1), min(left + 1, w - 1)
    dy, dx = y - top, x - left
    upper = plane[top, left] * (1 - dx) + plane[top, right] * dx
    lower = plane[below, left] * (1 - dx) + plane[below, right] * dx
    return upper * (1 - dy) + lower * dy


def sampled(x, regions, scale, height, width, samples, aligned):
    out = torch.zeros(len(regions), x.shape[1], height, width, dtype=x.dtype)
    offset = 0.5 if aligned else 0.0
    for k, (image, *corners) in enumerate(regions.tolist()):
        left, top, right, bottom = (scale * corner - offset for corner in corners)
        extents = (bottom - top, right - left)
        if not aligned:
            extents = tuple(max(extent, 1.0) for extent in extents)
        cells = [extent / count for extent, count in zip(extents, (height, width), strict=True)]
        counts = [samples if samples > 0 else max(1, -int(-cell // 1)) for cell in cells]
        for c in range(x.shape[1]):
            for i in range(height):
                for j in range(width):
                    for a in range(counts[0]):
                        for b in range(counts[1]):
                            y = top + cells[0] * (i + (a + 0.5) / counts[0])
                            z = left + cells[1] * (j + (b + 0.5) / counts[1])
                            out[k, c, i, j] += bilinear(x[int(image), c], y, z)
            out[k, c] /= counts[0] * counts[1]
    return out


@pytest.mark.parametrize("aligned", [False, True], ids=["shifted", "aligned"])
@pytest.mark.parametrize("samples", [2, -1])
def test_aligned_regions(samples, aligned):
    x = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    regions = torch.tensor(
        [
            [1, 0, 0, 36, 24],  # all of it
            [0, 3.5, 2.25, 17, 11],
            [1, 30, 20, 44, 30],  # beyond the edge
            [0, 8, 8, 8.1, 8.1],  # less than a pixel
        ],
        dtype=torch.float64,
    )
    arguments = (0.25, 3, 2, samples, aligned)
    torch.testing.assert_close(
        vision.roi_align(x, regions, *arguments), sampled(x, regions, *arguments)
    )
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: vision.roi_align(x, regions, *arguments), x)


def test_no_regions():
    found = vision.roi_align(torch.randn(2, 3, 4, 4), torch.zeros(0, 5), 1.0, 7, 7, 2, False)
    assert found.shape == (0, 3, 7, 7)


def test_regions_under_autocast():
    """Places are computed in float32 at least, as torchvision does."""
    x = torch.randn(1, 2, 8, 8)
    regions = torch.tensor([[0, 1.3, 2.1, 6.7, 7.9]])
    expected = vision.roi_align(x, regions, 1.0, 3, 3, 2, False)
    with torch.autocast("cpu", torch.bfloat16):
        found = vision.roi_align(x, regions, 1.0, 3, 3, 2, False)
        half = vision.roi_align(x.bfloat16(), regions, 1.0, 3, 3, 2, False)
    assert torch.equal(found, expected)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=0.02)


def test_without_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SettingError) as error:
        vision.torchvision()
    assert str(error.value) == (
        "Mask R-CNN needs torchvision, which is not installed: pip install 'natgrad[vision]'."
    )


class Importing:
    """Stands in for importlib: a torchvision that is there, or whose import raises in turn."""

    def __init__(self, compiled, *errors):
        self.errors, self.modules = list(errors), {}
        for name in ("", ".extension", ".ops.boxes", ".ops.roi_align"):
            self.modules[f"torchvision{name}"] = ModuleType(f"torchvision{name}")
        self.modules["torchvision.extension"]._has_ops = lambda: compiled

    def __call__(self, name):
        if name == "torchvision" and self.errors:
            raise self.errors.pop(0)
        return self.modules[name]


def test_a_torchvision_with_its_own_operators_is_left_alone(monkeypatch):
    importing = Importing(True)
    monkeypatch.setattr(vision, "import_module", importing)
    assert vision.torchvision() is importing.modules["torchvision"]
    for name in ("boxes", "roi_align"):
        assert (
            not {"_assert_has_ops", "_roi_align"}
            & vars(importing.modules[f"torchvision.ops.{name}"]).keys()
        )
    assert not vision._KEPT or "torchvision" in sys.modules  # of a test with the real one


def test_a_torchvision_without_its_own_operators(monkeypatch):
    importing = Importing(False)
    monkeypatch.setattr(vision, "import_module", importing)
    vision.torchvision()
    importing.modules["torchvision.ops.boxes"]._assert_has_ops()  # raises nothing
    assert importing.modules["torchvision.ops.roi_align"]._roi_align is vision.roi_align


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("libnothing.so: cannot open\nmore of it"), "libnothing.so: cannot open"),
        (
            RuntimeError("operator torchvision::roi is strange"),
            "operator torchvision::roi is strange",
        ),
        (ModuleNotFoundError("No module named 'PIL'", name="PIL"), "No module named 'PIL'"),
    ],
    ids=["library", "operator", "module"],
)
def test_a_torchvision_that_cannot_be_imported(monkeypatch, error, said):
    monkeypatch.setattr(vision, "import_module", Importing(False, error))
    with pytest.raises(SettingError) as raised:
        vision.torchvision()
    assert str(raised.value) == (
        f"torchvision cannot be imported ({said}): install the version that was made for this "
        "torch."
    )
