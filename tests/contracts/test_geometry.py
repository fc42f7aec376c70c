"""One suite for all geometries and lengths: steps beside dense oracles, for all kinds of layers."""

import pytest
import torch
from torch import nn

from cases import CASES, losses
from natgrad import (
    EKFAC,
    KFAC,
    Cholesky,
    Diagonal,
    Eigen,
    Full,
    Kronecker,
    MeanLoss,
    OutputChange,
    Relative,
    Rms,
    Spectral,
    SumLoss,
    UnitWise,
)
from natgrad.errors import CoverageError, SettingError
from natgrad.geometry import Elementwise, Euclidean
from natgrad.lengths import Graft
from natgrad.linalg.polar import exact_polar
from natgrad.structures import Identity
from oracles import close

SHARE = 0.1
STRUCTURES = [Kronecker(), Kronecker(sharing="reduce"), EKFAC(), UnitWise(), Diagonal(), Full()]
NAMES = ["linear", "linear-2", "linear-one-to-one", "conv2d-groups", "conv2d-correlations"]
NAMES += ["embedding-2", "tied"]
BY_NAME = {case.name: case for case in CASES}
layers = pytest.mark.parametrize("name", NAMES)


def stepped(name, structure, geometry, **more):
    """One step: the block, its gradient before, and after."""
    case = BY_NAME[name]
    model = case.model()
    settings = {"damping": Relative(SHARE), "update_every": 1, "refresh_every": 1, **more}
    kfac = KFAC(model, kl_clip=None, structure=structure, geometry=geometry, **settings)
    losses(case, model(*case.data(3, 0))).mean().backward()
    raw = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    kfac.step()
    (block,) = kfac.blocks
    before, after = (torch.zeros(block.shape, dtype=torch.float64) for _ in range(2))
    block.layers[0].load(before, raw.__getitem__)
    block.layers[0].load(after, lambda p: p.grad)
    return block, before, after


def factors(block):
    """The dense factors ``[groups, rows, rows]`` and ``[groups, cols, cols]``."""
    kept = block.structure.matrices(block.kept(), block.forms)
    return [block.forms[name].dense(kept[name]) for name in ("G", "A")]


def whitened(block, m, power, damping=None):
    """``F^(-power/2) m``, by dense matrices: side by side, or of the whole block."""
    if isinstance(block.structure, Kronecker):
        g, a = (_root(one, power, damping) for one in factors(block))
        return g @ m @ a
    kept = block.kept()
    if isinstance(block.structure, EKFAC):
        kept["S"] = block.parts["S"][0]
    whole = block.structure.dense(kept, block.forms, block.shape)
    size = torch.Size(block.shape).numel()
    # Relative to what is decomposed at once: units by themselves, groups by themselves.
    pieces = {"UnitWise": block.shape[0] * block.shape[1], "Diagonal": None, "Full": 1}
    count = pieces.get(type(block.structure).__name__, block.shape[0])
    count = len(block.parts["F"][-1]) if count is None else count
    each = size // count
    parts = torch.stack([whole[i : i + each, i : i + each] for i in range(0, size, each)])
    return (_root(parts, power, damping) @ m.reshape(count, each, 1)).reshape(m.shape)


def _root(matrix, power, damping):
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=0)
    mean = values.mean(1, keepdim=True)
    added = SHARE * torch.where(mean > 0, mean, 1.0) if damping is None else damping
    return vectors * (values + added).pow(-power / 2).unsqueeze(1) @ vectors.mT


def unit(step):
    return step / step.square().mean().sqrt()


@pytest.mark.pairs
@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@layers
def test_the_spectral_step(name, structure, power):
    # With a floor below the smallest singular values, so that all become 1, as the oracle has it.
    block, before, after = stepped(name, structure, Spectral(power, floor=1e-9))
    white = exact_polar(whitened(block, before, power))
    assert close(after, unit(whitened(block, white, power)), 1e-6)


@pytest.mark.parametrize("inverse", [Eigen(), Cholesky()], ids=repr)
@layers
def test_the_roots_of_every_inverse_are_the_same(name, inverse):
    block, before, after = stepped(name, Kronecker(), Spectral(floor=1e-9), inverse=inverse)
    white = exact_polar(whitened(block, before, 0.5))
    assert close(after, unit(whitened(block, white, 0.5)), 1e-6)


@layers
def test_without_curvature_it_is_muon(name):
    block, before, after = stepped(name, None, Spectral(power=0, floor=1e-9))
    assert block.structure == Identity()
    assert not block.running
    assert not block.parts
    assert close(after, unit(exact_polar(before)), 1e-6)


@pytest.mark.parametrize("power", [0.5, 1.0])
@layers
def test_factored_powers(name, power):
    block, before, after = stepped(name, Kronecker(), Euclidean(power, factored=True))
    assert close(after, whitened(block, before, 2 * power))


@layers
def test_factored_with_an_absolute_damping_is_what_cholesky_inverts(name):
    _, _, one = stepped(name, Kronecker(), Euclidean(factored=True), damping=0.2)
    _, _, other = stepped(name, Kronecker(), Euclidean(), damping=0.2, inverse=Cholesky())
    assert close(one, other)


