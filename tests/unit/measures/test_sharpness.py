"""Sharpness against dense eigenvalues, SAM's own step, and a search over all directions."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.measures import AdaptiveBall, Ball, rise, sharpness
from natgrad.measures.displaced_parameters import displaced
from natgrad.operators import Hutchinson, Problem, ggn
from natgrad.structures import Kronecker
from unit.measures.brute_force import (
    DTYPE,
    Brute,
    batches,
    classified,
    minimised,
    network,
    refuses,
)


def case():
    x, y = classified(15, 4, 3)
    model = network(4, 5, 3)
    return Brute(model, F.cross_entropy, x, y), batches(x, y, 4, 11)


class TestEigenvalues:
    def test_of_the_hessian(self):
        brute, data = case()
        dense = brute.hessian()
        found = sharpness(brute.model, F.cross_entropy, data)
        assert found.largest == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-6)
        assert found.residual < 1e-3
        assert float(found.trace) == pytest.approx(float(dense.trace()), rel=1e-9)
        assert found.trace.standard_error == 0
        assert found.kind == "Hessian"

    def test_of_other_matrices(self):
        brute, data = case()
        dense = brute.ggn()
        found = sharpness(brute.model, F.cross_entropy, data, matrix=ggn)
        assert found.largest == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-6)
        assert float(found.trace) == pytest.approx(float(dense.trace()), rel=1e-9)
        kept = ggn(brute.model, F.cross_entropy, data, structure=Kronecker())
        found = sharpness(kept.problem, matrix=kept)
        dense = kept.dense()
        assert found.largest == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-9)
        assert float(found.trace) == pytest.approx(float(dense.trace()), rel=1e-9)

    def test_estimated_traces(self):
        brute, data = case()
        found = sharpness(brute.model, F.cross_entropy, data, by=Hutchinson(20)).trace
        assert found.standard_error > 0
        assert abs(float(found) - float(brute.hessian().trace())) < 4 * found.standard_error

    @pytest.mark.parametrize("region", [Ball(0.3), AdaptiveBall(0.3, 2)])
    def test_beside_the_rise_in_the_region_asked_for(self, region):
        brute, data = case()
        problem = Problem(brute.model, F.cross_entropy, data)
        found = sharpness(problem, matrix=ggn, region=region)
        assert found.rise == rise(problem, region=region)
        assert found.rise.region == region


class TestOneStep:
    def test_is_sams(self):
        brute, data = case()
        g = brute.gradient()
        base = float(brute.value(brute.theta))
        truth = float(brute.value(brute.theta + 0.3 * g / g.norm())) - base
        found = rise(brute.model, F.cross_entropy, data, region=Ball(0.3))
        assert found.loss == pytest.approx(base, rel=1e-12)
        assert found.height == float(found) == pytest.approx(truth, rel=1e-9)

    def test_is_asams(self):
        brute, data = case()
        g, T = brute.gradient(), brute.theta.abs() + 0.01
        step = 0.4 * T.square() * g / (T * g).norm()
        truth = float(brute.value(brute.theta + step) - brute.value(brute.theta))
        found = rise(brute.model, F.cross_entropy, data, region=AdaptiveBall(0.4))
        assert found.height == pytest.approx(truth, rel=1e-9)

    def test_of_some_parameters(self):
        brute, data = case()
        g = brute.gradient()
        g[:-3] = 0
        truth = float(brute.value(brute.theta + 0.3 * g / g.norm()) - brute.value(brute.theta))
        found = rise(brute.model, F.cross_entropy, data, parameters="2.bias", region=Ball(0.3))
        assert found.height == pytest.approx(truth, rel=1e-9)


def two_parameters(minimum):
    """``f = b tanh(a x)``, whose loss is not convex."""
    model = network(1, 1, 1, bias=False)
    x = torch.linspace(-2, 2, 9, dtype=DTYPE).unsqueeze(1)
    y = 1.5 * torch.tanh(1.2 * x) + 0.3 * torch.cos(3 * x)
    with torch.no_grad():
        model[0].weight.fill_(0.9)
        model[2].weight.fill_(1.1)
    if minimum:
        minimised(model, F.mse_loss, x, y)
    return Brute(model, F.mse_loss, x, y)


def highest(brute, radius, scales):
    """Over a grid of the ball, in units of ``scales``."""
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=DTYPE)
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    radii = torch.linspace(0, radius, 21, dtype=DTYPE)
    changes = (radii.view(-1, 1, 1) * circle * scales).flatten(0, 1)
    return float(torch.func.vmap(brute.value)(brute.theta + changes).max())


class TestSeveralSteps:
    @pytest.mark.parametrize("minimum", [False, True])
    @pytest.mark.parametrize("kind", [Ball, AdaptiveBall])
    def test_find_the_maximum_that_a_grid_finds(self, minimum, kind):
        brute = two_parameters(minimum)
        region = kind(0.5, steps=30, restarts=4)
        truth = highest(brute, 0.5, region.scales(brute.theta))
        found = rise(brute.model, F.mse_loss, (brute.x, brute.y), region=region)
        assert found.worst == pytest.approx(truth, rel=2e-4)
        assert found.height > 0

    def test_stay_in_the_ball(self, monkeypatch):
        brute = two_parameters(False)
        lengths = []

        def watched(problem, change):
            lengths.append(float(change.norm()))
            return displaced(problem, change)

        monkeypatch.setattr(sys.modules[rise.__module__], "displaced", watched)
        rise(brute.model, F.mse_loss, (brute.x, brute.y), region=Ball(0.5, 5, 3))
        assert len(lengths) > 20
        assert max(lengths) <= 0.5 * (1 + 1e-12)

    def test_more_steps_and_restarts_find_no_less(self):
        brute, data = case()
        problem = Problem(brute.model, F.cross_entropy, data)
        one, more, most = (
            rise(problem, region=Ball(0.5, steps, restarts)).height
            for steps, restarts in ((1, 0), (5, 0), (5, 3))
        )
        assert 0 < one <= more <= most


def test_the_adaptive_ball_does_not_see_how_layers_share_their_scale():
    x, y = classified(9, 4, 3)
    model = network(4, 6, 3, activation=nn.ReLU)
    problem = Problem(model, F.cross_entropy, (x, y))
    regions = AdaptiveBall(0.3, floor=0.0), Ball(0.3)
    adaptive, plain = (rise(problem, region=region).height for region in regions)
    with torch.no_grad():
        model[0].weight.mul_(7)
        model[0].bias.mul_(7)
        model[2].weight.div_(7)
    again, other = (rise(problem, region=region).height for region in regions)
    assert again == pytest.approx(adaptive, rel=1e-9)
    assert abs(other / plain - 1) > 0.1


def test_nothing_rises_where_there_is_no_gradient():
    model = nn.Linear(2, 1, bias=False, dtype=DTYPE)
    x, y = torch.zeros(3, 2, dtype=DTYPE), torch.ones(3, 1, dtype=DTYPE)
    assert rise(model, F.mse_loss, (x, y), region=Ball(1.0, 3, 2)).height == 0


def test_parameters_come_back_bit_for_bit():
    brute, data = case()
    before = [p.detach().clone() for p in brute.model.parameters()]
    problem = Problem(brute.model, F.cross_entropy, data)
    rise(problem, region=Ball(0.5, 3, 2))
    change = torch.ones(problem.space.size, dtype=DTYPE)

    def fail():
        with displaced(problem, change):
            assert bool((problem.parameters["0.bias"] == before[1] + 1).all())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for p, old in zip(brute.model.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.requires_grad


def test_what_is_no_number_is_an_infinite_rise():
    model = nn.Linear(1, 1, bias=False, dtype=DTYPE)
    with torch.no_grad():
        model.weight.fill_(0.5)
    x = torch.ones(2, 1, dtype=DTYPE)

    def barrier(output, target):
        return -(target - output).log().mean()

    found = rise(model, barrier, (x, x), region=Ball(1.0))
    assert found.worst == found.height == math.inf


def test_prints_a_line():
    brute, data = case()
    found = sharpness(brute.model, F.cross_entropy, data)
    assert str(found) == (
        f"sharpness: λ_max {found.largest:.6g}, trace {found.trace} (Hessian); the loss rises from "
        f"{found.rise.loss:.6g} to {found.rise.worst:.6g} in "
        "Ball(radius=0.05, steps=1, restarts=0, seed=0)"
    )


def test_refusals():
    with refuses("Ball.radius is 0 but must be finite and above 0: pass such a number."):
        Ball(0)
    with refuses("Ball.steps is 0 but must be a whole number of at least 1: pass such an int."):
        Ball(1, 0)
    with refuses(
        "Ball.restarts is 1.5 but must be a whole number of at least 0: pass such an int."
    ):
        Ball(1, 1, 1.5)
    with refuses("AdaptiveBall.floor is -1 but must be finite and at least 0: pass such a number."):
        AdaptiveBall(floor=-1)
    with refuses(
        "AdaptiveBall.seed is None but must be a whole number of at least 0: pass such an int."
    ):
        AdaptiveBall(seed=None)
