"""Losses against torch's own, and their output curvature against autograd's Hessian in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.curvature.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Loss,
    OwnLoss,
    SquareLoss,
    as_loss,
)

WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.3], dtype=torch.float64)
CLASSES = 4
# Output shapes with four classes, and the axis these are on.
LAYOUTS = {
    "classes": ((5, 4), 1),
    "sequence": ((4, 4, 3), 1),
    "pixels": ((3, 4, 2, 2), 1),
    "classes last": ((4, 3, 4), -1),
    "pixels last": ((3, 2, 2, 4), 3),
}
OPTIONS = {
    "plain": {},
    "weighted": {"class_weights": WEIGHTS},
    "smooth": {"label_smoothing": 0.2},
    "weighted smooth": {"class_weights": WEIGHTS, "label_smoothing": 0.2},
}
KINDS = ("indices", "ignored", "probabilities")


def noise(*shape):
    return torch.randn(shape, dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw_targets(shape, axis, kind, ignore_index=-100):
    """Class indices, of which some do not count, or probabilities that need not sum to one."""
    if kind == "probabilities":
        return torch.rand(shape, dtype=torch.float64)
    positions = list(shape)
    del positions[axis]
    target = torch.randint(CLASSES, positions)
    if kind == "ignored":
        target[torch.rand(positions) < 0.3] = ignore_index
    return target


def asymmetric(output, target):
    """A loss of one's own: a sample's log-cosh, with a coupling of its outputs."""
    rows = (output - target).flatten(1)
    return (rows.cosh().log().sum(1) + rows.sum(1).square()).mean()


def asymmetric_hessian(output, target):
    rows = (output - target).flatten(1)
    return torch.diag_embed(rows.cosh().pow(-2)) + 2


def flat_softmax(output, target):
    return F.cross_entropy(output.flatten(1), target)


def flat_softmax_hessian(output, target):
    p = output.flatten(1).softmax(1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def cases():
    """Names with functions that make (loss, output, target)."""

    def cross_entropy(shape, axis, kind, options):
        loss = CrossEntropy(class_axis=axis, **options)
        return loss, 2 * noise(*shape), draw_targets(shape, axis, kind, loss.ignore_index)

    def ahead(k, kind, shape=(3, 4, 4)):
        loss = CrossEntropy(class_axis=-1, class_weights=WEIGHTS, label_smoothing=0.1, ahead=k)
        return loss, noise(*shape), draw_targets(shape, -1, kind)

    def binary(pos_weight, weight):
        return BinaryCrossEntropy(pos_weight, weight), 2 * noise(5, 3), noise(5, 3).sigmoid()

    table = {}
    for layout, (shape, axis) in LAYOUTS.items():
        for kind in KINDS:
            # All options where they are cheap, and all together everywhere.
            names = OPTIONS if layout == "classes" else ["weighted smooth"]
            for name, options in ((name, OPTIONS[name]) for name in names):
                table[f"{layout}, {kind}, {name}"] = functools.partial(
                    cross_entropy, shape, axis, kind, options
                )
    table["a class that is ignored"] = functools.partial(
        cross_entropy, (5, 4), 1, "ignored", {**OPTIONS["weighted smooth"], "ignore_index": 1}
    )
    for kind in KINDS:
        table[f"ahead, {kind}"] = functools.partial(ahead, 1, kind)
    table["two ahead"] = functools.partial(ahead, 2, "ignored")
    table["ahead, pixels"] = functools.partial(ahead, 1, "ignored", (2, 3, 2, 4))
    table["square"] = lambda: (SquareLoss(), noise(5, 2, 2), noise(5, 2, 2))
    table["square, one number"] = lambda: (SquareLoss(), noise(5), noise(5))
    table["binary"] = functools.partial(binary, None, None)
    table["binary, positive"] = functools.partial(binary, torch.tensor([0.5, 3.0, 0.0]), None)
    table["binary, weighted"] = functools.partial(binary, None, torch.tensor(3.0))
    table["binary, both"] = functools.partial(
        binary, torch.tensor([0.5, 3.0, 1.0]), torch.tensor([2.0, 0.0, 1.5])
    )
    table["own"] = lambda: (OwnLoss(asymmetric, asymmetric_hessian), noise(5, 3), noise(5, 3))
    table["own, singular"] = lambda: (
        OwnLoss(flat_softmax, flat_softmax_hessian),
        noise(5, 2, 2),
        torch.randint(4, (5,)),
    )
    return table


CASES = cases()


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    torch.manual_seed(7)
    return request.param()


def torch_mean(loss, output, target):
    """The same loss, by a direct call of torch's function."""
    if isinstance(loss, SquareLoss):
        return F.mse_loss(output, target)
    if isinstance(loss, BinaryCrossEntropy):
        return F.binary_cross_entropy_with_logits(
            output, target, weight=loss.entry_weight, pos_weight=loss.pos_weight
        )
    if isinstance(loss, OwnLoss):
        return loss.function(output, target)
    if loss.ahead:
        output, target = output[:, : -loss.ahead], target[:, loss.ahead :]
    probabilities = target.is_floating_point()
    return F.cross_entropy(
        output.movedim(loss.class_axis, 1),
        target.movedim(loss.class_axis, 1) if probabilities else target,
        weight=loss.class_weights,
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
    )