@layers
def test_relative_damping_of_the_whole_block(name):
    block, before, after = stepped(name, Kronecker(), Euclidean())
    g, a = factors(block)
    whole = torch.stack([torch.kron(x, y) for x, y in zip(g, a, strict=True)])
    mean = whole.diagonal(dim1=1, dim2=2).mean(1)
    damped = whole + SHARE * mean.view(-1, 1, 1) * torch.eye(whole.shape[1], dtype=whole.dtype)
    flat = before.reshape(len(g), -1, 1)
    assert close(after.reshape(len(g), -1, 1), torch.linalg.solve(damped, flat))


@layers
def test_the_elementwise_step(name):
    block, before, after = stepped(name, Kronecker(), Elementwise(eps=1e-3))
    g, a = factors(block)
    qg, qa = (torch.linalg.eigh(one)[1] for one in (g, a))
    # At the first step second moments are the squares of the gradient themselves. A basis of a
    # multiple eigenvalue is any one, and the result depends on it: there are none but zeros.
    diagonal = [block.forms[n].diagonal for n in ("G", "A")]
    qg, qa = (
        torch.eye(q.shape[1], dtype=q.dtype).expand_as(q) if flat else q
        for q, flat in zip((qg, qa), diagonal, strict=True)
    )
    rotated = qg.mT @ before @ qa
    expected = qg @ (rotated / (rotated.abs() + 1e-3)) @ qa.mT
    if min(torch.linalg.matrix_rank(one).min() for one in (g, a)) == 0 or not _distinct(g, a):
        pytest.skip("a null space has no basis of its own")
    assert close(after, unit(expected), 1e-6)


def _distinct(*matrices):
    for one in matrices:
        values = torch.linalg.eigvalsh(one)
        gaps = values.diff(dim=1) / values[:, -1:]
        if gaps.numel() and gaps.min() < 1e-9:
            return False
    return True


@pytest.mark.parametrize("structure", [Kronecker(), EKFAC(), UnitWise()], ids=repr)
@layers
def test_a_root_mean_square_of_one(name, structure):
    _, _, after = stepped(name, structure, Spectral())
    assert close(after.square().mean(), torch.ones((), dtype=torch.float64))


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["linear", "linear-2", "conv2d-correlations", "embedding-2"])
@pytest.mark.parametrize("structure", [Kronecker(), EKFAC()], ids=repr)
@pytest.mark.parametrize("geometry", [Euclidean(), Spectral()], ids=repr)
def test_outputs_change_by_one(name, structure, geometry):
    """Seen at the layer itself, on the data of its factor."""
    case = BY_NAME[name]
    model = case.model()
    kfac = KFAC(model, length=OutputChange(), structure=structure, geometry=geometry)
    x = case.data(3, 0)
    before = model(*x)
    losses(case, before).mean().backward()
    kfac.step()
    with torch.no_grad():
        for p in model.parameters():
            p += p.grad
        moved = model(*x) - before
    assert close(moved.square().mean(), torch.ones((), dtype=torch.float64), 1e-8)


@pytest.mark.parametrize("structure", [Kronecker(), EKFAC(), UnitWise(), Full()], ids=repr)
@layers
def test_as_long_as_the_gradient(name, structure):
    """The direction is that of the step without a length, beside which it is held."""
    _, before, after = stepped(name, structure, Euclidean(), length=Graft())
    _, _, free = stepped(name, structure, Euclidean())
    assert close(after, free * (before.norm() / free.norm()))
    assert not close(after, before, 1e-3)


@pytest.mark.parametrize("geometry", [Euclidean(), Spectral()], ids=repr)
def test_as_long_as_the_gradient_of_the_loss_as_written(geometry):
    """A sum keeps the length of a sum; a gradient that is nothing gives no step."""
    case, found = BY_NAME["linear"], {}
    settings = {"geometry": geometry, "length": Graft(), "damping": Relative()}
    for loss in (MeanLoss(), SumLoss()):
        model = case.model()
        kfac = KFAC(model, loss=loss, **settings)
        getattr(losses(case, model(*case.data(3, 0))), loss.reduction)().backward()
        raw = torch.cat([p.grad.flatten() for p in model.parameters()])
        kfac.step()
        found[loss.reduction] = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert close(found[loss.reduction].norm(), raw.norm())
    assert close(found["sum"], 3 * found["mean"], 1e-8)
    for p in model.parameters():
        p.grad = None
    (0 * losses(case, model(*case.data(3, 0))).sum()).backward()
    kfac.step()
    assert all(not p.grad.any() for p in model.parameters())


