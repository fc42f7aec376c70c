"""One suite for all matrices, in all structures: each operation is that of the dense matrix."""

from functools import cache

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
import torch.nn.functional as F
from torch import nn

from dense_matrices import NETWORKS, SAMPLES, network, uneven
from natgrad import EKFAC, Diagonal, EmpiricalFisher, ExactFisher, Full, Kronecker, UnitWise
from natgrad import operators as ops
from natgrad.curvature.losses import CrossEntropy
from natgrad.operators.estimators import Lanczos
from oracles import close

MATRICES = ("H", "G", "F", "C")
STRUCTURES = {
    "none": None,
    "full": Full(),
    "unit-wise": UnitWise(),
    "diagonal": Diagonal(),
    "expand": Kronecker(),
    "reduce": Kronecker(sharing="reduce"),
    "ekfac": EKFAC(),
}
TOLERANCE = 1e-9
ACCURATE = Lanczos(tolerance=1e-10)

networks = pytest.mark.parametrize("name", NETWORKS)
matrices = pytest.mark.parametrize("matrix", MATRICES)
structures = pytest.mark.parametrize("structure", STRUCTURES)


def every(test):
    return pytest.mark.pairs(networks(matrices(structures(test))))


def loss_of(name):
    return CrossEntropy(class_axis=-1) if name == "transformer" else F.cross_entropy


def operator(name, matrix, structure, cut=False):
    return made(name, matrix, structure, cut)


@cache
def made(name, matrix, structure, cut):
    dense = network(name)
    (x,), y = dense.inputs, dense.targets
    data = uneven(x, y) if cut else (x, y)
    problem = (dense.model, loss_of(name), data)
    chosen = STRUCTURES[structure]
    if matrix == "H":
        if name == "transformer" and isinstance(chosen, Kronecker | EKFAC):
            two_sided, chosen = chosen, lambda layer: _of_hessian(layer, two_sided)
        return ops.hessian(*problem, structure=chosen)
    if matrix == "G":
        return ops.ggn(*problem, structure=chosen)
    curvature = ExactFisher() if matrix == "F" else EmpiricalFisher()
    return ops.fisher(*problem, structure=chosen, curvature=curvature)


def several(name, matrix, structure):
    """Of one batch and of several; but for entries of a large Hessian, which take their time."""
    yield operator(name, matrix, structure)
    if (name, matrix) != ("transformer", "H") or structure in ("none", "expand"):
        yield operator(name, matrix, structure, cut=True)


def _of_hessian(layer, structure):
    """A weight that is used twice has no Kronecker factors of its Hessian."""
    if isinstance(layer.module, nn.LayerNorm):
        return UnitWise()
    return Full() if layer.name == "embedding" else structure


@cache
def expected(name, matrix, structure):
    """`[P, P]`."""
    dense, kind = network(name), "G" if matrix == "F" else matrix
    whole = getattr(dense, kind)
    if structure == "none":
        return whole
    if structure == "full":
        return dense.full(whole)
    if structure == "unit-wise":
        return dense.unit_wise(whole)
    if structure == "diagonal":
        return dense.diagonal(whole)
    return dense.ekfac(kind) if structure == "ekfac" else dense.kronecker(kind, structure)


@cache
def spectrum(name, matrix, structure):
    """Descending."""
    return torch.linalg.eigvalsh(expected(name, matrix, structure)).flip(0)


def damping_of(*which):
    """Enough to make the matrix positive, with a margin."""
    return 0.3 + max(0.0, -float(spectrum(*which)[-1]))


def damped(*which):
    truth = expected(*which)
    return truth + damping_of(*which) * torch.eye(len(truth), dtype=truth.dtype)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


# Entries.


@every
def test_dense(name, matrix, structure):
    """Of one batch, and of three with different sizes."""
    truth = expected(name, matrix, structure)
    for found in several(name, matrix, structure):
        assert found.shape == truth.shape
        assert found.dtype == torch.float64
        assert close(found.dense(), truth, TOLERANCE)


@every
def test_product(name, matrix, structure):
    """With one vector, several, and a dict by name."""
    truth, dense = expected(name, matrix, structure), network(name)
    found = operator(name, matrix, structure)
    v, m = randn(len(truth)), randn(len(truth), 3)
    assert close(found @ v, truth @ v, TOLERANCE)
    assert close(found @ m, truth @ m, TOLERANCE)
    named = found @ dense.named(v)
    assert list(named) == list(dense.parameters)
    assert all(named[k].shape == p.shape for k, p in dense.parameters.items())
    assert close(dense.flat(named), truth @ v, TOLERANCE)
    for one in several(name, matrix, structure):
        assert close(one @ m, truth @ m, TOLERANCE)


@every
def test_diagonal_trace_and_norm(name, matrix, structure):
    found, truth = operator(name, matrix, structure), expected(name, matrix, structure)
    assert close(found.diagonal(), truth.diagonal(), TOLERANCE)
    assert float(found.trace()) == pytest.approx(float(truth.trace()), rel=TOLERANCE)
    assert float(found.norm()) == pytest.approx(float(truth.norm()), rel=TOLERANCE)
    for number in (found.trace(), found.norm()):
        assert number.standard_error == 0.0
        assert number.method.startswith("exact")


