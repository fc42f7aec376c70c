"""Damping of Kronecker factors one by one: as it is, and with the pi-correction."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import KFAC, Cholesky, Eigen
from natgrad.errors import SettingError
from oracles import close, pi_damped

DAMPING = 0.3


def preconditioned(inverse, bias):
    """The gradient of a layer, its factors, and what K-FAC makes of it."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3, bias=bias).double(), 2 * torch.randn(7, 4, dtype=torch.float64)
    kfac = KFAC(layer, kl_clip=None, damping=DAMPING, inverse=inverse, refresh_every=1)
    F.cross_entropy(layer(x), torch.arange(7) % 3).backward()
    gradient = torch.cat([p.grad.reshape(3, -1) for p in layer.parameters()], 1)
    kfac.step()
    (block,) = kfac.blocks
    kept = block.kept()
    a, g = (block.forms[name].dense(kept[name])[0] for name in ("A", "G"))
    return gradient, a, g, torch.cat([p.grad.reshape(3, -1) for p in layer.parameters()], 1)


@pytest.mark.parametrize("bias", [True, False])
def test_plain_factored_damping(bias):
    """(G + γI)^-1 ∇W (A + γI)^-1 (Pauloski 2022, eq. 9), by one dense solve."""
    gradient, a, g, found = preconditioned(Cholesky(pi_corrected=False), bias)
    eye_a, eye_g = (torch.eye(len(m), dtype=torch.float64) for m in (a, g))
    block = torch.kron(g + DAMPING * eye_g, a + DAMPING * eye_a)
    expected = torch.linalg.solve(block, gradient.flatten()).view(gradient.shape)
    assert close(found, expected, 1e-10)
    # It is another step than the corrected one, and than the damped block, which both approximate.
    corrected = torch.linalg.solve(pi_damped(a[None], g[None], DAMPING), gradient.flatten())
    assert close(preconditioned(Cholesky(), bias)[-1].flatten(), corrected, 1e-10)
    assert not close(corrected, expected.flatten(), 0.1)
    assert not close(preconditioned(Eigen(), bias)[-1], expected, 0.1)


def test_what_is_not_allowed_is_said():
    assert repr(Cholesky()) == "Cholesky()"
    assert repr(Cholesky(pi_corrected=False)) == "Cholesky(pi_corrected=False)"
    with pytest.raises(SettingError) as error:
        Cholesky(pi_corrected=1)
    assert str(error.value) == (
        "Cholesky.pi_corrected is 1 but must be True or False: pass one of the two."
    )