def test_as_long_as_the_momentum_that_it_follows():
    case = BY_NAME["linear"]
    model = case.model()
    kfac = KFAC(model, length=Graft(), momentum=0.5, damping=Relative())
    for step in range(3):
        model.zero_grad()
        losses(case, model(*case.data(3, step))).mean().backward()
        (block,) = kfac.blocks
        raw = torch.zeros(block.shape, dtype=torch.float64)
        block.layers[0].load(raw, lambda p: p.grad)
        kfac.step()
        momentum, weight = block.moments["momentum"], block.moments["weight"]
        followed = 0.5 * raw + 0.5 * momentum / weight
        after = torch.zeros(block.shape, dtype=torch.float64)
        block.layers[0].load(after, lambda p: p.grad)
        assert close(after.norm(), followed.norm())


def test_a_length_needs_the_inputs():
    with pytest.raises(CoverageError, match=r"OutputChange\(\) needs the second moments .* Diag"):
        KFAC(nn.Linear(3, 2), length=OutputChange(), structure=Diagonal())
    norm = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    assert len(KFAC(norm, length=OutputChange()).blocks) == 2


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("structure", [None, EKFAC(), UnitWise()], ids=repr)
def test_the_scale_of_the_loss_does_not_matter(structure, scale):
    found = []
    for factor in (1.0, scale):
        case = BY_NAME["linear"]
        model = case.model()
        kfac = KFAC(
            model, geometry=Spectral(), length=Rms(), structure=structure, damping=Relative()
        )
        (factor * losses(case, model(*case.data(3, 0))).mean()).backward()
        kfac.step()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert close(found[1], found[0], 1e-7)


def test_momentum_is_a_running_mean_without_bias():
    """Beside a loop that keeps it by hand and a preconditioner without one."""
    beta, case = 0.8, BY_NAME["linear"]
    settings = {"kl_clip": None, "damping": 0.1, "refresh_every": 1, "update_every": 1}
    one, other = case.model(), case.model()
    kfac, plain = KFAC(one, momentum=beta, **settings), KFAC(other, **settings)
    mean, weight = [torch.zeros_like(p) for p in other.parameters()], 0.0
    for step in range(4):
        for model in (one, other):
            model.zero_grad()
            losses(case, model(*case.data(3, step))).mean().backward()
        weight = beta * weight + 1 - beta
        for m, p in zip(mean, other.parameters(), strict=True):
            m.lerp_(p.grad, 1 - beta)
            p.grad = (1 - beta) * p.grad + beta * m / weight
        kfac.step()
        plain.step()
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert close(p.grad, q.grad)


def test_momentum_of_layers_that_are_used_now_and_then():
    """A layer without a gradient keeps its momentum, and others of its shape go on."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, both):
            return self.b(self.a(x)) if both else self.a(x)

    torch.manual_seed(0)
    model = Two().double()
    kfac = KFAC(model, geometry=Spectral(), momentum=0.9, update_every=1, refresh_every=1)
    x = torch.randn(8, 4, dtype=torch.float64)
    for both in (True, True, False):
        model.zero_grad()
        model(x, both).square().mean().backward()
        if not both:
            kept = {b.name: b.moments["momentum"].clone() for b in kfac.blocks}
        kfac.step()
    moments = {b.name: b.moments["momentum"] for b in kfac.blocks}
    assert torch.equal(moments["b"], kept["b"])
    assert not torch.equal(moments["a"], kept["a"])
    assert model.b.weight.grad is None


@pytest.mark.parametrize("geometry", [Spectral(), Elementwise(), Euclidean()], ids=repr)
def test_a_gradient_that_is_not_finite_is_forgotten(geometry):
    case = BY_NAME["linear"]
    model = case.model()
    kfac = KFAC(model, geometry=geometry, length=Rms(), momentum=0.9, update_every=5)
    for step in range(4):
        model.zero_grad()
        losses(case, model(*case.data(3, step))).mean().backward()
        if step == 2:
            before = {n: t.clone() for b in kfac.blocks for n, t in b.moments.items()}
            next(model.parameters()).grad.view(-1)[0] = float("nan")
        kfac.step()
        after = {n: t for b in kfac.blocks for n, t in b.moments.items()}
        if step == 2:
            assert not kfac.preconditioning.moved
            assert all(not p.grad.any() for p in model.parameters())
            assert all(torch.equal(after[name], before[name]) for name in before)
    assert kfac.preconditioning.moved
    assert all(torch.isfinite(t).all() for t in after.values())


def test_what_is_given_is_checked():
    layer = nn.Linear(3, 2)
    with pytest.raises(SettingError, match=r"geometry is .* but must be a geometry: pass"):
        KFAC(layer, kl_clip=None, geometry=Spectral)
    with pytest.raises(SettingError, match=r"length is .* but must be a length or None: pass"):
        KFAC(layer, kl_clip=None, length=Rms)
    with pytest.raises(SettingError, match=r"momentum is 1.0 but must be in \[0, 1\)"):
        KFAC(layer, kl_clip=None, momentum=1.0)
    with pytest.raises(SettingError, match=r"Spectral.power is 2 but must be in \[0, 1\]"):
        Spectral(power=2)
    with pytest.raises(SettingError, match=r"Relative.share is 0 but must be finite and above 0"):
        Relative(0)
    with pytest.raises(CoverageError, match="Cholesky"):
        KFAC(layer, kl_clip=None, geometry=Elementwise(), inverse=Cholesky())
