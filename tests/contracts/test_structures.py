"""One suite for all structures: blocks that are curvature, and solves that invert them."""

from functools import cache, partial

import pytest
import torch

from cases import CASES, losses
from documented import OWN_INVERSES, InputsOnly
from natgrad import EKFAC, KFAC, Cholesky, Diagonal, Eigen, Full, Kronecker, UnitWise
from natgrad.errors import SettingError
from natgrad.geometry import Euclidean
from natgrad.inverses import DampedPower, Diagonalization
from natgrad.structures import Factor
from oracles import close

DAMPING = 0.2
STRUCTURES = [
    Kronecker(),
    Kronecker(sharing="reduce"),
    Kronecker(sharing="traces"),
    EKFAC(),
    UnitWise(),
    Diagonal(),
    Full(),
    InputsOnly(),
    Kronecker(input_block=2, gradient_block=2),
    EKFAC(input_block=2, gradient_block=1),
]
INVERSES = [Eigen(), Cholesky(), *OWN_INVERSES]
NAMES = ["linear", "linear-2", "linear-one-to-one", "conv2d-groups", "conv2d-correlations"]
NAMES += ["embedding-2", "tied"]
BY_NAME = {case.name: case for case in CASES}
CHANGING = [inverse for inverse in INVERSES if not inverse.damps_factors]

layers = pytest.mark.parametrize("name", NAMES)


def no_basis(structure, inverse):
    return isinstance(structure, EKFAC) and not isinstance(inverse, Diagonalization)


def not_in_groups(structure, inverse, name):
    return no_basis(structure, inverse) or isinstance(structure, Full) or "groups" not in name


def choices(test, inverses=INVERSES, unless=no_basis):
    """Structures and inverses that go together; each two of them with each layer, and so on."""
    for axis in (
        pytest.mark.parametrize("inverse", inverses, ids=repr),
        pytest.mark.parametrize("structure", STRUCTURES, ids=repr),
        pytest.mark.pairs(unless=unless),
    ):
        test = axis(test)
    return test


@cache
def seen(name, structure, inverse):
    """One block for all tests that only read it."""
    return made(name, structure, inverse)


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
    if isinstance(structure, Kronecker) and block.inverse.damps_factors:
        kept = structure.matrices(block.kept(), block.forms)
        extra = structure.dampings(kept, block.forms, damping)
        a, g = (
            block.forms[n].dense(kept[n])
            + extra[n][:, None, None] * torch.eye(block.forms[n].dim, dtype=torch.float64)
            for n in ("A", "G")
        )
        return torch.block_diag(*(torch.kron(y, x) for x, y in zip(a, g, strict=True)))
    whole = dense(block)
    return whole + damping * torch.eye(len(whole), dtype=whole.dtype)


def precondition(block, m, damping=DAMPING, decomposed=None):
    decomposed = block.decomposed() if decomposed is None else decomposed
    return decomposed.apply(DampedPower(-1.0, damping), m)


def randn(block):
    return torch.randn(block.shape, dtype=torch.float64)


@choices
@layers
def test_block_is_symmetric_and_positive(name, structure, inverse):
    block = seen(name, structure, inverse)
    matrix = dense(block)
    assert matrix.shape == (torch.Size(block.shape).numel(),) * 2
    assert close(matrix, matrix.T, 1e-12)
    values = torch.linalg.eigvalsh(matrix)
    assert values.min() >= -1e-12 * values.max()
    assert values.max() > 0


@choices
@layers
def test_precondition_solves_the_damped_system(name, structure, inverse):
    block = seen(name, structure, inverse)
    m = randn(block)
    found = precondition(block, m.clone())
    assert found.shape == m.shape
    assert close(damped(block, DAMPING) @ found.flatten(), m.flatten())


