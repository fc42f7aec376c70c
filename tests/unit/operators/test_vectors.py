"""Output vectors whose outer products sum to the curvature of the loss."""

import pytest
import torch

from natgrad import EmpiricalFisher, ExactFisher, MonteCarloFisher
from natgrad import operators as ops
from natgrad.errors import SettingError
from natgrad.operators import vectors
from natgrad.operators.vectors import Draws, LossGradients, Roots, vectors_of
from oracles import close
from unit.operators.small_problems import CASES, N, case, known, randn, says


def shown(own, kind):
    """The loss, the output and its batch."""
    problem = ops.Problem(own.model, own.loss, (own.x, own.y))
    (batch,) = problem.batches()
    return problem, problem.output(batch), batch


def summed(stacks):
    """`Σ_q v_nq v_nqᵀ [n, D, D]`."""
    rows = torch.cat(list(stacks)).flatten(2)
    return torch.einsum("qnd,qne->nde", rows, rows)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("numbers", [1, 40, 1 << 22])
def test_exact(name, numbers, monkeypatch):
    """All at once, or some at a time."""
    monkeypatch.setattr(vectors, "_NUMBERS", numbers)
    own = known(name)
    problem, output, batch = shown(own, Roots())
    stacks = list(Roots().stacks(problem.loss, output, batch, 0))
    assert sum(map(len, stacks)) == Roots().per_sample(problem.loss, output)
    expected = own.dense.output_hessian * problem.weight
    assert close(summed(stacks), expected)
    assert Roots().scale(problem) == 1 / problem.weight
    u = randn(2, *output.shape)
    found = Roots().curve(problem.loss, output, batch, 0, u)
    assert close(found.flatten(2), torch.einsum("nde,kne->knd", expected, u.flatten(2)))


@pytest.mark.parametrize("name", CASES)
def test_empirical(name):
    own = known(name)
    problem, output, batch = shown(own, LossGradients())
    expected = own.dense.output_gradient * problem.weight
    (stack,) = LossGradients().stacks(problem.loss, output, batch, 0)
    assert len(stack) == LossGradients().per_sample(problem.loss, output) == 1
    assert close(stack[0].flatten(1), expected)
    assert LossGradients().scale(problem) == pytest.approx(N / problem.weight**2, rel=1e-12)
    u = randn(2, *output.shape)
    inner = torch.einsum("nd,knd->kn", expected, u.flatten(2))
    found = LossGradients().curve(problem.loss, output, batch, 0, u)
    assert close(found.flatten(2), inner[..., None] * expected)


@pytest.mark.parametrize("name", ["classes", "weighted sequence", "square", "binary", "own"])
def test_drawn(name, monkeypatch):
    """The same at every pass, others for every batch, seed and process; right on average."""
    own = known(name)
    problem, output, batch = shown(own, Roots())

    def drawn(samples=4, seed=0, streams=1, stream=0, index=0):
        draws = Draws(samples, seed, streams, stream)
        return torch.cat(list(draws.stacks(problem.loss, output, batch, index)))

    assert drawn().shape == (4, *output.shape)
    assert torch.equal(drawn(), drawn())
    for other in (drawn(seed=1), drawn(index=1), drawn(streams=2, stream=1)):
        assert not torch.equal(drawn(), other)
    once = drawn()
    monkeypatch.setattr(vectors, "_NUMBERS", 1)
    assert torch.equal(drawn(), once)
    u, draws = randn(2, *output.shape), Draws(4, 0)
    found = draws.curve(problem.loss, output, batch, 0, u)
    expected = torch.einsum("nde,kne->knd", summed([once]), u.flatten(2))
    assert close(found.flatten(2), expected)
    monkeypatch.undo()
    count = 1000
    rows = drawn(samples=count).flatten(2) * count**0.5
    each = rows[..., :, None] * rows[..., None, :]  # [draws, n, D, D]
    apart = each.mean(0) - own.dense.output_hessian * problem.weight
    error = each.std(0) / count**0.5
    assert (apart.abs() <= 5 * error + 1e-12).all()


def test_processes_draw_apart():
    """Batch 0 of process 1 has a stream of its own, which no batch of process 0 has."""
    own = case("classes")
    problem, output, batch = shown(own, Roots())
    seen = set()
    for stream in range(3):
        for index in range(3):
            (stack,) = Draws(8, 0, 3, stream).stacks(problem.loss, output, batch, index)
            seen.add(tuple(stack.flatten().tolist()))
    assert len(seen) == 9


def test_of_a_curvature():
    problem = case("classes").problem()
    assert vectors_of(ExactFisher(), problem) == Roots()
    assert vectors_of(EmpiricalFisher(), problem) == LossGradients()
    assert vectors_of(MonteCarloFisher(3, seed=5), problem) == Draws(3, 5, 1, 0)


@pytest.mark.parametrize("given", ["exact", None, ExactFisher], ids=repr)
def test_no_curvature(given):
    own = case("classes")
    says(
        SettingError,
        f"curvature is {given!r} but must be ExactFisher(), MonteCarloFisher(samples, seed) or "
        "EmpiricalFisher(): give one of them.",
        lambda: ops.fisher(own.model, own.loss, own.cut, curvature=given),
    )
