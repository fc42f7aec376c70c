"""Where theory says that an approximation is none, it is none: Kronecker factors, Fisher matrices.

Kronecker factors are the whole block for one sample without shared positions; and for deep linear
nets with a square loss, expand where the loss is a sum over positions, reduce where positions are
added up before the loss (Osawa 2019, eq. 5; Eschenhagen et al. 2023).
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import Twice
from natgrad import (
    KFAC,
    Diagonal,
    ExactFisher,
    Full,
    Kronecker,
    MeanLoss,
    MonteCarloFisher,
    UnitWise,
)
from natgrad.curvature import Bernoulli, Categorical, Gaussian
from oracles import close


class Mean(nn.Module):
    """Over positions: `[n, t, d]` or `[n, c, *space]` with `axes`."""

    def __init__(self, *axes: int, total: bool = False) -> None:
        super().__init__()
        self.axes, self.total = axes, total

    def forward(self, x):
        return x.sum(self.axes) if self.total else x.mean(self.axes)


class Last(nn.Module):
    """`[n, c, *space]` -> `[n, positions, c]`."""

    def forward(self, x):
        return x.flatten(2).mT


def linear_net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2), *more).double()


def observed(model, x, structure, curvature, targets=None):
    """Blocks by name after one update from what the curvature sees of `model(x)`."""
    kfac = KFAC(
        model,
        kl_clip=None,
        update_every=1,
        refresh_every=1,
        structure=structure,
        curvature=curvature,
        loss=MeanLoss(),  # a sample is one term, whatever its output
    )
    model.zero_grad()
    out = model(x)
    kfac.observe(out, targets)
    out.square().mean().backward()
    kfac.step()
    return {
        block.name: block.structure.dense(block.kept(), block.forms, block.shape)
        for block in kfac.blocks
    }


def jacobians(model, x) -> dict[str, torch.Tensor]:
    """`[n, *out, parameters]` of every linear layer, in the order of its matrix with the bias."""
    parameters = {k: p.detach() for k, p in model.named_parameters()}

    def outputs(values):
        return torch.func.functional_call(model, values, (x,))

    each = torch.func.jacrev(outputs)(parameters)
    joined = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight, bias = each[f"{name}.weight"], each[f"{name}.bias"].unsqueeze(-1)
            joined[name] = torch.cat([weight, bias], -1).flatten(-2)
    return joined


def gauss_newton(J, H):
    """`1/n Σ_n J_n^T H_n J_n` for `J [n, *out, p]` and `H [n, out, out]`."""
    return sum(j.T @ h @ j for j, h in zip(J.flatten(1, -2), H, strict=True)) / len(J)


# Kronecker factors.


def test_one_sample_without_sharing():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(1, 3, dtype=torch.float64)

    def blocks(structure):
        kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, structure=structure)
        model.zero_grad()
        F.cross_entropy(model(x), torch.tensor([1])).backward()
        kfac.step()
        kfac.detach()
        return {b.name: b.structure.dense(b.kept(), b.forms, b.shape) for b in kfac.blocks}

    whole = blocks(Full())
    for sharing in ("expand", "reduce"):
        for name, found in blocks(Kronecker(sharing)).items():
            assert close(found, whole[name], 1e-12)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("n", [1, 5])
def test_deep_linear_net_without_sharing(n, sharing):
    model, x = linear_net(), torch.randn(n, 3, dtype=torch.float64)
    compare_with_the_whole(model, x, sharing)


@pytest.mark.parametrize("positions", [1, 4])
def test_expand_is_exact_for_a_loss_over_positions(positions):
    compare_with_the_whole(
        linear_net(), torch.randn(3, positions, 3, dtype=torch.float64), "expand"
    )


@pytest.mark.parametrize("total", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("positions", [1, 4])
def test_reduce_is_exact_for_a_loss_of_added_positions(positions, total):
    x = torch.randn(3, positions, 3, dtype=torch.float64)
    compare_with_the_whole(linear_net(Mean(1, total=total)), x, "reduce")


@pytest.mark.parametrize("kernel", [1, 3])
def test_expand_is_exact_for_pixels_with_a_loss_each(kernel):
    model = nn.Sequential(nn.Conv2d(2, 3, kernel, padding=kernel // 2), Last(), nn.Linear(3, 2))
    compare_with_the_whole(model.double(), torch.randn(3, 2, 4, 3, dtype=torch.float64), "expand")


@pytest.mark.parametrize("groups", [1, 2])
def test_reduce_is_exact_for_pooled_pixels(groups):
    model = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, groups=groups), Mean(2, 3), nn.Linear(4, 2))
    x = torch.randn(3, 2, 5, 7, dtype=torch.float64)
    compare_with_the_whole(model.double(), x, "reduce", groups=groups)


def test_each_is_wrong_in_the_setting_of_the_other():
    tokens = torch.randn(3, 4, 3, dtype=torch.float64)
    with pytest.raises(AssertionError):
        compare_with_the_whole(linear_net(), tokens, "reduce")
    with pytest.raises(AssertionError):
        compare_with_the_whole(linear_net(Mean(1)), tokens, "expand")


def compare_with_the_whole(model, x, sharing, groups=1):
    curvature = ExactFisher(Gaussian())
    whole = observed(model, x, Full(), curvature)
    found = observed(model, x, Kronecker(sharing), curvature)
    for name, block in found.items():
        expected = whole[name]
        if name == "0" and groups > 1:  # correlations between groups are in no structure but Full
            unit = torch.arange(groups).repeat_interleave(len(expected) // groups)
            expected = expected * (unit[:, None] == unit[None, :])
        assert close(block, expected, 1e-10), name


# Fisher matrices.


def head(out_features):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out_features)).double()


def softmax_hessian(logits):
    """`[n, c]` -> `[n, c, c]`."""
    p = logits.softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def expected_fisher(model, x, H):
    return {name: gauss_newton(J, H) for name, J in jacobians(model, x).items()}


def parts_of(structure, block, rows):
    """What a structure keeps of the whole block of a layer with as many rows."""
    if isinstance(structure, Diagonal):
        return block.diagonal().diag()
    if isinstance(structure, UnitWise):
        unit = torch.arange(rows).repeat_interleave(len(block) // rows)
        return block * (unit[:, None] == unit[None, :])
    return block


def assert_fisher(model, x, curvature, expected, targets=None):
    for structure in (Full(), UnitWise(), Diagonal()):
        found = observed(model, x, structure, curvature, targets)
        for name, block in expected.items():
            rows = model.get_submodule(name).out_features
            assert close(found[name], parts_of(structure, block, rows)), (name, structure)


@pytest.mark.parametrize("n", [1, 4])
def test_exact_categorical(n):
    model, x = head(5), torch.randn(n, 3, dtype=torch.float64)
    with torch.no_grad():
        H = softmax_hessian(model(x))
    assert_fisher(model, x, ExactFisher(), expected_fisher(model, x, H))


def test_exact_gaussian():
    model, x = head(2), torch.randn(4, 3, dtype=torch.float64)
    H = torch.eye(2, dtype=torch.float64).expand(4, 2, 2) / 0.7
    assert_fisher(model, x, ExactFisher(Gaussian(0.7)), expected_fisher(model, x, H))


def test_exact_bernoulli():
    model, x = head(3), torch.randn(4, 3, dtype=torch.float64)
    with torch.no_grad():
        p = model(x).sigmoid()
    expected = expected_fisher(model, x, torch.diag_embed(p * (1 - p)))
    assert_fisher(model, x, ExactFisher(Bernoulli()), expected)


def test_exact_categorical_with_positions_and_ignored_targets():
    """Tokens `[n, t, c]`, independent given the output; ignored ones have no curvature."""
    model, x = head(3), torch.randn(2, 4, 3, dtype=torch.float64)
    targets = torch.tensor([[0, -100, 2, 1], [-100, -100, 0, 2]])
    with torch.no_grad():
        each = softmax_hessian(model(x)) * (targets != -100)[..., None, None]
    H = torch.stack([torch.block_diag(*blocks) for blocks in each])
    curvature = ExactFisher(Categorical(class_axis=-1))
    assert_fisher(model, x, curvature, expected_fisher(model, x, H), targets)


def test_exact_categorical_with_classes_in_front():
    """`[n, c, t]`, as torch's cross-entropy takes it."""
    inner, x = head(3), torch.randn(2, 4, 3, dtype=torch.float64)

    class ClassesInFront(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).mT

    expected = observed(inner, x, Full(), ExactFisher(Categorical(class_axis=-1)))
    found = observed(ClassesInFront(), x, Full(), ExactFisher())
    for name, block in expected.items():
        assert close(found[f"inner.{name}"], block)


