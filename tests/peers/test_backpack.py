"""BackPACK and natgrad give the same diagonals of G and H, gradients of samples and block products.

BackPACK sees one batch at a time; its results are weighted here by the sizes of batches. Each is
first compared with dense autograd: when the first assertion of a test fails it is theirs. Its
Kronecker factors of convolutions have another scale and are not compared.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import natgrad
from oracles import close
from peers import dense
from peers.problems import CONV, MLP, NORM, REGRESSION, RELU, SAMPLES, Problem, vectors

backpack = pytest.importorskip("backpack", reason="BackPACK is not installed")
extensions = pytest.importorskip("backpack.extensions")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

ALL = [MLP, RELU, REGRESSION, CONV, NORM]
WITHOUT_NORM = ALL[:-1]  # these of its extensions do not know BatchNorm2d


def passes(problem: Problem, extension) -> Iterator[tuple[list[nn.Parameter], float]]:
    """Parameters that carry what the extension computed, and the share of the batch, by batch."""
    # A model of its own: an extended one cannot be transformed by torch.func any more.
    model, loss = backpack.extend(problem.model()), backpack.extend(problem.loss)
    for x, y in problem.batches():
        with backpack.backpack(extension):
            loss(model(x), y).backward()
        yield list(model.parameters()), len(x) / SAMPLES


def mean(problem: Problem, extension) -> Tensor:
    """What the extension gives, flat, as the mean over samples."""
    total: Tensor = sum(
        share * torch.cat([getattr(p, extension.savefield).flatten() for p in parameters])
        for parameters, share in passes(problem, extension)
    )
    return total


def ours(make, problem: Problem, **options: object):
    return make(problem.model(), problem.loss, problem.batches(), **options)


def truth(make, problem: Problem) -> Tensor:
    return make(problem.model(), problem.loss, *problem.whole())


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_diagonal_of_the_ggn(problem):
    theirs = mean(problem, extensions.DiagGGNExact())
    assert close(theirs, truth(dense.ggn, problem).diagonal()), (
        "BackPACK is not what autograd gives"
    )
    assert close(ours(natgrad.ggn, problem).diagonal(), theirs)
    assert close(ours(natgrad.ggn, problem, structure=natgrad.Diagonal()).diagonal(), theirs)
    assert ours(natgrad.ggn, problem).trace() == pytest.approx(float(theirs.sum()), rel=1e-10)


@pytest.mark.parametrize("problem", WITHOUT_NORM, ids=str)
def test_diagonal_of_the_hessian(problem):
    theirs = mean(problem, extensions.DiagHessian())
    exact = truth(dense.hessian, problem).diagonal()
    assert close(theirs, exact), "BackPACK is not what autograd gives"
    assert close(ours(natgrad.hessian, problem).diagonal(), theirs)


@pytest.mark.parametrize("problem", ALL, ids=str)
def test_gradients_of_samples(problem):
    """BackPACK's are those of the terms of a batch's mean, so they lack its size."""
    rows = [
        torch.cat([p.grad_batch.flatten(1) for p in parameters], 1) * share * SAMPLES
        for parameters, share in passes(problem, extensions.BatchGrad())
    ]
    exact = truth(dense.sample_gradients, problem)
    assert close(torch.cat(rows), exact), "BackPACK is not what autograd gives"
    found = list(ours(natgrad.operators.Problem, problem).sample_gradients())
    assert [len(batch) for batch in found] == [len(batch) for batch in rows]
    assert close(torch.cat(found), torch.cat(rows))


@pytest.mark.parametrize("problem", WITHOUT_NORM, ids=str)
def test_products_with_the_block_of_each_parameter(problem):
    named = dict(problem.model().named_parameters())
    sizes = [p.numel() for p in named.values()]
    v = vectors(sum(sizes)).split(sizes)
    theirs = [torch.zeros_like(part) for part in v]
    for parameters, share in passes(problem, extensions.GGNMP()):
        for total, p, part in zip(theirs, parameters, v, strict=True):
            total += share * p.ggnmp(part.T.reshape(-1, *p.shape)).detach().flatten(1).T
    exact, start = truth(dense.ggn, problem), 0
    for name, size, part, expected in zip(named, sizes, v, theirs, strict=True):
        block = exact[start : start + size, start : start + size]
        assert close(expected, block @ part), f"BackPACK is not what autograd gives: {name}"
        assert close(ours(natgrad.ggn, problem, parameters=[name]) @ part, expected), name
        start += size


@pytest.mark.parametrize("problem", [MLP, REGRESSION], ids=str)
def test_kfac_of_linear_layers(problem):
    """KFLR keeps weights and biases apart: its blocks are ours without what couples the two."""
    model, loss = backpack.extend(problem.model()), backpack.extend(problem.loss)
    x, y = problem.whole()
    with backpack.backpack(extensions.KFLR()):
        loss(model(x), y).backward()
    exact = dense.layer_blocks(problem.model(), problem.loss, x, y, dense.kfac_expand)
    found = ours(natgrad.ggn, problem, structure=natgrad.Kronecker()).dense()
    start = 0
    for name, p in model.named_parameters():
        theirs = torch.kron(*p.kflr) if len(p.kflr) == 2 else p.kflr[0]
        part = slice(start, start + p.numel())
        assert close(theirs, exact[part, part]), f"BackPACK is not what autograd gives: {name}"
        assert close(found[part, part], theirs), name
        start += p.numel()
