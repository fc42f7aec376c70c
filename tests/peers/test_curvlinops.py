"""curvlinops and natgrad give the same H, G, empirical Fisher, K-FAC and EKFAC, in float64.

Each matrix of curvlinops is first compared with dense autograd, so that a disagreement can be told:
when the first assertion of a test fails it is theirs, when only the second does it is ours.
"""

import pytest
import torch
from torch import Tensor, nn

import natgrad
from oracles import close
from peers import dense
from peers.problems import CLASSES, CONV, MLP, NORM, REGRESSION, RELU, Problem, vectors

curvlinops = pytest.importorskip("curvlinops", reason="curvlinops is not installed")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

ALL = [MLP, RELU, REGRESSION, CONV, NORM]
KRONECKER = [MLP, REGRESSION, CONV]  # it knows Linear and Conv2d
SHARING = {"expand": dense.kfac_expand, "reduce": dense.kfac_reduce}


def theirs(kind: type, problem: Problem, **options: object):
    model = problem.model()
    return kind(model, problem.loss, list(model.parameters()), problem.batches(), **options)


def ours(make, problem: Problem, **options: object):
    return make(problem.model(), problem.loss, problem.batches(), **options)


def truth(make, problem: Problem) -> Tensor:
    return make(problem.model(), problem.loss, *problem.whole())


def matrix(operator, size: int) -> Tensor:
    return operator @ torch.eye(size, dtype=torch.float64)


def agree(found, peer, exact: Tensor, scale: float = 1.0) -> None:
    """Dense and as products with one and several vectors; `scale` turns theirs into ours."""
    size = len(exact)
    v = vectors(size)
    assert close(scale * matrix(peer, size), exact), "curvlinops is not what autograd gives"
    assert close(found.dense(), scale * matrix(peer, size))
    assert close(found @ v, scale * (peer @ v))
    assert close(found @ v[:, 0], scale * (peer @ v[:, 0]))


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_hessian(problem):
    peer = theirs(curvlinops.HessianLinearOperator, problem)
    agree(ours(natgrad.hessian, problem), peer, truth(dense.hessian, problem))


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_ggn(problem):
    peer = theirs(curvlinops.GGNLinearOperator, problem)
    agree(ours(natgrad.ggn, problem), peer, truth(dense.ggn, problem))
    agree(ours(natgrad.fisher, problem), peer, truth(dense.ggn, problem))


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_empirical_fisher(problem):
    """For a square loss over `D` outputs theirs is `D` times the mean of `∇ℓ ∇ℓᵀ`."""
    peer = theirs(curvlinops.EFLinearOperator, problem)
    found = ours(natgrad.fisher, problem, curvature=natgrad.EmpiricalFisher())
    scale = 1 / CLASSES if problem.regression else 1.0
    agree(found, peer, truth(dense.empirical_fisher, problem), scale)


def test_hessian_of_each_parameter():
    """Block-diagonal, a block for each parameter."""
    model = MLP.model()
    names = dict(model.named_parameters())
    peer = theirs(curvlinops.HessianLinearOperator, MLP, block_sizes=[1] * len(names))
    sizes = [p.numel() for p in names.values()]
    v = vectors(sum(sizes))
    expected = (peer @ v).split(sizes)
    for name, part, piece in zip(names, v.split(sizes), expected, strict=True):
        block = ours(natgrad.hessian, MLP, parameters=[name])
        assert close(block @ part, piece), name


def kfac(problem: Problem, kind: type, **options: object):
    return theirs(kind, problem, fisher_type="type-2", separate_weight_and_bias=False, **options)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("problem", KRONECKER, ids=str)
def test_kfac(problem, sharing):
    exact = dense.layer_blocks(problem.model(), problem.loss, *problem.whole(), SHARING[sharing])
    peer = kfac(problem, curvlinops.KFACLinearOperator, kfac_approx=sharing)
    found = ours(natgrad.ggn, problem, structure=natgrad.Kronecker(sharing=sharing))
    agree(found, peer, exact)
    assert found.trace() == pytest.approx(float(peer.trace), rel=1e-10)
    assert found.norm() == pytest.approx(float(peer.frobenius_norm), rel=1e-10)


@pytest.mark.parametrize("problem", KRONECKER, ids=str)
def test_solving_with_kfac(problem):
    """Exact damping, `(B ⊗ A + γ)⁻¹ v`."""
    peer = kfac(problem, curvlinops.KFACLinearOperator)
    inverse = curvlinops.KFACInverseLinearOperator(peer, damping=1e-2, use_exact_damping=True)
    found = ours(natgrad.ggn, problem, structure=natgrad.Kronecker())
    v = vectors(len(dense.flat(problem.model())))
    damped = matrix(peer, len(v)) + 1e-2 * torch.eye(len(v), dtype=torch.float64)
    assert close(inverse @ v, torch.linalg.solve(damped, v)), "curvlinops does not solve its own"
    assert close(found.solve(v, damping=1e-2), inverse @ v)


@pytest.mark.parametrize("problem", KRONECKER, ids=str)
def test_ekfac(problem):
    exact = dense.layer_blocks(problem.model(), problem.loss, *problem.whole(), dense.ekfac)
    peer = kfac(problem, curvlinops.EKFACLinearOperator)
    found = ours(natgrad.ggn, problem, structure=natgrad.EKFAC())
    agree(found, peer, exact)
    assert found.trace() == pytest.approx(float(peer.trace), rel=1e-10)


def test_kfac_of_a_network_with_fixed_norm_layers():
    """Frozen parameters are outside of the space of both."""
    model, kinds = NORM.model(), (nn.Linear, nn.Conv2d)
    for module in model:
        module.requires_grad_(isinstance(module, kinds))
    trained = [p for p in model.parameters() if p.requires_grad]
    peer = curvlinops.KFACLinearOperator(
        model,
        NORM.loss,
        trained,
        NORM.batches(),
        fisher_type="type-2",
        separate_weight_and_bias=False,
    )
    found = natgrad.ggn(model, NORM.loss, NORM.batches(), structure=natgrad.Kronecker())
    size = sum(p.numel() for p in trained)
    assert close(found.dense(), matrix(peer, size))
