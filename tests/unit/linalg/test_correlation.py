"""The correlation blocks give the same factor as patches that are unfolded and multiplied."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.errors import SettingError
from natgrad.linalg import correlation, fourier_correlation, workspace
from natgrad.linalg import fourier_correlation as fourier
from natgrad.linalg.correlation import ConvGeometry, Correlations
from natgrad.linalg.correlation_lags import block_count

SAME = ConvGeometry((3, 3), ((1, 1), (1, 1)))


def unfolded(x, geometry, bias):
    """The factor by im2col, features ordered kernel row, kernel column, channel; and the count."""
    (top, bottom), (left, right) = geometry.padding
    padded = F.pad(x, (left, right, top, bottom))
    patches = F.unfold(padded, geometry.kernel, dilation=geometry.dilation)
    n, _, positions = patches.shape
    rows = patches.view(n, x.shape[1], -1, positions).permute(0, 3, 2, 1).flatten(0, 1).flatten(1)
    if bias:
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    return rows.T @ rows, len(rows)


def computed(x, geometry, bias=False, alpha=1.0):
    form = Correlations(x.shape[1], geometry, bias)
    kept = x.new_zeros(form.numel)
    count = form.add(kept, x, alpha)
    return form.dense(kept), count


def assert_same(x, geometry, bias=False, tolerance=1e-10):
    expected, count = unfolded(x, geometry, bias)
    found, found_count = computed(x, geometry, bias)
    assert found.shape == (1, *expected.shape)
    assert found_count == count
    # A window that sees only padding leaves exact zeros, ours the rounding of the image's energy.
    scale = max(expected.abs().max(), x.square().sum())
    assert (found[0] - expected).abs().max() <= tolerance * scale


def paddings(kernel, dilation):
    """By name: none, same, more than the kernel reaches, and different on every side."""
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return {
        "valid": ((0, 0), (0, 0)),
        "same": tuple((r // 2, r - r // 2) for r in reach),
        "large": tuple((r + 1, r + 2) for r in reach),
        "uneven": ((1, 0), (0, 2)),
    }


@pytest.mark.parametrize("padding", ["valid", "same", "large", "uneven"])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("kernel", [(1, 1), (1, 3), (3, 1), (3, 3), (5, 5), (2, 2), (3, 5)])
def test_factor_is_that_of_unfolded_patches(kernel, dilation, padding):
    geometry = ConvGeometry(kernel, paddings(kernel, dilation)[padding], dilation)
    for n, c, height, width in [(1, 1, 13, 13), (7, 3, 13, 15), (2, 16, 14, 9)]:
        x = torch.randn(n, c, height, width, dtype=torch.float64)
        if 0 not in geometry.output_size(height, width):
            assert_same(x, geometry, bias=c != 16)


@pytest.fixture(params=["lags", "frequencies"])
def way(request, monkeypatch):
    """One of the ways to the same blocks, for shapes on which it does not pay, too."""
    monkeypatch.setattr(fourier_correlation, "pays", lambda *_: request.param == "frequencies")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("padding", ["valid", "same", "large", "uneven"])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("kernel", [(1, 1), (1, 3), (3, 1), (3, 3), (2, 2), (3, 5)])
def test_both_ways_lead_there(kernel, dilation, padding):
    geometry = ConvGeometry(kernel, paddings(kernel, dilation)[padding], dilation)
    for n, c, height, width in [(1, 1, 13, 13), (7, 3, 9, 15), (2, 16, 14, 9)]:
        if 0 not in geometry.output_size(height, width):
            assert_same(torch.randn(n, c, height, width, dtype=torch.float64), geometry, bias=True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("c", [3, 16])
def test_both_ways_in_several_chunks(monkeypatch, c):
    for module, name in ((correlation, "_CANVAS"), (fourier_correlation, "_CHUNK")):
        monkeypatch.setattr(module, name, 6 * 8 * 9 * c)
    monkeypatch.setattr(fourier_correlation, "_SUMS", 1)
    assert_same(torch.randn(23, c, 8, 9, dtype=torch.float64), SAME, bias=True)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 7, 8, 9, 16, 40, 128, 130])
@pytest.mark.parametrize("n", [1, 2, 5, 7, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_any_number_of_channels_and_images(n, c, bias):
    assert_same(torch.randn(n, c, 5, 6, dtype=torch.float64), SAME, bias)


KERNELS = [(3, 3), (5, 5), (2, 4)]
SMALL = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 7), (7, 1), (3, 2)]


def kernels_of(size, c):
    """All; of many channels, whose factor has up to ten million numbers, each in its turn."""
    return KERNELS if c < 100 else [KERNELS[SMALL.index(size) % 3]]


def test_every_kernel_meets_every_number_of_channels():
    assert {kernel for size in SMALL for kernel in kernels_of(size, 130)} == set(KERNELS)
    assert all(kernels_of(size, c) == KERNELS for size in SMALL for c in (3, 16, 40))


@pytest.mark.parametrize("c", [3, 16, 40, 130])
@pytest.mark.parametrize("size", SMALL)
def test_images_smaller_than_the_kernel(size, c):
    for kernel in kernels_of(size, c):
        for dilation in ((1, 1), (2, 3)):
            padding = paddings(kernel, dilation)["same"]
            x = torch.randn(3, c, *size, dtype=torch.float64)
            assert_same(x, ConvGeometry(kernel, padding, dilation), bias=True)


@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((2, 1), (0, 3)), ((4, 4), (4, 4))])
def test_one_output_pixel(padding):
    kernel, dilation = (3, 5), (2, 1)
    height = max(1, 1 + 4 - sum(padding[0]))
    width = max(1, 1 + 4 - sum(padding[1]))
    geometry = ConvGeometry(kernel, padding, dilation)
    assert_same(torch.randn(5, 3, height, width, dtype=torch.float64), geometry, bias=True)


@pytest.mark.parametrize("c", [3, 16, 64, 128])
def test_several_canvases_and_a_remainder(monkeypatch, c):
    monkeypatch.setattr(correlation, "_CANVAS", 6 * 8 * 8 * c)
    assert_same(torch.randn(23, c, 8, 8, dtype=torch.float64), SAME)


def test_a_spare_image_adds_nothing(monkeypatch):
    """One more keeps channels apart where their distance would be a power of two."""
    workspace.release()
    own = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: own(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(fourier_correlation, "pays", lambda *_: True)
    used = []

    def noted(key, shape, *args, **kwargs):
        used.append((key, shape))
        return workspace.workspace(key, shape, *args, **kwargs)

    monkeypatch.setattr(fourier_correlation, "workspace", noted)
    assert_same(torch.randn(32, 16, 8, 9, dtype=torch.float64), SAME, bias=True)
    assert (("rows", 32), (16, 8, 33, 9)) in used
    assert_same(torch.randn(31, 16, 8, 9, dtype=torch.float64), SAME, bias=True)
    assert (("rows", 31), (16, 8, 31, 9)) in used
    workspace.release()


def test_the_spare_image_is_never_one_of_an_earlier_batch(monkeypatch):
    """A batch with one image more has a board of the same shape."""
    monkeypatch.setattr(fourier_correlation, "pays", lambda *_: True)
    for n in (33, 32, 33, 32):
        assert_same(torch.randn(n, 16, 8, 9, dtype=torch.float64), SAME, bias=True)


def test_rounds_cover_every_image_once():
    for n in range(40):
        for lanes in (1, 4, 8):
            for most in (1, 3, 100):
                seen = []
                for first, used, images in correlation.rounds(n, lanes, most):
                    assert used <= lanes
                    assert images <= most
                    seen += range(first, first + used * images)
                assert seen == list(range(n))


@pytest.mark.parametrize("c", [3, 16, 40, 130])
@pytest.mark.parametrize("width", [4, 30])
@pytest.mark.parametrize("layout", ["records", "gaps", "lanes"])
def test_every_layout_serves_any_shape(monkeypatch, c, width, layout):
    monkeypatch.setattr(correlation, "_WIDE", 10**9 if layout == "lanes" else 1)
    monkeypatch.setattr(correlation, "_RECORDS", 0 if layout == "records" else 10**9)
    x = torch.randn(6, c, 5, width, dtype=torch.float64)
    for kernel in ((3, 3), (2, 5)):
        for dilation in ((1, 1), (1, 2)):
            assert_same(x, ConvGeometry(kernel, ((1, 1), (4, 3)), dilation))


@pytest.mark.parametrize("c", [3, 16, 64, 256])
def test_float32(c):
    x = torch.randn(16, c, 14, 14).relu()
    expected, _ = unfolded(x.double(), SAME, bias=True)
    found, _ = computed(x, SAME, bias=True)
    assert found.dtype == torch.float32
    assert (found[0] - expected).norm() <= 1e-5 * expected.norm()
    assert (found[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("c", [3, 40, 130])
def test_memory_format_does_not_matter(c):
    x = torch.randn(4, c, 6, 10, dtype=torch.float64)
    expected, _ = computed(x, SAME)
    for same in (
        x.contiguous(memory_format=torch.channels_last),
        x.mT.contiguous().mT,
        torch.cat([x, x], 1)[:, :c],
        x[:1].expand(4, -1, -1, -1).lerp(x, 1.0),
    ):
        found, _ = computed(same, SAME)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("c", [3, 16, 130])
def test_adds_to_what_is_kept(c):
    first, second = torch.randn(5, c, 6, 7, dtype=torch.float64).split([2, 3])
    form = Correlations(c, SAME, bias=True)
    kept = torch.randn(form.numel, dtype=torch.float64)
    before = kept.clone()
    count = form.add(kept, first, 0.25) + form.add(kept, second, 0.25)
    once = torch.zeros_like(kept)
    assert form.add(once, torch.cat([first, second])) == count == 5 * 42
    torch.testing.assert_close(kept, before + 0.25 * once, rtol=1e-10, atol=1e-10)


def test_image_sizes_may_change_between_calls():
    """What an earlier layout left in a reused workspace must not show."""
    for size in [(6, 7), (7, 6), (6, 6), (3, 14), (6, 7)]:
        for c in (3, 64):
            assert_same(torch.randn(4, c, *size, dtype=torch.float64), SAME)
            assert_same(torch.randn(4, c, *size, dtype=torch.float64), ConvGeometry((1, 2)))


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (2, 3, 2, 8), (2, 3, 8, 1)])
def test_no_output_adds_nothing(shape):
    form = Correlations(3, ConvGeometry((3, 3)), bias=True)
    kept = torch.ones(form.numel)
    assert form.add(kept, torch.randn(shape)) == 0
    assert (kept == 1).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("c", [1, 3, 130])
def test_dense_is_symmetric_and_trace_is_its_trace(c, bias):
    for geometry in (SAME, ConvGeometry((3, 2)), ConvGeometry((5, 5), ((2, 2), (2, 2)), (1, 2))):
        form = Correlations(c, geometry, bias)
        kept = torch.zeros(form.numel, dtype=torch.float64)
        form.add(kept, torch.randn(3, c, 9, 9, dtype=torch.float64))
        dense = form.dense(kept)
        assert torch.equal(dense, dense.mT)
        torch.testing.assert_close(form.trace(kept), dense[0].trace()[None], rtol=1e-10, atol=0)


def test_sizes():
    form = Correlations(16, SAME, bias=True)
    assert (form.dim, form.batch) == (145, 1)
    assert form.numel == 29 * 256 + 145
    assert block_count(SAME) == 13 + 12 + 4
    assert Correlations(16, SAME, bias=False).numel == 29 * 256
    assert form.spec.numel == form.numel


@pytest.mark.parametrize(
    ("kernel", "padding", "pays"),
    [
        ((3, 3), 1, True),
        ((5, 5), 2, True),
        ((7, 7), 3, True),
        ((3, 3), 2, True),
        ((3, 3), 0, False),
        ((1, 1), 0, False),
        ((1, 1), 1, False),
    ],
)
def test_pays_with_fewer_blocks_than_the_triangle(kernel, padding, pays):
    geometry = ConvGeometry(kernel, ((padding, padding), (padding, padding)))
    assert Correlations.pays(geometry) is pays


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 3),), r"at least 1, but they are \(0, 3\)"),
        (((3, 3), ((0, 0), (0, 0)), (1, 0)), r"and \(1, 0\)"),
        (((3, 3), ((0, -1), (0, 0))), r"at least 0, but is \(\(0, -1\), \(0, 0\)\)"),
    ],
)
def test_impossible_geometry(arguments, message):
    with pytest.raises(SettingError, match=message):
        ConvGeometry(*arguments)


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize(
    "geometry",
    [
        SAME,
        ConvGeometry((3, 3)),
        ConvGeometry((5, 3), ((2, 2), (1, 1))),
        ConvGeometry((3, 4), ((3, 1), (0, 2)), (2, 3)),
        ConvGeometry((1, 3), ((0, 0), (1, 1))),
        ConvGeometry((2, 1)),
    ],
)
def test_frequencies_and_lags_are_two_ways_to_the_same_factor(monkeypatch, geometry, pays):
    monkeypatch.setattr(fourier, "pays", lambda *shape: pays)
    monkeypatch.setattr(fourier, "_CHUNK", 2000)  # several chunks, the last smaller
    for n, c, height, width in [(5, 9, 8, 11), (1, 1, 5, 8), (3, 2, 9, 5)]:
        x = torch.randn(n, c, height, width, dtype=torch.float64)
        if 0 not in geometry.output_size(height, width):
            assert_same(x, geometry, bias=True)


def test_a_residual_network_s_convolutions_go_by_frequency():
    sizes = [(128, 16, 32, 32), (128, 32, 16, 16), (128, 64, 8, 8), (8, 256, 14, 14)]
    assert all(fourier.pays(*size, SAME) for size in sizes)
    assert not fourier.pays(8, 512, 7, 7, SAME)  # too few rows for so many channels
    assert not fourier.pays(128, 3, 32, 32, SAME)
