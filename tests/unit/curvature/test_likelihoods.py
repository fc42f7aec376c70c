"""Likelihoods against the analytic output Fisher and the Hessian of torch's own losses."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.curvature.likelihoods import Bernoulli, Categorical, Gaussian

# Likelihood, shape of the output, and torch's loss of one sample's row at made-up targets.
CASES = {
    "categorical": (
        Categorical(),
        (3, 5),
        lambda f: F.cross_entropy(f[None], torch.tensor([2]), reduction="sum"),
    ),
    "categorical positions": (
        Categorical(),
        (3, 4, 2, 3),
        lambda f: F.cross_entropy(f[None], torch.ones(1, 2, 3).long(), reduction="sum"),
    ),
    "categorical last": (
        Categorical(class_axis=-1),
        (3, 2, 4),
        lambda f: F.cross_entropy(f, torch.tensor([0, 3]), reduction="sum"),
    ),
    "gaussian": (Gaussian(), (3, 2, 2), lambda f: 0.5 * (f - 1).square().sum()),
    "gaussian half": (Gaussian(0.5), (3, 4), lambda f: F.mse_loss(f, f * 0, reduction="sum")),
    "gaussian scalar": (Gaussian(), (3,), lambda f: 0.5 * (f - 1).square()),
    "bernoulli": (
        Bernoulli(),
        (3, 4),
        lambda f: F.binary_cross_entropy_with_logits(f, f * 0 + 1, reduction="sum"),
    ),
}
LIKELIHOODS = [Categorical(), Gaussian(), Bernoulli()]


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    likelihood, shape, loss = request.param
    return likelihood, 2 * torch.randn(shape, dtype=torch.float64), loss


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def outer(vectors):
    """Σ v vᵀ for each sample: vectors [n, …] to [n, d, d]."""
    flat = torch.stack([v.flatten(1) if v.dim() > 1 else v[:, None] for v in vectors])
    return torch.einsum("kni,knj->nij", flat, flat)


def hessians(output, loss):
    """∂²loss/∂f² for each sample, [n, d, d]: the output Fisher, as no target enters it."""
    d = output[0].numel()
    # Reverse over reverse: torch.func.hessian goes forward, which warns of a deprecation in torch.
    hessian = torch.func.jacrev(torch.func.jacrev(loss))
    return torch.stack([hessian(row).reshape(d, d) for row in output])


class TestExact:
    def test_is_the_hessian_of_the_loss(self, case):
        likelihood, output, loss = case
        fisher = outer(likelihood.exact(output))
        torch.testing.assert_close(fisher, hessians(output, loss), rtol=0, atol=1e-12)

    def test_categorical_formula(self):
        output = torch.randn(4, 6, dtype=torch.float64)
        p = output.softmax(1)
        expected = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        torch.testing.assert_close(outer(Categorical().exact(output)), expected, rtol=0, atol=1e-12)

    def test_bernoulli_formula(self):
        output = torch.randn(4, 6, dtype=torch.float64)
        p = output.sigmoid()
        expected = torch.diag_embed(p * (1 - p))
        torch.testing.assert_close(outer(Bernoulli().exact(output)), expected, rtol=0, atol=1e-12)

    def test_gaussian_formula(self):
        output = torch.randn(4, 6, dtype=torch.float64)
        expected = (torch.eye(6, dtype=torch.float64) / 0.3).expand(4, 6, 6)
        torch.testing.assert_close(outer(Gaussian(0.3).exact(output)), expected, rtol=0, atol=1e-12)

    def test_bernoulli_keeps_digits_at_large_logits(self):
        (v,) = Bernoulli().exact(torch.tensor([[40.0]]))
        assert v.item() == pytest.approx(torch.tensor(-20.0).exp().item(), rel=1e-5)

    def test_passes(self, case):
        likelihood, output, _ = case
        vectors = list(likelihood.exact(output))
        assert likelihood.passes(output) == len(vectors) == output[0].numel()
        assert all(v.shape == output.shape for v in vectors)

    def test_empty_batch(self, case):
        likelihood, output, _ = case
        vectors = list(likelihood.exact(output[:0]))
        assert len(vectors) == likelihood.passes(output[:0]) == likelihood.passes(output)
        assert all(v.shape == output[:0].shape for v in vectors)


class TestSample:
    def test_is_the_gradient_at_some_target(self):
        output = torch.randn(50, 5, dtype=torch.float64, requires_grad=True)
        v = Categorical().sample(output, generator())
        drawn = (output.softmax(1) - v).argmax(1)
        (expected,) = torch.autograd.grad(F.cross_entropy(output, drawn, reduction="sum"), output)
        torch.testing.assert_close(v, expected)
        assert drawn.unique().numel() > 1

        v = Bernoulli().sample(output, generator())
        drawn = (output.sigmoid() - v).detach()
        assert set(drawn.round().unique().tolist()) == {0.0, 1.0}
        loss = F.binary_cross_entropy_with_logits(output, drawn.round(), reduction="sum")
        torch.testing.assert_close(v, torch.autograd.grad(loss, output)[0])

    def test_mean_of_outer_products_converges(self, case):
        likelihood, output, loss = case
        exact, draws = hessians(output, loss), generator()
        error = {}
        for count in (400, 6400):
            mean = outer([likelihood.sample(output, draws) for _ in range(count)]) / count
            error[count] = (mean - exact).norm() / exact.norm()
        assert error[6400] < 0.15
        # Sixteen times the draws: a quarter of the error, within the noise of the error itself.
        assert error[6400] < 0.6 * error[400]

    def test_frequencies(self):
        p = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
        v = Categorical().sample(p.log().expand(100_000, 6), generator())
        frequency = (p - v).round().mean(0)
        torch.testing.assert_close(frequency, p, rtol=0, atol=0.006)
        assert (frequency[p == 0] == 0).all()

    def test_many_classes(self):
        classes = 50_000
        v = Categorical().sample(torch.zeros(200, classes), generator())
        drawn = v.argmin(1).double()
        assert abs(drawn.mean() / classes - 0.5) < 0.08
        assert drawn.min() < 0.05 * classes
        assert drawn.max() > 0.95 * classes

    def test_shape_and_layout(self, case):
        likelihood, output, _ = case
        assert likelihood.sample(output, generator()).shape == output.shape

    def test_class_axis_only_moves_the_classes(self):
        output = torch.randn(3, 7, 4)
        last = Categorical(class_axis=-1).sample(output, generator())
        first = Categorical().sample(output.movedim(-1, 1), generator())
        torch.testing.assert_close(first.movedim(1, -1), last)

    @pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda x: type(x).__name__)
    def test_reproducible_and_apart_from_the_global_generator(self, likelihood):
        output = torch.randn(6, 5)
        before = torch.get_rng_state()
        first = likelihood.sample(output, generator(1))
        again = likelihood.sample(output, generator(1))
        other = likelihood.sample(output, generator(2))
        list(likelihood.exact(output))
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_later_draws_do_not_depend_on_the_mask(self):
        output = torch.randn(6, 5)
        plain, masked = generator(), generator()
        Categorical().sample(output, plain)
        Categorical().sample(output, masked, targets=torch.full((6,), -100))
        assert torch.equal(plain.get_state(), masked.get_state())

    @pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
    def test_nan_passes_through(self, likelihood):
        output = torch.randn(3, 4)
        output[1] = torch.nan
        v = likelihood.sample(output, generator())
        assert v[1].isnan().all()
        assert v[[0, 2]].isfinite().all()

    def test_works_with_deterministic_algorithms(self):
        torch.use_deterministic_algorithms(True)
        try:
            Categorical().sample(torch.randn(3, 4), generator())
        finally:
            torch.use_deterministic_algorithms(False)


class TestIgnored:
    def test_sample(self):
        output = torch.randn(2, 5, 3)
        targets = torch.tensor([[0, -100, 1], [-100, 4, -100]])
        v = Categorical().sample(output, generator(), targets)
        counted = (v != 0).any(1)
        assert torch.equal(counted, targets != -100)
        free = Categorical().sample(output, generator())
        assert torch.equal(v.movedim(1, -1)[counted], free.movedim(1, -1)[counted])

    def test_exact(self):
        output = torch.randn(2, 3, 4, dtype=torch.float64)
        targets = torch.tensor([[7, 0, 1], [0, 7, 7]])
        likelihood = Categorical(class_axis=-1, ignore_index=7)
        fisher = outer(likelihood.exact(output, targets)).reshape(2, 3, 4, 3, 4)
        full = outer(likelihood.exact(output)).reshape(2, 3, 4, 3, 4)
        kept = (targets != 7).double()
        torch.testing.assert_close(fisher, full * kept[:, :, None, None, None])

    def test_every_position(self):
        output = torch.full((2, 3), torch.nan)
        targets = torch.full((2,), -100)
        # A padded row may hold anything; it must not poison the others.
        assert (Categorical().sample(output, generator(), targets) == 0).all()

    def test_class_probabilities_ignore_nothing(self):
        output = torch.randn(2, 3)
        mixed = output.softmax(1)
        v = Categorical().sample(output, generator(), mixed)
        assert torch.equal(v, Categorical().sample(output, generator()))

    @pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()])
    def test_other_likelihoods_count_everything(self, likelihood):
        output = torch.randn(2, 3)
        v = likelihood.sample(output, generator(), torch.full((2, 3), -100.0))
        assert torch.equal(v, likelihood.sample(output, generator()))


class TestPrecision:
    @pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda x: type(x).__name__)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_float32_or_better(self, likelihood, dtype):
        output = torch.randn(3, 4).to(dtype).requires_grad_()
        vectors = [likelihood.sample(output, generator()), *likelihood.exact(output)]
        wanted = [likelihood.sample(output.float(), generator()), *likelihood.exact(output.float())]
        assert {v.dtype for v in vectors} == {torch.float32}
        assert not any(v.requires_grad for v in vectors)
        assert all(torch.equal(v, w) for v, w in zip(vectors, wanted, strict=True))

    def test_float64_stays(self, case):
        likelihood, output, _ = case
        assert likelihood.sample(output, generator()).dtype == torch.float64
        assert next(likelihood.exact(output)).dtype == torch.float64

    @pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda x: type(x).__name__)
    def test_output_is_left_alone(self, likelihood):
        output = torch.randn(3, 4)
        before = output.clone()
        likelihood.sample(output, generator()).zero_()
        for v in likelihood.exact(output):
            v.zero_()
        assert torch.equal(output, before)