def test_kronecker_factors_of_the_exact_fisher():
    """`G = Σ over vectors`, while inputs are counted once."""
    model, x = head(5), torch.randn(4, 3, dtype=torch.float64)
    found = observed(model, x, Kronecker(), ExactFisher())
    with torch.no_grad():
        hidden = model[1](model[0](x))
        H = softmax_hessian(model(x)).mean(0)
    a = torch.cat([hidden, torch.ones(4, 1, dtype=torch.float64)], 1)
    assert close(found["2"], torch.kron(H, a.T @ a / 4))


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.7), Bernoulli()], ids=str)
@pytest.mark.parametrize("samples", [1, 3])
def test_monte_carlo(samples, likelihood):
    """The same draws, and per-sample gradients of each."""
    model, x = head(3), torch.randn(4, 3, dtype=torch.float64)
    curvature = MonteCarloFisher(samples, seed=7, likelihood=likelihood)
    draws = curvature.vectors(model(x), None, curvature.generator("cpu"))
    H = sum(v.unsqueeze(-1) * v.unsqueeze(-2) for v in draws)
    assert_fisher(model, x, curvature, expected_fisher(model, x, H))


@pytest.mark.parametrize(
    "curvature", [ExactFisher(Gaussian()), MonteCarloFisher(3, likelihood=Gaussian())], ids=str
)
def test_a_layer_that_is_called_twice(curvature):
    """The gradient of a sample is one sum over both calls, for each vector apart."""
    model, x = Twice(nn.Linear(3, 3)).double(), torch.randn(4, 3, dtype=torch.float64)
    generator = curvature.generator("cpu") if isinstance(curvature, MonteCarloFisher) else None
    draws = curvature.vectors(model(x), None, generator)
    H = sum(v.unsqueeze(-1) * v.unsqueeze(-2) for v in draws)
    assert_fisher(model, x, curvature, expected_fisher(model, x, H))