# Spectra.


@pytest.mark.parametrize("smallest", [False, True], ids=["largest", "smallest"])
@every
def test_eigenvalues(name, matrix, structure, smallest):
    k = 4
    found = operator(name, matrix, structure).eigenvalues(k, smallest=smallest, by=ACCURATE)
    truth, values = expected(name, matrix, structure), spectrum(name, matrix, structure)
    scale = float(values.abs().max())
    assert found.converged
    torch.testing.assert_close(
        found.values, values[-k:] if smallest else values[:k], rtol=0, atol=TOLERANCE * scale
    )
    v = found.vectors
    assert close(v.T @ v, torch.eye(k, dtype=v.dtype), TOLERANCE)
    residuals = (truth @ v - v * found.values).norm(dim=0) / scale
    assert float(residuals.max()) <= TOLERANCE
    assert float((residuals - found.residuals).abs().max()) <= TOLERANCE


@every
def test_exact_eigenvalues(name, matrix, structure):
    """Some matrices leave out zeros."""
    check_eigenvalues(operator(name, matrix, structure), spectrum(name, matrix, structure))


@pytest.mark.parametrize("matrix", ["G", "C"])
@networks
def test_exact_eigenvalues_of_several_batches(name, matrix):
    """From a Gram matrix with blocks between them."""
    check_eigenvalues(operator(name, matrix, "none", cut=True), spectrum(name, matrix, "none"))


def check_eigenvalues(matrix, values):
    found = matrix.exact_eigenvalues()
    assert len(found) <= len(values)
    assert (found.diff() <= 0).all()
    padded = torch.cat([found, found.new_zeros(len(values) - len(found))]).sort(descending=True)
    assert float((padded.values - values).abs().max()) <= TOLERANCE * float(values.abs().max())


@every
def test_logdet(name, matrix, structure):
    which = name, matrix, structure
    found = operator(*which).logdet(damping=damping_of(*which))
    truth = float(torch.linalg.slogdet(damped(*which)).logabsdet)
    assert float(found) == pytest.approx(truth, rel=TOLERANCE, abs=TOLERANCE * network(name).size)
    assert found.standard_error == 0.0


# Functions.


@every
def test_solve(name, matrix, structure):
    which = name, matrix, structure
    found, damping, dense = operator(*which), damping_of(*which), network(name)
    v, m = randn(dense.size), randn(dense.size, 2)
    assert close(damped(*which) @ found.solve(v, damping), v, TOLERANCE)
    assert close(damped(*which) @ found.solve(m, damping), m, TOLERANCE)
    named = found.solve(dense.named(v), damping)
    assert close(damped(*which) @ dense.flat(named), v, TOLERANCE)


@pytest.mark.parametrize("exponent", [0.5, -0.5])
@every
def test_power(name, matrix, structure, exponent):
    which = name, matrix, structure
    values, basis = torch.linalg.eigh(damped(*which))
    v = randn(len(values))
    truth = basis @ (values**exponent * (basis.T @ v))
    assert close(operator(*which).power(v, exponent, damping_of(*which)), truth, TOLERANCE)


@pytest.mark.pairs
@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != "none"])
@matrices
@networks
def test_structures_precondition_conjugate_gradients(name, matrix, structure):
    """A damped structure is positive definite, as a preconditioner must be."""
    whole, v = (name, matrix, "none"), randn(network(name).size)
    damping = max(damping_of(*whole), damping_of(name, matrix, structure))
    preconditioner = operator(name, matrix, structure)
    found = operator(*whole).cg(v, damping, preconditioner=preconditioner)
    truth = expected(*whole) + damping * torch.eye(len(v), dtype=v.dtype)
    assert found.converged
    assert close(truth @ found.x, v, TOLERANCE)


# Parts and wholes.


@every
def test_layers(name, matrix, structure):
    """The block of each layer, over its weight as a matrix with the bias last."""
    dense = network(name)
    blocks = dense.blocks(expected(name, matrix, structure))
    found = operator(name, matrix, structure).layers()
    assert list(found) == list(blocks)
    for layer, truth in blocks.items():
        assert found[layer].shape == truth.shape
        v = randn(len(truth), 2)
        scale = float(truth.norm()) + 1e-6
        assert float((found[layer] @ v - truth @ v).norm()) <= TOLERANCE * scale * float(v.norm())
        assert float((found[layer].dense() - truth).norm()) <= TOLERANCE * scale
        assert float(found[layer].trace()) == pytest.approx(
            float(truth.trace()), abs=TOLERANCE * scale
        )
        assert found[layer].definite == (matrix != "H")


