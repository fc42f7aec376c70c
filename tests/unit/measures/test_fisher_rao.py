"""The Fisher-Rao norm against dense matrices, and what homogeneous networks make of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.curvature.fisher import EmpiricalFisher
from natgrad.measures import fisher_rao
from unit.measures.brute_force import DTYPE, Brute, batches, classified, network


def test_is_the_product_with_the_dense_matrix():
    x, y = classified(12, 4, 3)
    model = network(4, 5, 3)
    brute = Brute(model, F.cross_entropy, x, y)
    data = batches(x, y, 5, 7)
    truth = float(brute.theta @ brute.ggn() @ brute.theta)
    assert float(fisher_rao(model, F.cross_entropy, data)) == pytest.approx(truth, rel=1e-10)
    found = fisher_rao(model, F.cross_entropy, data, curvature=EmpiricalFisher())
    truth = float((brute.rows() @ brute.theta).square().mean())
    assert float(found) == pytest.approx(truth, rel=1e-10)
    assert found.method == "one product with the empirical Fisher"


def test_of_some_parameters():
    x, y = classified(12, 4, 3)
    model = network(4, 3)
    brute = Brute(model, F.cross_entropy, x, y)
    part = slice(12, 15)
    truth = float(brute.theta[part] @ brute.ggn()[part, part] @ brute.theta[part])
    found = fisher_rao(model, F.cross_entropy, (x, y), parameters="*bias")
    assert float(found) == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_identity_of_relu_networks_without_biases(depth):
    """``Σ θ ∂f/∂θ = depth f``, so the norm is ``depth² mean fᵀ Λ f``."""
    x, y = classified(9, 4, 3)
    model = network(4, *[6] * (depth - 1), 3, activation=nn.ReLU, bias=False)
    f = model(x).detach()
    p = f.softmax(1)
    curved = (p * f.square()).sum(1) - (p * f).sum(1).square()
    found = float(fisher_rao(model, F.cross_entropy, (x, y)))
    assert found == pytest.approx(depth**2 * float(curved.mean()), rel=1e-10)
    jacobian = torch.autograd.functional.jacobian(
        Brute(model, F.cross_entropy, x, y).output, Brute(model, F.cross_entropy, x, y).theta
    )
    torch.testing.assert_close(jacobian @ Brute(model, F.cross_entropy, x, y).theta, depth * f)


def test_does_not_see_how_layers_share_their_scale():
    x, y = classified(9, 4, 3)
    model = network(4, 6, 3, activation=nn.ReLU)
    before = float(fisher_rao(model, F.cross_entropy, (x, y)))
    with torch.no_grad():
        model[0].weight.mul_(7)
        model[0].bias.mul_(7)
        model[2].weight.div_(7)
    assert float(fisher_rao(model, F.cross_entropy, (x, y))) == pytest.approx(before, rel=1e-10)


def test_square_loss():
    x, y = torch.randn(8, 3, dtype=DTYPE), torch.randn(8, 2, dtype=DTYPE)
    model = nn.Linear(3, 2, bias=False, dtype=DTYPE)
    truth = 2 * float(model(x).detach().square().mean())
    assert float(fisher_rao(model, F.mse_loss, (x, y))) == pytest.approx(truth, rel=1e-10)