@choices
@layers
def test_multiply_is_the_damped_block(name, structure, inverse):
    block = seen(name, structure, inverse)
    m = randn(block)
    found = block.decomposed().multiply(m, DAMPING)
    assert close(found.flatten(), damped(block, DAMPING) @ m.flatten())


@choices
@layers
@pytest.mark.parametrize("exponent", [-0.5, -0.25, 0.5])
def test_powers_of_the_damped_block(name, structure, inverse, exponent):
    block = seen(name, structure, inverse)
    m = randn(block)
    found = block.decomposed().apply(DampedPower(exponent, DAMPING), m)
    values, vectors = torch.linalg.eigh(damped(block, DAMPING))
    expected = vectors @ (values.pow(exponent) * (vectors.T @ m.flatten()))
    assert close(found.flatten(), expected)


@choices
@layers
def test_any_function_of_the_block(name, structure, inverse):
    """Of the damped one where each factor was damped before its decomposition."""
    block = seen(name, structure, inverse)
    m = randn(block)
    values, vectors = torch.linalg.eigh(damped(block, DAMPING if inverse.damps_factors else 0.0))
    expected = vectors @ (values.clamp(min=0.0).log1p() * (vectors.T @ m.flatten()))
    assert close(block.decomposed().apply(torch.log1p, m).flatten(), expected)


@choices
@layers
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_whitening(name, structure, inverse, power):
    """Twice is the damped power itself, where each factor of a product has its own damping; it is
    symmetric, and with none at all of it nothing happens."""
    block = seen(name, structure, inverse)
    x, y = randn(block), randn(block)
    decomposed = block.decomposed()
    white = decomposed.whiten(x, power, DAMPING)
    assert close((white * y).sum(), (x * decomposed.whiten(y, power, DAMPING)).sum(), 1e-9)
    if not power:
        assert close(white, x)
    factored = seen(name, structure, Cholesky()) if isinstance(structure, Kronecker) else block
    values, vectors = torch.linalg.eigh(damped(factored, DAMPING))
    expected = vectors @ (values.pow(-power) * (vectors.T @ x.flatten()))
    assert close(decomposed.whiten(white, power, DAMPING).flatten(), expected)


@choices
@layers
def test_precondition_is_symmetric_and_shortens_no_less_than_the_damping(name, structure, inverse):
    block = seen(name, structure, inverse)
    x, y = randn(block), randn(block)
    px, py = precondition(block, x.clone()), precondition(block, y.clone())
    assert close((px * y).sum(), (x * py).sum(), 1e-9)
    assert (px * x).sum() > 0
    assert px.norm() <= x.norm() / DAMPING * (1 + 1e-9)


@partial(choices, inverses=CHANGING)
@layers
def test_a_changed_damping_acts_at_once(name, structure, inverse):
    """Also through an object that remembers the last one."""
    block = seen(name, structure, inverse)
    m, decomposed = randn(block), block.decomposed()
    for damping in (DAMPING, 3.0, DAMPING):
        found = precondition(block, m.clone(), damping, decomposed)
        assert close(damped(block, damping) @ found.flatten(), m.flatten())


@partial(choices, unless=not_in_groups)
@layers
def test_groups_are_independent(name, structure, inverse):
    """No structure but Full knows anything between the groups of a layer."""
    block = seen(name, structure, inverse)
    assert block.shape[0] > 1
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
    if isinstance(structure, InputsOnly):  # which does not look at gradients
        return
    assert (dense(block) == 0).all()
    if not inverse.damps_factors or not isinstance(structure, Kronecker):
        m = randn(block)
        assert close(precondition(block, m.clone()), m / DAMPING)
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.pairs
@pytest.mark.parametrize("inverse", INVERSES, ids=repr)
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
    block.install(block.decompose(("A", "G"), DAMPING), ("A", "G"))
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