@every
def test_scipy(name, matrix, structure):
    found, truth = operator(name, matrix, structure).to_scipy(), expected(name, matrix, structure)
    assert found.shape == truth.shape
    assert found.dtype == np.float64
    v, m = randn(len(truth)), randn(len(truth), 2)
    for given in (v, v[:, None], m):
        product = found @ given.numpy()
        assert product.shape == given.shape
        assert close(torch.as_tensor(product), truth @ given, TOLERANCE)
    assert close(torch.as_tensor(found.T @ v.numpy()), truth @ v, TOLERANCE)
    top = scipy.sparse.linalg.eigsh(found, k=1, which="LA", return_eigenvectors=False)
    largest = float(spectrum(name, matrix, structure)[0])
    assert float(top[0]) == pytest.approx(largest, rel=TOLERANCE)


@every
def test_sums_and_multiples(name, matrix, structure):
    """With the matrix of another kind, full where this one is structured."""
    other = "C" if matrix != "C" else "G"
    one, two = operator(name, matrix, structure), operator(name, other, "none")
    a, b = expected(name, matrix, structure), expected(name, other, "none")
    v = randn(len(a), 2)
    for found, truth in (
        (one + two, a + b),
        (one - two, a - b),
        (2.5 * one, 2.5 * a),
        (one * 2.5, 2.5 * a),
        (one - 0.5 * two + one, 2 * a - 0.5 * b),
    ):
        assert found.shape == truth.shape
        assert close(found @ v, truth @ v, TOLERANCE)
    named = (one + two) @ network(name).named(v[:, 0])
    assert close(network(name).flat(named), (a + b) @ v[:, 0], TOLERANCE)


@matrices
@structures
def test_all_operations_of_a_difference(matrix, structure):
    which, other = ("mlp", matrix, structure), ("mlp", "C" if matrix != "C" else "G", "none")
    found, truth = (
        operator(*which) - 0.5 * operator(*other),
        expected(*which) - 0.5 * expected(*other),
    )
    values = torch.linalg.eigvalsh(truth).flip(0)
    damping = 0.3 - float(values[-1])
    v, damped = randn(len(truth)), truth + damping * torch.eye(len(truth), dtype=truth.dtype)
    assert close(found.dense(), truth, TOLERANCE)
    assert close(found.diagonal(), truth.diagonal(), TOLERANCE)
    assert float(found.trace()) == pytest.approx(float(truth.trace()), rel=TOLERANCE)
    assert float(found.norm()) == pytest.approx(float(truth.norm()), rel=TOLERANCE)
    assert close(found.eigenvalues(2, by=ACCURATE).values, values[:2], TOLERANCE)
    assert close(found.exact_eigenvalues(), values, TOLERANCE)
    assert close(damped @ found.solve(v, damping), v, TOLERANCE)
    assert close(found.power(found.power(v, 0.5, damping), 0.5, damping), damped @ v, TOLERANCE)
    assert float(found.logdet(damping)) == pytest.approx(float(damped.logdet()), rel=TOLERANCE)
    blocks = network("mlp").blocks(truth)
    assert list(found.layers()) == list(blocks)
    assert all(close(found.layers()[k].dense(), b, TOLERANCE) for k, b in blocks.items())


# What the matrices are to each other.


@networks
def test_loss_and_gradients(name):
    """Of the mean loss over all data, however they are cut."""
    dense = network(name)
    (x,), y = dense.inputs, dense.targets
    for data in ((x, y), uneven(x, y), uneven(x, y, (5, 1))):
        problem = ops.Problem(dense.model, loss_of(name), data)
        assert problem.samples == SAMPLES
        assert problem.weight == y.numel()
        assert problem.value() == pytest.approx(float(dense.loss(dense.theta)), rel=1e-12)
        assert close(problem.gradient(), dense.gradient, 1e-12)
        assert close(torch.cat(list(problem.sample_gradients())), dense.sample_gradients, 1e-12)
        assert close(dense.sample_gradients.mean(0), dense.gradient, 1e-12)


@networks
def test_fisher_is_ggn(name):
    """Of the softmax, to rounding, in every structure."""
    for structure in STRUCTURES:
        one, two = operator(name, "G", structure).dense(), operator(name, "F", structure).dense()
        assert close(one, two, 1e-14)


def test_ggn_is_the_expectation_over_drawn_targets():
    dense = network("mlp")
    assert close(dense.G, dense.drawn, 1e-14)
    assert close(operator("mlp", "F", "none").dense(), dense.drawn, 1e-14)


def test_diagonal_blocks_of_the_hessian():
    """Those of the GGN where the network is piecewise linear, and only the blocks are."""
    h, g = (operator("cnn", m, "full").dense() for m in "HG")
    assert close(h, g, 1e-13)
    h, g = (operator("cnn", m, "none").dense() for m in "HG")
    assert not close(h, g, 0.5)
    h, g = (operator("mlp", m, "full").dense() for m in "HG")  # with tanh
    assert not close(h, g, 0.1)


@pytest.mark.parametrize("structure", ["expand", "reduce", "ekfac", "unit-wise", "diagonal"])
def test_structures_of_the_hessian_of_a_piecewise_linear_network(structure):
    h, g = (operator("cnn", m, structure).dense() for m in "HG")
    assert close(h, g, 1e-12)
    h, g = (operator("mlp", m, structure).dense() for m in "HG")
    assert not close(h, g, 0.1)