def test_monte_carlo_with_ignored_targets():
    model, x = head(3), torch.randn(2, 4, 3, dtype=torch.float64)
    targets = torch.tensor([[0, -100, 2, 1], [-100, -100, 0, 2]])
    curvature = MonteCarloFisher(2, likelihood=Categorical(class_axis=-1))
    draws = list(curvature.vectors(model(x), targets, curvature.generator("cpu")))
    assert all((v[targets == -100] == 0).all() for v in draws)
    H = sum(v.flatten(1).unsqueeze(-1) * v.flatten(1).unsqueeze(-2) for v in draws)
    assert_fisher(model, x, curvature, expected_fisher(model, x, H), targets)


def test_observed_curvature_leaves_the_gradient_alone():
    """With a huge damping the step is the gradient of the loss, over the damping."""
    model, x = head(2), torch.randn(4, 3, dtype=torch.float64)
    kfac = KFAC(
        model, kl_clip=None, update_every=1, damping=1e12, curvature=ExactFisher(Gaussian())
    )
    out = model(x)
    kfac.observe(out)
    assert all(p.grad is None for p in model.parameters())
    loss = out.square().sum(1).mean()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    kfac.step()
    for p, g in zip(model.parameters(), expected, strict=True):
        assert close(p.grad * 1e12, g)