@pytest.mark.pairs
@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("power", [0.0, 0.5, 0.75, 1.0])
@layers
def test_a_step_with_a_power_of_the_curvature(name, structure, power):
    """``Euclidean(power=a)`` replaces the gradient by ``(F + damping I)^-a grad``."""
    case = BY_NAME[name]
    model = case.model()
    kfac = KFAC(
        model,
        kl_clip=None,
        update_every=1,
        refresh_every=1,
        structure=structure,
        geometry=Euclidean(power=power),
        damping=DAMPING,
    )
    losses(case, model(*case.data(3, 0))).mean().backward()
    raw = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    kfac.step()
    (block,) = kfac.blocks
    before, after = (torch.zeros(block.shape, dtype=torch.float64) for _ in range(2))
    block.layers[0].load(before, raw.__getitem__)
    block.layers[0].load(after, lambda p: p.grad)
    values, vectors = torch.linalg.eigh(damped(block, DAMPING))
    expected = vectors @ (values.pow(-power) * (vectors.T @ before.flatten()))
    assert close(after.flatten(), expected)


def test_a_power_is_between_the_gradient_and_the_natural_one():
    for power in (-0.1, 1.5, float("nan"), "half"):
        with pytest.raises(SettingError, match=r"Euclidean.power is .* but must be in \[0, 1\]"):
            Euclidean(power=power)


class Weighted(InputsOnly):
    """Its A depends on gradients, too: each input counts by the square of its own gradient."""

    def factors(self, layers):
        return {"A": Factor(layers[0].input_form(), of_gradients=False)}

    def add(self, layer, x, g, sums):
        if "A" in sums:
            sums["A"].form.add_rows(sums["A"].kept, (x * g.norm(dim=1, keepdim=True))[None])
            sums["A"].count += len(x)


def test_layers_share_only_what_is_of_their_inputs_alone():
    """Two layers with one input: a factor that does not say that it is of the inputs is its own."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = (torch.nn.Linear(3, 2, bias=False) for _ in range(2))

        def forward(self, x):
            return self.left(x).tanh().sum(1) + 10 * self.right(x).sin().sum(1)

    def factors(structure, *names):
        torch.manual_seed(0)
        model = Two().double()
        for name, p in model.named_parameters():
            p.requires_grad_(name.split(".")[0] in names)
        kfac = KFAC(model, kl_clip=None, update_every=1, structure=structure, inverse=Cholesky())
        x = torch.randn(5, 3, dtype=torch.float64)
        model(x).square().mean().backward()
        kfac.step()
        return {block.name: block.running["A"].mean for block in kfac.blocks}, kfac

    together, _ = factors(Weighted(), "left", "right")
    for name, factor in together.items():
        alone, _ = factors(Weighted(), name)
        assert close(factor, alone[name])
    assert not close(together["left"], together["right"], 1e-3)
    shared, kfac = factors(InputsOnly(), "left", "right")
    assert torch.equal(shared["left"], shared["right"])
    assert any(block.shares_input_with is not None for block in kfac.blocks)


@choices
@layers
def test_decomposing_at_once_is_what_a_step_does_factor_by_factor(name, structure, inverse):
    block = seen(name, structure, inverse)
    kept = block.kept()
    if isinstance(structure, EKFAC):
        kept["S"] = block.parts["S"][0].flatten()
    m = randn(block)
    decomposed = structure.decompose(kept, block.forms, inverse, DAMPING)
    assert close(precondition(block, m, decomposed=decomposed), precondition(block, m))
    assert close(decomposed.multiply(m, DAMPING), block.decomposed().multiply(m, DAMPING))


@pytest.mark.parametrize("inverse", [Eigen(), Cholesky()], ids=repr)
def test_what_cannot_be_decomposed_at_once_raises(inverse):
    block = made("linear-2", Kronecker(), inverse)
    kept = {name: torch.full_like(mean, float("nan")) for name, mean in block.kept().items()}
    with pytest.raises(torch.linalg.LinAlgError, match="cannot be decomposed"):
        block.structure.decompose(kept, block.forms, inverse, DAMPING)
