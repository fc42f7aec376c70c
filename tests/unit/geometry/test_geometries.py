"""What the engine and the planner are told of a geometry."""

import pytest
import torch

from natgrad import Eigen, Spectral
from natgrad.geometry import Elementwise, Euclidean
from natgrad.inverses import DecomposedFactor


def block(seed):
    torch.manual_seed(seed)
    factors = []
    for dim in (3, 4):
        rows = torch.randn(1, 9, dim, dtype=torch.float64)
        parts = Eigen().decompose(rows.mT @ rows, torch.zeros(1, dtype=torch.float64))
        factors.append(DecomposedFactor(Eigen(), parts, dim))
    return Eigen().kronecker(*factors)


def stepped(geometry, own, m):
    torch.manual_seed(0)
    shapes = geometry.kept((1, 3, 4))
    kept = {name: torch.rand(shape, dtype=torch.float64) for name, shape in shapes.items()}
    out = torch.empty_like(m)
    geometry.step(own, m, kept, 0.1, out)
    return out


@pytest.mark.parametrize(
    "geometry",
    [
        *(Euclidean(power) for power in (0.0, 0.3, 1.0)),
        *(Euclidean(power, factored=True) for power in (0.3, 1.0)),
        *(Spectral(power) for power in (0.0, 0.3, 0.5, 1.0)),
        Elementwise(),
    ],
    ids=repr,
)
def test_what_it_says_of_itself_is_what_its_steps_do(geometry):
    """Whether they depend on the curvature: where not, none is measured. Whether they add up: only
    then does their length say how long a gradient was."""
    first, second = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    one, other = (stepped(geometry, block(seed), first) for seed in (1, 2))
    assert geometry.uses_curvature == (not torch.allclose(one, other))
    together = stepped(geometry, block(1), first + second)
    apart = one + stepped(geometry, block(1), second)
    # What it keeps for each vector of the basis must depend on the curvature alone.
    assert geometry.measures_in_basis == bool(geometry.kept((1, 3, 4)))
    # Second moments that do not move are weights of a linear map, but gradients move them.
    adds_up = torch.allclose(together, apart) and not geometry.kept((1, 3, 4))
    assert geometry.is_linear == adds_up


@pytest.mark.parametrize("shape", [(1, 3, 5), (2, 5, 3), (4, 7, 1)])
def test_what_the_planner_is_told_of_an_elementwise_step(shape):
    """The gradient is turned into the eigenbasis once more than the step itself, to be squared: a
    product on either side, of two operations for each multiplication; and eight operations for each
    entry."""
    groups, rows, cols = shape
    products = 2 * rows * rows * cols + 2 * rows * cols * cols
    assert Elementwise().operations(shape) == groups * (products + 8 * rows * cols)
    assert Elementwise().operations((2 * groups, rows, cols)) == 2 * Elementwise().operations(shape)
    assert Euclidean().operations(shape) == 0


@pytest.mark.parametrize("decay", [0.5, 0.95])
def test_second_moments_are_a_running_mean_without_bias(decay):
    """Of the gradients along the basis, of those that fit alone; the latest counts most."""
    geometry, own = Elementwise(decay=decay, eps=1e-12), block(1)
    kept = {name: torch.zeros(shape).double() for name, shape in geometry.kept((1, 3, 4)).items()}
    total, weight = torch.zeros(1, 3, 4, dtype=torch.float64), 0.0
    for fits in (True, True, False, True):
        gradient = torch.randn(1, 3, 4, dtype=torch.float64)
        geometry.observe(own, gradient, torch.tensor([fits]), kept)
        if fits:
            total = decay * total + own.rotate(gradient).square()
            weight = decay * weight + 1
        mean = total / weight
        torch.testing.assert_close(kept["second"] / kept["second_weight"], mean)
        m, out = torch.randn(1, 3, 4, dtype=torch.float64), torch.empty(1, 3, 4).double()
        geometry.step(own, m, kept, 0.1, out)
        torch.testing.assert_close(own.rotate(out), own.rotate(m) / mean.sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounding_errors_alone_have_moved_is_left_alone(dtype):
    """Coordinates of less than 64 rounding errors of the largest one of the same matrix."""
    own, m = Eigen().kronecker(*(diagonal(n, dtype) for n in (1, 5))), torch.ones(1, 1, 5).to(dtype)
    roots = torch.tensor([1.0, 0.5, 96 * torch.finfo(dtype).eps, 32 * torch.finfo(dtype).eps, 0.0])
    kept = {
        "second": roots.to(dtype).square().view(1, 1, 5),
        "second_weight": torch.ones(1).to(dtype),
    }
    out = torch.empty_like(m)
    Elementwise(eps=1e-30).step(own, m, kept, 0.1, out)
    expected = torch.where(roots > 64 * torch.finfo(dtype).eps, 1 / roots, 0.0)
    torch.testing.assert_close(out.flatten(), expected.to(dtype))


def diagonal(dim, dtype):
    values = torch.ones(1, dim, dtype=dtype)
    parts = Eigen().decompose_diagonal(values, torch.zeros(1, dtype=dtype))
    return DecomposedFactor(Eigen(), parts, dim, diagonal=True)
