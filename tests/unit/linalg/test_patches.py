"""Windows are those of `unfold`, in the order (kernel position, channel)."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from natgrad.linalg import patches
from natgrad.linalg.patches import channels_last, patch_pieces, patch_rows, windows
from natgrad.linalg.workspace import release


def unfolded(x, kernel, stride, dilation, padding):
    """`[n, s, kernel * c]` of images, by torch."""
    n, c = x.shape[:2]
    rows = F.unfold(x, kernel, dilation, padding, stride)  # [n, c * kernel, s]
    return rows.view(n, c, -1, rows.shape[-1]).permute(0, 3, 2, 1).flatten(2)


def view_of(x, kernel, stride, dilation, padding):
    return windows(channels_last(x, [(p, p) for p in padding]), kernel, stride, dilation)


def pieces_of(x, kernel, stride, dilation, padding, groups=1):
    """Copies, as every piece is written over the last one."""
    pads = [(p, p) for p in padding]
    return [rows.clone() for rows in patch_pieces(x, pads, kernel, stride, dilation, groups)]


GEOMETRIES = [
    (kernel, stride, dilation, padding)
    for kernel, stride, dilation, padding in product(
        [(1, 1), (2, 3), (3, 3)], [(1, 1), (2, 3)], [(1, 1), (1, 2)], [(0, 0), (1, 2)]
    )
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_rows_are_unfolded_images(geometry):
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    view = view_of(x, *geometry)
    expected = unfolded(x, *geometry)
    assert torch.equal(patch_rows(view, 2, 1)[0], expected)
    pieces = [rows[0] for rows in pieces_of(x, *geometry)]
    assert torch.equal(torch.cat(pieces), expected.flatten(0, 1))


@pytest.mark.parametrize("geometry", GEOMETRIES[:6], ids=str)
@pytest.mark.parametrize("groups", [2, 4])
def test_groups_are_channels_apart(geometry, groups):
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    view = view_of(x, *geometry)
    rows, pieces = patch_rows(view, 2, groups), pieces_of(x, *geometry, groups)
    for k, part in enumerate(x.chunk(groups, 1)):
        expected = unfolded(part, *geometry)
        assert torch.equal(rows[k], expected)
        assert torch.equal(torch.cat([p[k] for p in pieces]), expected.flatten(0, 1))


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_any_number_of_images_a_piece(monkeypatch, limit):
    monkeypatch.setattr(patches, "_PIECE", limit)
    release()
    x = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    geometry = ((2, 2), (1, 1), (1, 1), (1, 0))
    pieces = [rows[0] for rows in pieces_of(x, *geometry)]
    assert torch.equal(torch.cat(pieces), unfolded(x, *geometry).flatten(0, 1))
    one = unfolded(x, *geometry)[0].numel()
    assert max(rows.numel() for rows in pieces) <= max(limit, one)  # as many as fit into it
    assert len(pieces) == -(-len(x) // max(1, limit // one))


def test_one_dimension():
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    view = windows(channels_last(x, [(1, 0)]), (3,), (2,), (2,))
    padded = F.pad(x, (1, 0))
    expected = [padded[:, :, i : i + 5 : 2].mT.flatten(1) for i in (0, 2)]
    assert torch.equal(patch_rows(view, 1, 1)[0], torch.stack(expected, 1))


def test_three_dimensions():
    x = torch.randn(1, 2, 3, 2, 3, dtype=torch.float64)
    view = windows(channels_last(x, [(0, 0)] * 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    assert view.shape == (1, 2, 1, 2, 2, 2, 2, 2)
    rows = patch_rows(view, 3, 1)[0, 0]
    for row, (i, j) in zip(rows, product(range(2), range(2)), strict=True):
        assert torch.equal(row, x[0, :, i : i + 2, :, j : j + 2].movedim(0, -1).flatten())


@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (0, 3, 5, 5)], ids=["small", "no images"])
def test_no_window_fits(shape):
    x, geometry = torch.randn(shape), ((3, 3), (1, 1), (1, 1), (0, 0))
    view = view_of(x, *geometry)
    assert view.numel() == 0
    assert pieces_of(x, *geometry) == []
    assert patch_rows(view, 2, 1).numel() == 0


def test_padding_is_zeros_and_may_differ_by_side():
    x = torch.ones(1, 1, 2, 2)
    last = channels_last(x, [(1, 0), (0, 2)])
    assert last.is_contiguous()
    assert torch.equal(last[0, :, :, 0], torch.tensor([[0.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]))
    assert torch.equal(channels_last(x, [(0, 0), (0, 0)])[..., 0], x[:, 0])
