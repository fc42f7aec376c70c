"""What is measured along an eigenbasis does not depend on how rounding spans a null space."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import EKFAC, KFAC, Kronecker
from natgrad.geometry import Elementwise

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
