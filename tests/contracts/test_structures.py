"""One suite for all structures: blocks that are curvature, and solves that invert them."""

import pytest
import torch

from cases import CASES, losses
from natgrad import EKFAC, KFAC, Cholesky, Diagonal, Eigen, Full, Kronecker, UnitWise
from oracles import close

DAMPING = 0.2
CHOICES = [
    (structure, inverse)
    for structure in (
        Kronecker(),
        Kronecker(sharing="reduce"),
        EKFAC(),
        UnitWise(),
        Diagonal(),
        Full(),
    )
    for inverse in (Eigen(), Cholesky())
    if not (isinstance(structure, EKFAC) and inverse == Cholesky())
]
NAMES = ["linear", "linear-2", "linear-one-to-one", "conv2d-groups", "conv2d-correlations"]
NAMES += ["embedding-2", "tied"]
BY_NAME = {case.name: case for case in CASES}

choices = pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=repr)
layers = pytest.mark.parametrize("name", NAMES)


def made(name, structure, inverse, n=3, steps=1):
    """The block of a layer after it has seen data."""
    case = BY_NAME[name]
    model = case.model()
    kfac = KFAC(
        model,
        kl_clip=None,
        update_every=1,
        refresh_every=1,
        structure=structure,
        inverse=inverse,
        damping=DAMPING,
    )
    for seed in range(steps):
        model.zero_grad()
        losses(case, model(*case.data(n, seed))).mean().backward()
        kfac.step()
    (block,) = kfac.blocks
    return block


def dense(block):
    kept = block.kept()
    if isinstance(block.structure, EKFAC):
        kept["S"] = block.parts["S"][0]
    return block.structure.dense(kept, block.forms, block.shape)


def damped(block, damping):
    """The matrix that preconditioning inverts."""
    structure = block.structure
    if isinstance(structure, Kronecker) and not block.inverse.joint:
        kept = structure.decomposed(block.kept(), block.forms)
        extra = structure.dampings(kept, block.forms, damping)
        a, g = (
            block.forms[n].dense(kept[n])
            + extra[n][:, None, None] * torch.eye(block.forms[n].dim, dtype=torch.float64)
            for n in ("A", "G")
        )
        return torch.block_diag(*(torch.kron(y, x) for x, y in zip(a, g, strict=True)))
    whole = dense(block)
    return whole + damping * torch.eye(len(whole), dtype=whole.dtype)


def precondition(block, m, damping=DAMPING, cache=None):
    cache = {} if cache is None else cache
    return block.structure.precondition(block.parts, block.inverse, m, damping, cache)


def randn(block):
    return torch.randn(block.shape, dtype=torch.float64)


@choices
@layers
def test_block_is_symmetric_and_positive(name, structure, inverse):
    block = made(name, structure, inverse)
    matrix = dense(block)
    assert matrix.shape == (torch.Size(block.shape).numel(),) * 2
    assert close(matrix, matrix.T, 1e-12)
    values = torch.linalg.eigvalsh(matrix)
    assert values.min() >= -1e-12 * values.max()
    assert values.max() > 0


@choices
@layers
def test_precondition_solves_the_damped_system(name, structure, inverse):
    block = made(name, structure, inverse)
    m = randn(block)
    found = precondition(block, m.clone())
    assert found.shape == m.shape
    assert close(damped(block, DAMPING) @ found.flatten(), m.flatten())


@choices
@layers
def test_multiply_is_the_block(name, structure, inverse):
    """Of the damped one where each factor was damped before its decomposition."""
    block = made(name, structure, inverse)
    m = randn(block)
    found = block.structure.multiply(block.parts, block.inverse, m, DAMPING)
    matrix = dense(block) if inverse.joint else damped(block, DAMPING)
    assert close(found.flatten(), matrix @ m.flatten())


@choices
@layers
def test_precondition_is_symmetric_and_shortens_no_less_than_the_damping(name, structure, inverse):
    block = made(name, structure, inverse)
    x, y = randn(block), randn(block)
    px, py = precondition(block, x.clone()), precondition(block, y.clone())
    assert close((px * y).sum(), (x * py).sum(), 1e-9)
    assert (px * x).sum() > 0
    assert px.norm() <= x.norm() / DAMPING * (1 + 1e-9)


@pytest.mark.parametrize(("structure", "inverse"), [c for c in CHOICES if c[1].joint], ids=repr)
@layers
def test_a_changed_damping_acts_at_once(name, structure, inverse):
    """Also through a cache that knows the last one."""
    block, cache = made(name, structure, inverse), {}
    m = randn(block)
    for damping in (DAMPING, 3.0, DAMPING):
        found = precondition(block, m.clone(), damping, cache)
        assert close(damped(block, damping) @ found.flatten(), m.flatten())


@choices
@layers
def test_groups_are_independent(name, structure, inverse):
    """No structure but Full knows anything between the groups of a layer."""
    block = made(name, structure, inverse)
    if block.shape[0] == 1 or isinstance(structure, Full):
        return
    m = randn(block)
    other = m.clone()
    other[0] = 0.0
    assert close(precondition(block, m)[1:], precondition(block, other)[1:])


@choices
def test_no_curvature_leaves_the_damping_alone(structure, inverse):
    """Zero gradients: the block is zero, and its inverse that of the damping."""
    model = torch.nn.Linear(3, 2).double()
    kfac = KFAC(
        model,
        kl_clip=None,
        update_every=1,
        refresh_every=1,
        structure=structure,
        inverse=inverse,
        damping=DAMPING,
    )
    (model(torch.randn(4, 3, dtype=torch.float64)).sum() * 0.0).backward()
    kfac.step()
    (block,) = kfac.blocks
    assert (dense(block) == 0).all()
    if inverse.joint or not isinstance(structure, Kronecker):
        m = randn(block)
        assert close(precondition(block, m.clone()), m / DAMPING)
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("inverse", [Eigen(), Cholesky()], ids=repr)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("scale", [1e-4, 3.0, 1e5])
@pytest.mark.parametrize("name", ["linear-2", "conv2d-groups", "embedding-2"])
def test_scale_may_be_split_between_factors_in_any_way(name, scale, sharing, inverse):
    """With the pi-correction `A s x G / s` is damped like `A x G`."""
    block = made(name, Kronecker(sharing), inverse)
    m = randn(block)
    expected = precondition(block, m.clone()).clone()
    block.running["A"].mean.mul_(scale)
    block.running["G"].mean.div_(scale)
    block.install(block.decompose(("A", "G"), DAMPING))
    assert close(precondition(block, m.clone()), expected)


def test_pi_of_a_factor_that_is_zero():
    """Nothing to correct by, so both get the root of the damping."""
    block = made("linear-2", Kronecker(), Cholesky())
    kept = block.kept()
    kept["G"] = torch.zeros_like(kept["G"])
    found = block.structure.dampings(kept, block.forms, 0.25)
    assert torch.equal(found["A"], found["G"])
    assert float(found["A"]) == 0.5


@choices
def test_averages_of_several_batches(structure, inverse):
    """The running average is a mean with weights that sum to one, so blocks stay curvature."""
    block = made("linear-2", structure, inverse, steps=3)
    m = randn(block)
    if not isinstance(structure, EKFAC):  # whose basis is that of the factors, S a step older
        assert close(damped(block, DAMPING) @ precondition(block, m.clone()).flatten(), m.flatten())
    weights = {float(running.weight) for running in block.running.values()}
    assert all(0 < w <= 1 - 0.95**3 + 1e-12 for w in weights)
