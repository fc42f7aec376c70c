"""NNGeometry and natgrad give the same Fisher matrix: dense, by layer, diagonal, K-FAC and EKFAC.

NNGeometry makes tensors of torch's default type, so it works in float64 where that is the default;
one test is in float32, as its users have it. It keeps the bias inside of A and moves a factor of
`√(C-1)` from one Kronecker factor to the other, so products are compared and factors are not. Each
matrix is first compared with dense autograd: when the first assertion of a test fails it is theirs.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import natgrad
from oracles import close
from peers import dense
from peers.problems import (
    CLASSES,
    CONV,
    MLP,
    NORM,
    REGRESSION,
    RELU,
    Problem,
    default_dtype,
    vectors,
)

pytest.importorskip("nngeometry", reason="NNGeometry is not installed")
spaces = pytest.importorskip("nngeometry.object")
metrics = pytest.importorskip("nngeometry.metrics")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

ALL = [MLP, RELU, REGRESSION, CONV, NORM]
KRONECKER = [MLP, REGRESSION, CONV]


class Theirs:
    """The Fisher matrix in one of their representations, with the scale of the mean loss."""

    def __init__(self, kind: type, problem: Problem, dtype: torch.dtype) -> None:
        # A Gaussian of variance 1 there; torch's square loss is 2/D times its log-likelihood.
        self.scale = 2 / CLASSES if problem.regression else 1.0
        variant = "regression" if problem.regression else "classif_logits"
        self.dtype = dtype
        with default_dtype(dtype):
            loader = problem.loader(dtype)
            self.matrix = metrics.FIM(problem.model(dtype), loader, kind, variant=variant)
            if kind is spaces.PMatEKFAC:  # until then it is K-FAC
                self.matrix.update_diag(loader)

    def dense(self) -> Tensor:
        with default_dtype(self.dtype):
            found: Tensor = self.scale * self.matrix.to_torch().detach()
        return found

    def __matmul__(self, v: Tensor) -> Tensor:
        """`[P, k] -> [P, k]`."""
        layers = self.matrix.generator.layer_collection
        columns = [spaces.PVector(layers, vector_repr=column) for column in v.T.contiguous()]
        with default_dtype(self.dtype):
            products = [self.matrix.mv(column).to_torch().detach() for column in columns]
        return self.scale * torch.stack(products, 1)

    def trace(self) -> float:
        with default_dtype(self.dtype):
            return float(self.scale * self.matrix.trace())


def agree(
    problem: Problem,
    kind: type,
    exact: Tensor,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> None:
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    theirs = Theirs(kind, problem, dtype)
    found = natgrad.fisher(problem.model(dtype), problem.loss, problem.batches(dtype), **options)
    v = vectors(len(exact), dtype=dtype)
    assert close(theirs.dense().double(), exact, tolerance), "NNGeometry is not what autograd gives"
    assert close(found.dense(), theirs.dense(), tolerance)
    assert close(found @ v, theirs @ v, tolerance)
    assert found.trace() == pytest.approx(theirs.trace(), rel=10 * tolerance)


def truth(problem: Problem) -> Tensor:
    return dense.ggn(problem.model(), problem.loss, *problem.whole())


def layer_wise(problem: Problem) -> Tensor:
    exact, sizes = truth(problem), []
    for module in problem.model():
        sizes += [n for n in [sum(p.numel() for p in module.parameters())] if n]
    return exact * torch.block_diag(*(torch.ones(n, n, dtype=exact.dtype) for n in sizes))


def kronecker(problem: Problem, block: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return dense.layer_blocks(problem.model(), problem.loss, *problem.whole(), block)


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_dense(problem):
    agree(problem, spaces.PMatDense, truth(problem))


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_layer_wise(problem):
    agree(problem, spaces.PMatBlockDiag, layer_wise(problem), structure=natgrad.Full())


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_diagonal(problem):
    exact = torch.diag(truth(problem).diagonal())
    agree(problem, spaces.PMatDiag, exact, structure=natgrad.Diagonal())


@pytest.mark.parametrize("problem", KRONECKER, ids=str)
def test_kfac(problem):
    exact = kronecker(problem, dense.kfac_expand)
    agree(problem, spaces.PMatKFAC, exact, structure=natgrad.Kronecker())


@pytest.mark.parametrize("problem", KRONECKER, ids=str)
def test_ekfac(problem):
    exact = kronecker(problem, dense.ekfac)
    agree(problem, spaces.PMatEKFAC, exact, structure=natgrad.EKFAC())


def test_in_single_precision():
    agree(CONV, spaces.PMatDense, truth(CONV), torch.float32)
    exact = kronecker(CONV, dense.kfac_expand)
    agree(CONV, spaces.PMatKFAC, exact, torch.float32, structure=natgrad.Kronecker())


@pytest.mark.parametrize("problem", [MLP, CONV], ids=str)
def test_products_without_a_matrix(problem):
    """PMatImplicit multiplies without ever making the matrix."""
    theirs = Theirs(spaces.PMatImplicit, problem, torch.float64)
    v = vectors(len(truth(problem)))
    assert close(theirs @ v, truth(problem) @ v), "NNGeometry is not what autograd gives"
    found = natgrad.fisher(problem.model(), problem.loss, problem.batches())
    assert close(found @ v, theirs @ v)
    assert found.trace() == pytest.approx(theirs.trace(), rel=1e-10)