def rows(v):
    """[n, …] to [n, D]."""
    return v.reshape(v.shape[0], -1)


def outer(vectors):
    """Σ v vᵀ for each sample: vectors [k, n, …] to [n, D, D]."""
    flat = vectors.reshape(*vectors.shape[:2], -1)
    return torch.einsum("kni,knj->nij", flat, flat)


def hessian(loss, output, target):
    """Λ as [n, D, n, D], between samples too."""
    n, D = output.shape[0], output[0].numel()
    # Reverse over reverse: torch.func.hessian goes forward, which warns of a deprecation in torch.
    twice = torch.func.jacrev(torch.func.jacrev(lambda f: loss.total(f, target)))
    return twice(output).reshape(n, D, n, D)


def blocks(loss, output, target):
    """Λ_n: [n, D, D]."""
    return torch.diagonal(hessian(loss, output, target), dim1=0, dim2=2).movedim(-1, 0)


def close(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


class TestValue:
    def test_is_that_of_torch(self, case):
        loss, output, target = case
        close(loss.value(output, target), torch_mean(*case))
        close(loss.total(output, target) / loss.weight(output, target), torch_mean(*case))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_of_all_options(self, layout, kind):
        shape, axis = LAYOUTS[layout]
        output, target = noise(*shape), draw_targets(shape, axis, kind)
        for options in OPTIONS.values():
            loss = CrossEntropy(class_axis=axis, **options)
            close(loss.value(output, target), torch_mean(loss, output, target))

    def test_gradient_is_that_of_torch(self, case):
        loss, output, target = case
        gradients = []
        for function in (loss.value, functools.partial(torch_mean, loss)):
            leaf = output.clone().requires_grad_()
            gradients.append(torch.autograd.grad(function(leaf, target), leaf)[0])
        close(*gradients)

    def test_samples_sum_to_the_total(self, case):
        loss, output, target = case
        parts = loss.sample_totals(output, target)
        assert parts.shape == output.shape[:1]
        close(parts.sum(), loss.total(output, target))
        single = torch.stack(
            [loss.total(output[i : i + 1], target[i : i + 1]) for i in range(len(output))]
        )
        close(parts, single)

    def test_unequal_batches_are_weighted(self, case):
        loss, output, target = case
        cut = [(output[:1], target[:1]), (output[1:], target[1:])]
        total = sum(loss.total(f, t) for f, t in cut)
        weight = sum(loss.weight(f, t) for f, t in cut)
        close(total / weight, torch_mean(*case))
        assert weight == pytest.approx(loss.weight(output, target), abs=1e-12)
        assert isinstance(loss.weight(output, target), float)

    def test_weights(self):
        target = torch.tensor([[0, 1, -100], [3, -100, -100]])
        output, mixed = noise(2, 4, 3), noise(2, 4, 3).softmax(1)
        weighted = CrossEntropy(class_weights=WEIGHTS)
        assert CrossEntropy().weight(output, target) == 3
        assert weighted.weight(output, target) == pytest.approx(0.5 + 2.0 + 1.3)
        assert weighted.weight(output, mixed) == CrossEntropy().weight(output, mixed) == 6
        shifted = CrossEntropy(class_axis=-1, ahead=1)
        assert shifted.weight(output.mT, target) == 1
        assert shifted.weight(output.mT, mixed.mT) == 4
        assert SquareLoss().weight(output, output) == 24
        assert BinaryCrossEntropy(WEIGHTS[:3]).weight(mixed, mixed) == 24
        assert OwnLoss(asymmetric).weight(output, output) == 2

    def test_nothing_counts(self):
        output, target = noise(2, 4), torch.full((2,), -100)
        assert CrossEntropy().total(output, target) == 0
        assert CrossEntropy().weight(output, target) == 0
        assert CrossEntropy().value(output, target).isnan()
        alone = CrossEntropy(class_axis=-1, ahead=2)
        assert alone.total(noise(3, 1, 4), torch.zeros(3, 1).long()) == 0
        assert alone.weight(noise(3, 1, 4), torch.zeros(3, 1).long()) == 0

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
    def test_any_whole_numbers_are_class_indices(self, dtype):
        output, target = noise(4, 4), torch.tensor([0, 3, 1, 2])
        loss = CrossEntropy(class_weights=WEIGHTS)
        close(loss.value(output, target.to(dtype)), loss.value(output, target))

    def test_targets_may_be_differentiated(self):
        target = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
        output = noise(3, 4)
        for loss in (CrossEntropy(), SquareLoss(), BinaryCrossEntropy()):
            (slope,) = torch.autograd.grad(loss.total(output, target), target)
            assert slope.abs().sum() > 0

    def test_per_sample_by_vmap(self):
        output = noise(5, 4)
        for loss, target in (
            (CrossEntropy(class_weights=WEIGHTS), torch.tensor([0, 3, -100, 1, 1])),
            (CrossEntropy(), output.softmax(1)),
            (BinaryCrossEntropy(), output.sigmoid()),
            (SquareLoss(), noise(5, 4)),
        ):

            def single(f, t, loss=loss):
                return loss.total(f[None], t[None])

            parts = torch.func.vmap(single)(output, target)
            close(parts, loss.sample_totals(output, target))


class TestCurvature:
    def test_roots_are_the_hessian(self, case):
        loss, output, target = case
        vectors = list(loss.roots(output, target))
        assert all(v.shape == output.shape for v in vectors)
        assert len(vectors) == loss.passes(output)
        close(outer(torch.stack(vectors)), blocks(loss, output, target))

    def test_stacked_roots_are_the_roots(self, case):
        loss, output, target = case
        stacked = loss.stacked_roots(output, target)
        assert stacked.shape == (loss.passes(output), *output.shape)
        close(stacked, torch.stack(list(loss.roots(output, target))), atol=1e-15)
        close(stacked, Loss.stacked_roots(loss, output, target), atol=1e-15)

    def test_samples_are_apart(self, case):
        loss, output, target = case
        full = hessian(loss, output, target)
        n, D = full.shape[:2]
        apart = torch.eye(n, dtype=torch.float64)[:, None, :, None]
        close(full * apart, full)
        assert full.shape == (n, D, n, D)

    def test_curve(self, case):
        loss, output, target = case
        exact = blocks(loss, output, target)
        for lead in [(), (3,), (2, 3)]:
            u = noise(*lead, *output.shape)
            flat = u.reshape(*lead, len(output), -1)
            expected = torch.einsum("nij,...nj->...ni", exact, flat)
            close(loss.curve(output, target, u), expected.reshape(u.shape))

    def test_curve_leaves_its_vector_alone(self, case):
        loss, output, target = case
        u, before = noise(2, *output.shape), output.clone()
        kept = u.clone()
        loss.curve(output, target, u)
        assert torch.equal(u, kept)
        assert torch.equal(output, before)

    def test_curve_in_vmap(self, case):
        loss, output, target = case
        u = noise(3, *output.shape)
        curve = torch.func.vmap(lambda v: loss.curve(output, target, v))
        close(curve(u), loss.curve(output, target, u))

    def test_empty_batch(self, case):
        loss, output, target = case
        f, t = output[:0], target[:0]
        assert list(loss.stacked_roots(f, t).shape) == [loss.passes(f), *f.shape]
        assert len(list(loss.roots(f, t))) == loss.passes(f)
        assert loss.sample_totals(f, t).shape == (0,)
        assert loss.curve(f, t, f[None]).shape == (1, *f.shape)
        assert loss.draw(f, t, generator()).shape == f.shape

    def test_shifted_roots_skip_what_predicts_nothing(self):
        loss = CrossEntropy(class_axis=-1, ahead=1)
        assert loss.passes(noise(2, 5, 4)) == 16
        assert loss.passes(noise(2, 1, 4)) == 0
        target = torch.zeros(2, 1).long()
        assert loss.stacked_roots(noise(2, 1, 4), target).shape == (0, 2, 1, 4)
        u = noise(3, 2, 1, 4)
        assert (loss.curve(noise(2, 1, 4), target, u) == 0).all()

    def test_binary_keeps_digits_at_large_logits(self):
        output, target = torch.tensor([[40.0]]), torch.tensor([[1.0]])
        curve = BinaryCrossEntropy().curve(output, target, torch.ones(1, 1))
        assert curve.item() == pytest.approx(torch.tensor(-40.0).exp().item(), rel=1e-5, abs=0)

    def test_rounding_does_not_make_an_own_hessian_indefinite(self):
        def rounded(output, target):
            exact = torch.ones(len(output), 3, 3, dtype=output.dtype)
            return exact - 1e-7 * torch.eye(3, dtype=output.dtype)

        output = torch.zeros(2, 3)
        roots = OwnLoss(asymmetric, rounded).stacked_roots(output, output)
        close(outer(roots), torch.ones(2, 3, 3), atol=1e-5)


class TestDraws:
    def test_mean_of_outer_products_is_the_hessian(self, case):
        loss, output, target = case
        exact, draws, count = blocks(loss, output, target), generator(3), 400
        flat = torch.stack([rows(loss.draw(output, target, draws)) for _ in range(count)])
        products = flat[:, :, :, None] * flat[:, :, None, :]
        # The error of the sum of all entries' squares, from the products' own spread.
        error = (products.mean(0) - exact).square().sum()
        expected = products.var(0).sum() / count
        assert error < 3 * expected + 1e-20

    @pytest.mark.parametrize("kind", ["indices", "probabilities"])
    def test_every_class_that_may_be_drawn(self, kind):
        torch.manual_seed(0)
        loss = CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.3)
        output, target = 0.3 * noise(1, 4), draw_targets((1, 4), 1, kind)
        many = target.expand(300, *target.shape[1:])
        v = loss.draw(output.expand(300, 4), many, generator()).unique(dim=0)
        assert len(v) == 4
        # The drawn class is the one whose logit the gradient raises.
        p = output.softmax(1)[0, v.argmin(1)]
        close(torch.einsum("k,ki,kj->ij", p, v, v), blocks(loss, output, target)[0])

    def test_every_answer_that_may_be_drawn(self):
        loss = BinaryCrossEntropy(torch.tensor([3.0]), torch.tensor([0.7]))
        output, target = noise(1, 1), torch.full((1, 1), 0.4, dtype=torch.float64)
        v = loss.draw(output.expand(100, 1), target.expand(100, 1), generator()).unique(dim=0)
        assert len(v) == 2
        p = torch.where(v < 0, output.sigmoid(), (-output).sigmoid())
        close((p * v * v).sum(), blocks(loss, output, target).sum())

    def test_every_sign_that_may_be_drawn(self):
        loss = OwnLoss(asymmetric, asymmetric_hessian)
        output, target = noise(1, 3).expand(300, 3), noise(1, 3).expand(300, 3)
        v = loss.draw(output, target, generator()).unique(dim=0)
        assert len(v) == 8
        close(v.T @ v / 8, asymmetric_hessian(output, target)[0])

    def test_targets_that_do_not_count_are_not_drawn(self):
        target = torch.tensor([[0, -100, 1], [-100, 3, -100]])
        v = CrossEntropy().draw(noise(2, 4, 3), target, generator())
        assert torch.equal((v != 0).any(1), target != -100)
        shifted = CrossEntropy(class_axis=-1, ahead=1).draw(noise(2, 3, 4), target, generator())
        counted = torch.tensor([[False, True, False], [True, False, False]])
        assert torch.equal((shifted != 0).any(2), counted)

    def test_what_does_not_count_may_be_anything(self):
        output, target = noise(2, 4), torch.tensor([7, 1])
        output[0] = torch.nan
        v = CrossEntropy(ignore_index=7, class_weights=WEIGHTS).draw(output, target, generator())
        assert (v[0] == 0).all()
        assert v[1].isfinite().all()

    def test_only_the_generator_is_advanced(self, case):
        loss, output, target = case
        before = torch.get_rng_state()
        first = loss.draw(output, target, generator(1))
        assert torch.equal(first, loss.draw(output, target, generator(1)))
        assert first.shape == output.shape
        assert torch.equal(before, torch.get_rng_state())
        source = generator(1)
        loss.draw(output, target, source)
        assert not torch.equal(source.get_state(), generator(1).get_state())


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_is_treated_in_float32(self, case, dtype):
        loss, output, target = case
        half = output.to(dtype).requires_grad_()
        full = half.detach().float()
        u = full.flip(0)[None]
        single = target.float() if target.is_floating_point() else target
        for name, extra in (
            ("total", ()),
            ("sample_totals", ()),
            ("stacked_roots", ()),
            ("curve", (u,)),
        ):
            method = getattr(loss, name)
            result = method(half, single, *extra)
            assert result.dtype == torch.float32
            assert torch.equal(result.detach(), method(full, single, *extra))
            assert result.requires_grad == name.endswith(("total", "totals"))
        for v in (loss.draw(half, single, generator()), next(loss.roots(half, single))):
            assert v.dtype == torch.float32
            assert not v.requires_grad
        assert loss.curve(half, single, u.to(dtype)).dtype == torch.float32

    def test_float64_stays(self, case):
        loss, output, target = case
        assert loss.total(output, target).dtype == torch.float64
        assert loss.stacked_roots(output, target).dtype == torch.float64
        assert loss.draw(output, target, generator()).dtype == torch.float64
        assert loss.curve(output, target, output.float()[None]).dtype == torch.float64

    def test_a_finer_vector_keeps_its_digits(self, case):
        loss, output, target = case
        assert loss.curve(output.float(), target, output).dtype == torch.float64


