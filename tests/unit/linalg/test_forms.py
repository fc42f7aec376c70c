"""Packed symmetric matrices: what is kept is the sum, and dense gives it back."""

import pytest
import torch

from natgrad.linalg.correlation import ConvGeometry, Correlations
from natgrad.linalg.forms import DiagonalForm, Triangle, slabs

# Around the sizes at which the number of slabs changes.
DIMS = [1, 2, 5, 95, 96, 97, 191, 192, 193, 511, 513]


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("dim", [0, *DIMS, 2499, 2500, 4097])
def test_slabs_cover_the_upper_triangle_once(dim):
    rows, offset = 0, 0
    for first, end, start in slabs(dim):
        assert first == rows < end <= dim
        assert start == offset
        rows, offset = end, offset + (end - first) * (dim - first)
    assert rows == dim
    form = Triangle(dim)
    assert form.numel == offset
    if dim >= 192:
        assert form.numel < 0.72 * dim**2


@pytest.mark.parametrize("dim", DIMS)
def test_rows(dim):
    form, rows = Triangle(dim), randn(1, 7, dim)
    kept = torch.zeros(form.numel, dtype=torch.float64)
    form.add_rows(kept, rows[:, :3])
    form.add_rows(kept, rows[:, 3:])
    expected = rows.mT @ rows
    torch.testing.assert_close(form.dense(kept), expected, rtol=1e-12, atol=1e-12)
    trace = expected.diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(form.trace(kept), trace, rtol=1e-12, atol=0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dim", DIMS)
def test_a_constant_one_is_the_last_feature(dim, batch):
    form, rows = Triangle(dim, batch), randn(batch, 5, dim - 1)
    kept = torch.zeros(form.numel, dtype=torch.float64)
    form.add_rows(kept, rows)
    full = torch.cat([rows, torch.ones(batch, 5, 1, dtype=torch.float64)], 2)
    torch.testing.assert_close(form.dense(kept), full.mT @ full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 3, 100, 200])
def test_batches(dim):
    form, rows = Triangle(dim, batch=3), randn(3, 4, dim)
    kept = torch.ones(form.numel, dtype=torch.float64)
    form.add_rows(kept, rows)
    torch.testing.assert_close(form.dense(kept), rows.mT @ rows + 1, rtol=1e-12, atol=1e-12)
    assert form.trace(kept).shape == (3,)


@pytest.mark.parametrize("images", [1, 2, 16, 17])
@pytest.mark.parametrize("dim", [1, 3, 100, 128, 129, 200])
def test_columns_are_rows_transposed(dim, images):
    form, columns = Triangle(dim), randn(images, dim, 4)
    kept = torch.ones(form.numel, dtype=torch.float64)
    form.add_columns(kept, columns)
    expected = torch.einsum("mik,mjk->ij", columns, columns)[None] + 1
    torch.testing.assert_close(form.dense(kept), expected, rtol=1e-12, atol=1e-12)


def test_views_and_no_rows_at_all():
    form = Triangle(3)
    kept = torch.zeros(form.numel, dtype=torch.float64)
    rows = randn(1, 3, 8).mT  # not contiguous
    form.add_rows(kept, rows)
    form.add_rows(kept, rows[:, :0])
    form.add_rows(kept, rows[:, :0, :2])
    form.add_columns(kept, randn(0, 3, 4))
    torch.testing.assert_close(form.dense(kept), rows.mT @ rows)


@pytest.mark.parametrize("dim", DIMS)
def test_dense_is_symmetric_and_upper_holds_its_upper_triangle(dim):
    form = Triangle(dim, 2)
    kept = torch.zeros(form.numel, dtype=torch.float64)
    form.add_rows(kept, randn(2, 3, dim))
    dense = form.dense(kept)
    assert torch.equal(dense, dense.mT)
    assert torch.equal(form.upper(kept).triu(), dense.triu())


@pytest.mark.parametrize("batch", [1, 2])
def test_diagonal(batch):
    form = DiagonalForm(3, batch)
    kept = randn(3 * batch)
    assert form.numel == 3 * batch
    assert form.diagonal
    assert not Triangle(3).diagonal
    assert torch.equal(form.values(kept), kept.view(batch, 3))
    assert torch.equal(form.dense(kept), torch.diag_embed(kept.view(batch, 3)))
    assert torch.equal(form.trace(kept), kept.view(batch, 3).sum(1))


def test_specs():
    assert Triangle(100, 2).spec.numel == Triangle(100, 2).numel
    assert Triangle(100, 2).spec.dim == 100
    assert DiagonalForm(5).spec.diagonal
    assert DiagonalForm(5).spec.batch == 1


class TestPacking:
    """What travels: no number twice."""

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("dim", [*DIMS, 512])
    def test_a_triangle_has_every_pair_once(self, dim, batch):
        form = Triangle(dim, batch)
        assert form.sent == batch * dim * (dim + 1) // 2 <= form.numel
        kept = torch.zeros(form.numel, dtype=torch.float64)
        form.add_rows(kept, randn(batch, 3, dim))
        packed = form.pack(kept)
        assert packed.shape == (form.sent,)
        assert packed.is_contiguous()
        rows, columns = torch.triu_indices(dim, dim)
        pairs = form.dense(kept)[:, rows, columns]  # the same numbers, in another order
        assert torch.equal(packed.view(batch, -1).sort(1)[0], pairs.sort(1)[0])

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("dim", [*DIMS, 512])
    def test_and_unpacked_it_is_the_same_matrix(self, dim, batch):
        form = Triangle(dim, batch)
        kept = torch.zeros(form.numel, dtype=torch.float64)
        form.add_rows(kept, randn(batch, 3, dim))
        back = form.unpack(form.pack(kept))
        assert back.shape == kept.shape
        assert torch.equal(form.dense(back), form.dense(kept))
        assert torch.equal(form.trace(back), form.trace(kept))

    def test_slabs_are_whole_again(self):
        """What is below the diagonal of a slab is never read, but a running average holds it."""
        form = Triangle(200, 2)
        kept = torch.zeros(form.numel, dtype=torch.float64)
        form.add_rows(kept, randn(2, 3, 200))
        assert torch.allclose(form.unpack(form.pack(kept)), kept, rtol=1e-14, atol=1e-14)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_of_any_precision(self, dtype):
        form = Triangle(97)
        packed = torch.randn(form.sent).to(dtype)
        back = form.unpack(packed)
        assert back.dtype == dtype
        assert torch.equal(form.pack(back), packed)

    @pytest.mark.parametrize("bias", [False, True])
    def test_correlations_are_sent_as_they_are_kept(self, bias):
        form = Correlations(5, ConvGeometry((3, 3), ((1, 1), (1, 1))), bias)
        assert form.sent == form.numel == 29 * 5**2 + bias * (9 * 5 + 1)
        kept = randn(form.numel)
        assert torch.equal(form.unpack(form.pack(kept)), kept)

    @pytest.mark.parametrize("batch", [1, 3])
    def test_diagonals_are_sent_as_they_are_kept(self, batch):
        form = DiagonalForm(7, batch)
        assert form.sent == form.numel == 7 * batch
        kept = randn(7 * batch)
        assert torch.equal(form.unpack(form.pack(kept)), kept)
