"""What is measured along an eigenbasis does not depend on how rounding spans a null space."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import EKFAC, KFAC, Eigen, Kronecker
from natgrad.geometry import Elementwise
from natgrad.inverses import DecomposedFactor

EACH = {
    "EKFAC's second moments": {"structure": EKFAC()},
    "Adam's second moments": {"structure": Kronecker(), "geometry": Elementwise()},
}


def trained(order: torch.Tensor, **settings) -> list[torch.Tensor]:
    """Weights after some steps on four samples, fewer than any layer has inputs, in some order."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, update_every=1, refresh_every=2, **settings)
    for step in range(5):
        generator = torch.Generator().manual_seed(step % 2)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)[order]
        y = torch.randint(3, (4,), generator=generator)[order]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("what", EACH)
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
def test_the_order_of_samples_does_not_matter(order, what):
    """Sums in another order differ by rounding, and with them all vectors of a null space."""
    both = (trained(each, **EACH[what]) for each in (torch.tensor(order), torch.arange(4)))
    pairs = zip(*both, strict=True)
    assert max(float((a - b).norm() / b.norm()) for a, b in pairs) < 1e-10


def decomposed(dim: int, diagonal: bool = False) -> DecomposedFactor:
    """A factor ``[1, d, d]`` in its eigenbasis, or a diagonal one."""
    damping = torch.zeros(1, dtype=torch.float64)
    if diagonal:
        values = torch.rand(1, dim, dtype=torch.float64)
        return DecomposedFactor(Eigen(), Eigen().decompose_diagonal(values, damping), dim, True)
    rows = torch.randn(1, 9, dim, dtype=torch.float64)
    return DecomposedFactor(Eigen(), Eigen().decompose(rows.mT @ rows, damping), dim)


def vectors(factor: DecomposedFactor) -> torch.Tensor:
    """As columns."""
    basis = Eigen().basis_of(factor)
    if basis.is_identity:
        return torch.eye(factor.dim, dtype=torch.float64)
    return basis.rows[0].mT


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("cols", [1, 4])
@pytest.mark.parametrize("diagonal", [False, True])
def test_second_moments_are_those_of_whole_gradients_of_samples(positions, cols, diagonal):
    """Summed over positions first, sample by sample: one position or one column, too."""
    samples, rows = 5, 2
    a = torch.randn(1, samples, positions, cols, dtype=torch.float64)
    g = torch.randn(1, samples, positions, rows, dtype=torch.float64)
    factors = {"A": decomposed(cols, diagonal), "G": decomposed(rows)}
    start = torch.rand(rows * cols, dtype=torch.float64)
    sums = {"S": SimpleNamespace(kept=start.clone(), count=7)}
    EKFAC().absorb("", (a, g), sums, factors)
    expected = start.view(rows, cols).clone()
    for n in range(samples):
        gradient = sum(torch.outer(g[0, n, s], a[0, n, s]) for s in range(positions))
        expected += (vectors(factors["G"]).mT @ gradient @ vectors(factors["A"])).square()
    assert sums["S"].count == 8
    torch.testing.assert_close(sums["S"].kept.view(rows, cols), expected)


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_block_of_second_moments_is_turned_back(diagonal):
    factors = {"G": decomposed(2), "A": decomposed(4, diagonal)}
    moments = torch.rand(1, 8, dtype=torch.float64)
    found = EKFAC().matrix({"S": moments}, {}, (1, 2, 4), factors)
    basis = torch.kron(vectors(factors["G"]).contiguous(), vectors(factors["A"]).contiguous())
    torch.testing.assert_close(found.dense(), basis @ torch.diag(moments[0]) @ basis.mT)