class TestAsLoss:
    def test_a_loss_stays(self):
        loss = CrossEntropy()
        assert as_loss(loss) is loss

    @pytest.mark.parametrize(
        "given",
        [
            nn.CrossEntropyLoss(WEIGHTS, ignore_index=2, label_smoothing=0.1),
            functools.partial(F.cross_entropy, weight=WEIGHTS, ignore_index=2, label_smoothing=0.1),
        ],
    )
    def test_cross_entropy(self, given):
        loss = as_loss(given)
        assert isinstance(loss, CrossEntropy)
        output, target = noise(6, 4), torch.tensor([0, 1, 2, 3, 2, 0])
        close(loss.value(output, target), given(output, target))

    @pytest.mark.parametrize(
        "given",
        [
            nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=2 * WEIGHTS),
            functools.partial(
                F.binary_cross_entropy_with_logits, weight=WEIGHTS, pos_weight=2 * WEIGHTS
            ),
        ],
    )
    def test_binary_cross_entropy(self, given):
        loss = as_loss(given)
        assert isinstance(loss, BinaryCrossEntropy)
        output, target = noise(6, 4), noise(6, 4).sigmoid()
        close(loss.value(output, target), given(output, target))

    def test_functions(self):
        assert isinstance(as_loss(F.cross_entropy), CrossEntropy)
        assert isinstance(as_loss(F.binary_cross_entropy_with_logits), BinaryCrossEntropy)
        assert isinstance(as_loss(F.mse_loss), SquareLoss)
        assert isinstance(as_loss(nn.MSELoss()), SquareLoss)

    def test_other_callables_are_ones_own(self):
        class Doubled(nn.MSELoss):
            def forward(self, input, target):
                return 2 * super().forward(input, target)

        output, target = noise(6, 4), noise(6, 4)
        for given in (
            Doubled(),
            nn.L1Loss(),
            lambda f, y: (f - y).abs().mean(),
            functools.partial(F.huber_loss, delta=0.5),
            functools.partial(F.mse_loss, weight=torch.ones(6, 4)),
        ):
            loss = as_loss(given)
            assert isinstance(loss, OwnLoss)
            close(loss.value(output, target), given(output, target))
            close(loss.total(output, target), 6 * given(output, target))

    def test_a_subclass_that_calculates_the_same_is_recognised(self):
        class Renamed(nn.MSELoss):
            pass

        assert isinstance(as_loss(Renamed()), SquareLoss)
