"""Spectral steps with a floor, in float32 and by products of 16 bits, beside decompositions."""

import pytest
import torch

from natgrad import Spectral
from natgrad.errors import SettingError
from natgrad.geometry import spectral as module
from natgrad.inverses import Decomposed
from natgrad.linalg.block_diagonal import BlockDiagonal

SHAPES = [(100, 100), (96, 170), (170, 96)]
DAMPING = 1e-3


def positive(batch, dim, seed):
    """Eigenvalues from 1 to 1/100."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(batch, dim, dim, dtype=torch.float64, generator=generator))[0]
    return q * torch.logspace(0, -2, dim, dtype=torch.float64) @ q.mT


class Roots(Decomposed):
    """A block of which ``sides`` are known, or only how to whiten."""

    def __init__(self, left, right, apart=True):
        self.left, self.right, self.apart = left, right, apart

    def apply(self, function, m, out=None):
        raise AssertionError

    def multiply(self, m, damping):
        raise AssertionError

    def tensors(self):
        return iter(())

    def whiten(self, m, power, damping, out=None):
        left, right = (powered(one, -power / 2).to(m.dtype) for one in (self.left, self.right))
        found = left @ m @ right
        return found if out is None else out.copy_(found)

    def sides(self, power, damping, squared=None):
        if not self.apart:
            return None
        exponents = (-power if squared == place else -power / 2 for place in (1, 2))
        pairs = zip((self.left, self.right), exponents, strict=True)
        return tuple(powered(one, exponent).float() for one, exponent in pairs)


def powered(matrix, exponent):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.pow(exponent).unsqueeze(1) @ vectors.mT


def expected_step(block, m, power, floor):
    """By a singular value decomposition, in float64."""
    left, right = (powered(one, -power / 2) for one in (block.left, block.right))
    u, s, v = torch.linalg.svd(left @ m.double() @ right, full_matrices=False)
    rms = s.square().mean(1, keepdim=True).sqrt()
    return left @ (u * (s / (floor * rms)).clamp(max=1).unsqueeze(1) @ v) @ right


def gradient(shape, batch=2):
    """Singular values from 1 to 1/1,000, so that a floor of 2.5% has some below it."""
    rows, cols = shape
    generator = torch.Generator().manual_seed(3)
    u, _, v = torch.linalg.svd(
        torch.randn(batch, *shape, dtype=torch.float64, generator=generator), full_matrices=False
    )
    return (u * torch.logspace(0, -3, min(rows, cols), dtype=torch.float64) @ v).float()


def taken(geometry, block, m):
    out = torch.empty_like(m)
    geometry.step(block, m.clone(), {}, DAMPING, out)
    return out.double()


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("apart", [True, False], ids=["two sides", "one map"])
@pytest.mark.parametrize("power", [0, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("floor", [0.025, 0.3])
def test_steps_beside_singular_values(shape, power, floor, apart):
    block = Roots(positive(2, shape[0], 1), positive(2, shape[1], 2), apart)
    m = gradient(shape)
    expected = expected_step(block, m, power, floor)
    found = taken(Spectral(power, floor, half_products=False), block, m)
    # Eigenvalues of a Gram matrix end at the floor at once, polynomials round the corner.
    by_eigenvalues = apart and power > 0
    assert error(found, expected) <= (5e-3 if by_eigenvalues else 0.15)
    half = taken(Spectral(power, floor, half_products=True), block, m)
    assert error(half, expected) <= 0.17
    assert error(half, found) > 1e-4  # other numbers they are


def test_what_cancels_in_the_whitening_is_not_rounded():
    """A gradient of few directions, whose largest entries lie where curvature is large."""
    left, right = positive(2, 128, 1), positive(2, 200, 2)
    block, m = Roots(left, right), left @ gradient((128, 200)).double() @ right
    expected = expected_step(block, m, 1.0, 0.025)
    found = taken(Spectral(1.0, 0.025, half_products=True), block, m.float())
    assert float((found * expected).sum() / found.norm() / expected.norm()) >= 0.98


@pytest.mark.parametrize(
    ("shape", "dtype", "gains", "expected"),
    [
        ((96, 96), torch.float32, True, True),
        ((95, 400), torch.float32, True, False),
        ((400, 95), torch.float32, True, False),
        ((96, 96), torch.float32, False, False),
        ((96, 96), torch.float64, True, False),
    ],
)
def test_where_products_of_16_bits_are_taken(monkeypatch, shape, dtype, gains, expected):
    monkeypatch.setattr(module, "faster", lambda d, device: gains and d == torch.float32)
    halves = []
    inner = module.half_polar
    monkeypatch.setattr(module, "half_polar", lambda *a: halves.append(1) or inner(*a))
    m = gradient(shape).to(dtype)
    Spectral(0).step(None, m, {}, DAMPING, torch.empty_like(m))
    assert bool(halves) is expected
    halves.clear()
    Spectral(0, half_products=False).step(None, m, {}, DAMPING, torch.empty_like(m))
    assert not halves
    Spectral(0, half_products=True).step(None, m, {}, DAMPING, torch.empty_like(m))
    assert bool(halves) is (dtype == torch.float32)


def test_what_cannot_be_set():
    for floor in (0, -1.0, 1.5, float("nan")):
        with pytest.raises(SettingError, match=r"Spectral.floor is .* in \(0, 1\]"):
            Spectral(floor=floor)
    with pytest.raises(SettingError, match=r"Spectral.half_products is 'bf16' but must be True"):
        Spectral(half_products="bf16")


def test_blocks_along_a_diagonal_in_16_bits():
    dense = positive(2, 12, 1)
    blocks = BlockDiagonal.of(dense, ((3, 4),))
    short = blocks.to(torch.bfloat16)
    assert torch.equal(short.dense(), blocks.dense().bfloat16())
