"""Which rows of a packed projection a call has used, wherever the parameter lies in memory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import natgrad


class Attends(nn.Module):
    """``crossed``: keys and values come from elsewhere, and two slices are used in one call."""

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.crossed = crossed

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        other = x.flip(1) if self.crossed else x
        return self.head(self.attention(x, other, other, need_weights=False)[0].mean(1))


def factors(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(6, 5, 8, dtype=torch.float64), torch.randint(3, (6,))
    kfac = natgrad.KFAC(model, kl_clip=None)
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    return {(b.name, n): mean for b in kfac.blocks for n, mean in b.kept().items()}


def offset(model: Attends, rows: int) -> None:
    weight = model.attention.in_proj_weight
    flat = torch.zeros(8 * rows + weight.numel(), dtype=weight.dtype)
    flat[8 * rows :] = weight.detach().flatten()
    weight.data = flat[8 * rows :].view_as(weight)


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("rows", [3, 8, 16, 24, None])
def test_a_weight_in_a_flat_buffer(rows, crossed):
    """``None``: the parameters of the whole model in one vector, one behind the other."""
    torch.manual_seed(0)
    plain = Attends(crossed).double()
    model = copy.deepcopy(plain)
    if rows is None:
        vector_to_parameters(parameters_to_vector(plain.parameters()).detach(), model.parameters())
        assert model.attention.in_proj_weight.storage_offset()
    else:
        offset(model, rows)
    expected, found = factors(plain), factors(model)
    assert found.keys() == expected.keys()
    assert ("attention.value", "G") in found
    for key, factor in expected.items():
        torch.testing.assert_close(found[key], factor, msg=str(key))
