"""Second moments of whole gradients, of layers that are called more than once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import KFAC, Diagonal, Full, MeanLoss, UnitWise

DAMPING = 0.1


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


def kept(dense, structure):
    """What a structure keeps of a dense block over the rows of a weight ``[3, 3]``."""
    if isinstance(structure, Full):
        return dense
    if isinstance(structure, Diagonal):
        return torch.diag(dense.diagonal())
    return torch.block_diag(*(dense[i : i + 3, i : i + 3] for i in range(0, 9, 3)))


@pytest.mark.parametrize("structure", [Full(), UnitWise(), Diagonal()], ids=repr)
def test_gradients_of_both_calls_are_added_before_they_are_squared(structure):
    torch.manual_seed(0)
    model = Twice().double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
    rows = torch.stack(
        [
            torch.autograd.grad(F.cross_entropy(model(a[None]), b[None]), model.layer.weight)[0]
            for a, b in zip(x, y, strict=True)
        ]
    ).flatten(1)
    settings = {"structure": structure, "damping": DAMPING, "kl_clip": None, "loss": MeanLoss()}
    kfac = KFAC(model, update_every=1, refresh_every=1, **settings)
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(model.layer.weight.grad.flatten(), rows.mean(0))
    kfac.step()
    block = kept(rows.T @ rows / 6, structure) + DAMPING * torch.eye(9, dtype=torch.float64)
    expected = torch.linalg.solve(block, rows.mean(0))
    torch.testing.assert_close(model.layer.weight.grad.flatten(), expected)
