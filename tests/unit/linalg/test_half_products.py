"""Second moments of 16-bit numbers by 16-bit products: float32 sums, against float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from natgrad.linalg import fourier_correlation, half_products
from natgrad.linalg.correlation import ConvGeometry, Correlations
from natgrad.linalg.forms import Triangle
from natgrad.linalg.half_products import _ROWS, accumulate, faster, taken

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
ROUNDOFF = 2.0**-8  # of bfloat16


def numbers(*shape, mean=0.5):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator) + mean).bfloat16()


def assert_rounded_in_pieces(found, rows):
    """Each piece of the rows is rounded once, ``u |C_ij|`` at most, and ``sum |C_ij|`` is at most
    ``sqrt(F_ii F_jj)`` by Cauchy and Schwarz; float32 adds a little."""
    exact = rows.double().mT @ rows.double()
    size = exact.diagonal(dim1=1, dim2=2).sqrt()
    assert found.dtype == torch.float32
    error = (found.double() - exact).abs() / (size.unsqueeze(2) * size.unsqueeze(1))
    assert error.max() <= 1.01 * ROUNDOFF
    return error


@pytest.mark.parametrize("count", [1, _ROWS - 1, _ROWS, 5 * _ROWS + 3])
@pytest.mark.parametrize(("dim", "batch"), [(3, 1), (97, 1), (200, 2)])
def test_rows(count, dim, batch):
    form, rows = Triangle(dim, batch), numbers(batch, count, dim)
    kept = torch.zeros(form.numel)
    form.add_rows(kept, rows)
    assert_rounded_in_pieces(form.dense(kept), rows)


def test_pieces_are_far_better_than_one_result_of_16_bits():
    """Of 64 pieces, and the more so the more there are."""
    form, rows = Triangle(20), numbers(1, 64 * _ROWS, 20)
    kept = torch.zeros(form.numel)
    form.add_rows(kept, rows)
    error = assert_rounded_in_pieces(form.dense(kept), rows)
    at_once = assert_rounded_in_pieces((rows.mT @ rows).float(), rows)
    assert error.square().mean().sqrt() < at_once.square().mean().sqrt() / 3


def test_a_constant_one_is_counted_in_float32():
    """In bfloat16, 256 + 1 = 256."""
    form, rows = Triangle(3), torch.ones(1, 1000, 2, dtype=BF16)
    kept = torch.zeros(form.numel)
    form.add_rows(kept, rows)
    assert torch.equal(form.dense(kept)[0, -1], torch.full((3,), 1000.0))


@pytest.mark.parametrize("shape", [(20, 6, 30), (2, 200, 9), (0, 3, 4)])
def test_columns(shape):
    form, columns = Triangle(shape[1]), numbers(*shape)
    kept = torch.zeros(form.numel)
    form.add_columns(kept, columns)
    rows = columns.mT.reshape(1, shape[0] * shape[2], shape[1])
    if len(columns):
        assert_rounded_in_pieces(form.dense(kept), rows)
    else:
        assert not kept.any()


@pytest.mark.parametrize("channels", [2, 20, 130])
def test_convolutions(monkeypatch, channels):
    """A block of the factor is made of up to four correlations. By frequency it is float32."""
    monkeypatch.setattr(fourier_correlation, "pays", lambda *shape: False)
    geometry = ConvGeometry(kernel=(3, 3), padding=((1, 1), (1, 1)), dilation=(1, 1))
    form, x = Correlations(channels, geometry, bias=True), numbers(5, channels, 7, 6)
    kept, exact = torch.zeros(form.numel), torch.zeros(form.numel, dtype=torch.float64)
    assert form.add(kept, x) == form.add(exact, x.double())
    found, expected = form.dense(kept).double(), form.dense(exact)
    moved = (found - expected).abs().max()
    assert 1e-6 * expected.abs().max() < moved <= 4 * ROUNDOFF * expected.abs().max()
    torch.testing.assert_close(found[0, -1], expected[0, -1], rtol=1e-5, atol=1e-5)  # sums


def test_operands_of_the_dtype_of_the_sum_are_added_as_they_are():
    left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    for count in (1, 2):
        out = torch.ones(count, 3, 5)
        accumulate(out, left[:count], right[:count], alpha=2.0)
        expected = 1 + 2 * left[:count] @ right[:count]
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "wanted", "expected"),
    [
        (GPU, FP16, (7, 0), None, True),
        (GPU, FP16, (6, 1), None, False),
        (GPU, BF16, (8, 0), None, True),
        (GPU, BF16, (7, 5), None, False),
        (GPU, BF16, (7, 5), True, False),  # where it would be no gain
        (GPU, BF16, (9, 0), False, False),
        (GPU, torch.float32, (9, 0), True, False),
        (CPU, BF16, None, None, False),
        (CPU, BF16, None, True, True),
        (CPU, FP16, None, True, False),  # sums end at 65504
        (torch.device("mps"), BF16, None, True, False),
    ],
)
def test_where_they_are_taken(monkeypatch, device, dtype, capability, wanted, expected):
    half_products._has_tensor_cores.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert taken(dtype, device, wanted) is expected
    form, kept = Triangle(2), torch.zeros(4, device="meta")
    form.half_products = wanted
    assert form.operand_dtype(torch.zeros(1, dtype=torch.float32), kept) == torch.float32
    assert form.operand_dtype("no tensor", kept) == torch.float32
    half_products._has_tensor_cores.cache_clear()


def test_not_on_rocm(monkeypatch):
    half_products._has_tensor_cores.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not taken(FP16, GPU, None)
    half_products._has_tensor_cores.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "device", "known", "expected"),
    [
        (torch.float32, CPU, {"avx512_bf16": True}, True),
        (torch.float32, CPU, {"amx_bf16": True, "avx512_bf16": False}, True),
        (torch.float32, CPU, {"avx512_f": True}, False),
        (torch.float64, CPU, {"avx512_bf16": True}, False),
        (torch.float32, GPU, (8, 0), True),
        (torch.float32, GPU, (7, 5), False),
        (torch.float64, GPU, (9, 0), False),
        (torch.float32, torch.device("mps"), {"avx512_bf16": True}, False),
    ],
)
def test_where_float32_gains_by_products_of_bfloat16(monkeypatch, dtype, device, known, expected):
    half_products._has_tensor_cores.cache_clear()
    half_products._cpu_multiplies_bfloat16.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: known)
    assert faster(dtype, device) is expected
    monkeypatch.setattr(torch.version, "hip", "6.4")  # whose older GPUs have matrix cores for it
    assert faster(torch.float32, GPU)
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # torch 2.8
    half_products._cpu_multiplies_bfloat16.cache_clear()
    assert not faster(torch.float32, CPU)
    half_products._has_tensor_cores.cache_clear()
    half_products._cpu_multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("batch", [1, 2])
def test_cuda_gives_float32(monkeypatch, dtype, batch):
    """Without a GPU: shapes, dtypes and arguments of the call, but no number."""
    calls, bmm = [], torch.bmm

    def noted(left, right, **more):
        calls.append((left.dtype, right.dtype, more))
        return bmm(left, right, **more)

    monkeypatch.setattr(torch, "bmm", noted)
    with FakeTensorMode():
        rows = torch.empty(batch, 1000, 3, dtype=dtype, device="cuda")
        out = torch.empty(batch, 3, 3, device="cuda")
        accumulate(out, rows.mT, rows)
    assert (out.dtype, out.shape) == (torch.float32, (batch, 3, 3))
    assert calls == [(dtype, dtype, {"out_dtype": torch.float32})]
