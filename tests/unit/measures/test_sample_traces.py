"""Traces with gradients of samples against dense matrices, and estimates within their own error."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.measures import Signs, Subset
from natgrad.measures.sample_traces import sample_trace, signed_sums
from natgrad.operators import Problem
from unit.measures.brute_force import Brute, batches, classified, network, refuses


def case(n=12, widths=(4, 3, 3)):
    x, y = classified(n, widths[0], widths[-1])
    model = network(*widths)
    problem = Problem(model, F.cross_entropy, batches(x, y, 5, n - 5))
    matrix = torch.randn(problem.space.size, problem.space.size, dtype=torch.float64)
    return Brute(model, F.cross_entropy, x, y), problem, matrix @ matrix.T


@pytest.mark.parametrize("n", [12, 60])  # fewer and more samples than the 27 parameters
@pytest.mark.parametrize("centered", [False, True])
def test_exact(n, centered):
    brute, problem, matrix = case(n)
    center = brute.gradient() if centered else None
    moment = brute.covariance() if centered else brute.second_moment()
    found = sample_trace(problem, matrix.matmul, None, center)
    torch.testing.assert_close(float(found), float((matrix @ moment).trace()), rtol=1e-10, atol=0)
    assert found.standard_error == 0
    assert found.method.startswith("exact")
    assert found.products == min(n, 27)


def test_a_matrix_in_several_pieces_is_the_same(monkeypatch):
    brute, problem, matrix = case(60)
    monkeypatch.setattr("natgrad.measures.sample_traces._WIDE", 27 * 4)
    truth = float((matrix @ brute.second_moment()).trace())
    assert float(sample_trace(problem, matrix.matmul)) == pytest.approx(truth, rel=1e-10)
    _, problem, matrix = case(12)
    whole = sample_trace(problem, matrix.matmul)
    monkeypatch.undo()
    assert float(whole) == pytest.approx(float(sample_trace(problem, matrix.matmul)), rel=1e-12)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("estimator", [Signs, lambda k, seed: Subset(min(k, 11), seed)])
def test_estimates_are_unbiased_and_know_their_error(estimator, centered):
    brute, problem, matrix = case()
    center = brute.gradient() if centered else None
    truth = float(sample_trace(problem, matrix.matmul, None, center))
    found = [sample_trace(problem, matrix.matmul, estimator(6, s), center) for s in range(150)]
    values = torch.tensor([float(one) for one in found])
    errors = torch.tensor([one.standard_error for one in found])
    spread = float(values.std())
    assert abs(float(values.mean()) - truth) < 4 * spread / 150**0.5
    assert float(errors.square().mean().sqrt()) == pytest.approx(spread, rel=0.25)


def test_signed_sums_are_sums_of_all_gradients_with_signs(monkeypatch):
    brute, problem, _ = case()
    monkeypatch.setattr("natgrad.measures.sample_traces._PASSES", 3)
    sums = signed_sums(problem, Signs(7)) * 12**0.5
    signs = torch.linalg.lstsq(brute.rows().T, sums.T).solution  # 12 rows are independent
    torch.testing.assert_close(signs.abs(), torch.ones(12, 7, dtype=torch.float64))
    assert len({tuple(column.round().tolist()) for column in signs.T}) == 7
    g = brute.gradient()
    centered = signed_sums(problem, Signs(7), g) * 12**0.5
    torch.testing.assert_close(centered, signs.round().T @ (brute.rows() - g))


def test_a_sum_over_positions_is_one_sample():
    """Weights of samples and their number differ: ``s_n`` has the scale ``N / W``."""
    logits = torch.nn.Linear(2, 3 * 4, dtype=torch.float64)
    model = torch.nn.Sequential(logits, torch.nn.Unflatten(1, (3, 4)))
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randint(3, (6, 4))
    y[0, :3] = y[4, 1] = -100
    problem = Problem(model, F.cross_entropy, (x, y))
    eye = torch.eye(problem.space.size, dtype=torch.float64)
    counted = int((y != -100).sum())
    rows = []
    for i in range(6):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1], reduction="sum")
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]) * 6 / counted)
    truth = float(torch.stack(rows).square().sum(1).mean())
    for by in (None, Subset(6)):
        assert float(sample_trace(problem, eye.matmul, by)) == pytest.approx(truth, rel=1e-10)
    found = sample_trace(problem, eye.matmul, Signs(500))
    assert abs(float(found) - truth) < 4 * found.standard_error


def test_all_samples_as_a_subset_are_exact():
    _, problem, matrix = case()
    whole = sample_trace(problem, matrix.matmul)
    for by in (Subset(12), Subset(100)):
        found = sample_trace(problem, matrix.matmul, by)
        assert (found, found.method) == (whole, whole.method)


class TestRefusals:
    @pytest.mark.parametrize("value", [1, 2.0, True])
    def test_counts(self, value):
        must = f"is {value!r} but must be a whole number of at least 2: pass such an int."
        with refuses(f"Subset.samples {must}"):
            Subset(value)
        with refuses(f"Signs.probes {must}"):
            Signs(value)

    @pytest.mark.parametrize("kind", [Signs, Subset])
    def test_seeds(self, kind):
        with refuses(
            f"{kind.__name__}.seed is -1 but must be a whole number of at least 0: pass such an "
            "int."
        ):
            kind(4, -1)

    def test_estimators(self):
        _, problem, matrix = case()
        with refuses(
            "by is 16 but must be None for the exact trace, or an estimator: give Subset(samples) "
            "or Signs(probes)."
        ):
            sample_trace(problem, matrix.matmul, 16)

    def test_too_many_gradients(self, monkeypatch):
        _, problem, matrix = case()
        monkeypatch.setattr("natgrad.operators.requirements.LARGEST", 1000)
        with refuses(
            "The gradients of all samples has 12 x 27 entries, 0.0 GiB, above the limit of 0 GiB: "
            "give by=Signs() or by=Subset()."
        ):
            sample_trace(problem, matrix.matmul)

    def test_a_subset_of_several_processes(self, monkeypatch):
        _, problem, matrix = case()
        problem.value()  # counts samples while it is alone
        monkeypatch.setattr(problem, "comm", type("Two", (), {"size": 2, "rank": 0}))
        with refuses(
            "A subset of samples must lie in one process, but the data are spread over 2: give "
            "by=Signs(), which needs no exchange of samples."
        ):
            sample_trace(problem, matrix.matmul, Subset(4))
