"""What must not change the preconditioned gradient: reduction, micro-batches, copies, terms.

It is that of the mean loss of a term, of which a sample has one or more, and the curvature is a
mean over terms, whichever way the same samples were shown.
"""

from functools import cache
from itertools import product

import pytest
import torch

from cases import MODELS, REUSED, Case, losses
from kfac_keywords import grouped
from natgrad import EKFAC, KFAC, Cholesky, Diagonal, Eigen, Full, Kronecker, MeanLoss, UnitWise
from oracles import close

CHOICES = [
    (structure, inverse)
    for structure in (
        None,
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
NETS = [*MODELS, *(case for case in REUSED if case.name in ("twice-linear-2", "tied-bias"))]
SAMPLES = 6
SIZES = [(2, 2, 2), (1, 2, 3), (1,) * 6]
TERMS = [(SAMPLES,), (1, 2, 3)]
COPIES = [(2 * SAMPLES,)]

choices = pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
nets = pytest.mark.parametrize("case", NETS, ids=str)


def gradients(
    case: Case,
    sizes=(SAMPLES,),
    *,
    copies=1,
    reduction="mean",
    scale=1.0,
    steps=2,
    **settings,
) -> dict[str, torch.Tensor]:
    """After steps on the same weights and data, shown in micro-batches of these sizes.

    The second step matters to EKFAC alone, which needs a basis before its second moments.
    Parameters without a block are left out, as theirs is the gradient of the loss.
    """
    model = case.model()
    settings = {"damping": 0.03, "update_every": 1, "refresh_every": 100, **settings}
    kfac = KFAC(model, kl_clip=None, **grouped(reduction, **settings))
    (x,) = case.data(SAMPLES)
    x = torch.cat([x] * copies)
    for _ in range(steps):
        model.zero_grad()
        for part in x.split(sizes):
            total = losses(case, model(part)).sum() * scale
            (total / len(x) if reduction == "mean" else total).backward()
        kfac.step()
    covered = {id(p) for block in kfac.blocks for p in block.parameters}
    return {k: p.grad for k, p in model.named_parameters() if id(p) in covered}


@cache
def expected_of(case: Case, structure, inverse, damping=0.03) -> dict[str, torch.Tensor]:
    """Of all samples at once, by their mean loss."""
    return gradients(case, structure=structure, inverse=inverse, damping=damping)


def in_turn(case: Case, structure, inverse, ways):
    """One of several ways to show the samples, and one of the two reductions: the next of the pairs
    on another net, as with another choice."""
    turn = NETS.index(case) + CHOICES.index((structure, inverse))
    pairs = [
        (way, ("mean", "sum")[(index + again) % 2])
        for again in range(2)
        for index, way in enumerate(ways)
    ]
    return pairs[turn % len(pairs)]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        assert close(found[name], g), name


@choices
@nets
def test_mean_and_sum(case, structure, inverse):
    chosen = {"structure": structure, "inverse": inverse}
    expected = expected_of(case, structure, inverse)
    assert_same(gradients(case, reduction="sum", **chosen), expected)
    # As a check of the check: it is not the gradient as it came.
    raw = case.model()
    losses(case, raw(*case.data(SAMPLES))).mean().backward()
    by_name = dict(raw.named_parameters())
    assert not any(close(by_name[name].grad, g, 1e-3) for name, g in expected.items())


@choices
@nets
def test_micro_batches(case, structure, inverse):
    sizes, reduction = in_turn(case, structure, inverse, SIZES)
    found = gradients(case, sizes, reduction=reduction, structure=structure, inverse=inverse)
    assert_same(found, expected_of(case, structure, inverse))


@pytest.mark.parametrize("ways", [SIZES, TERMS, COPIES], ids=["sizes", "terms", "copies"])
def test_every_way_is_everywhere(ways):
    """On each net, with each structure and inverse, and with each reduction; and so is each
    reduction."""
    for some, chosen in [([net], CHOICES) for net in NETS] + [(NETS, [one]) for one in CHOICES]:
        met = [in_turn(net, *choice, ways) for net, choice in product(some, chosen)]
        assert {way for way, _ in met} == set(ways)
        assert {reduction for _, reduction in met} == {"mean", "sum"}
    met = {in_turn(net, *choice, ways) for net, choice in product(NETS, CHOICES)}
    assert met == set(product(ways, ("mean", "sum")))


@choices
@nets
def test_copies_of_every_sample(case, structure, inverse):
    chosen = {"structure": structure, "inverse": inverse}
    sizes, reduction = in_turn(case, structure, inverse, COPIES)
    found = gradients(case, sizes, copies=2, reduction=reduction, **chosen)
    assert_same(found, expected_of(case, structure, inverse))


@choices
@nets
def test_terms_per_sample(case, structure, inverse):
    """A mean over the five terms of a sample, and their sum, with the curvature of one term:
    (F/5 + γ)⁻¹ ∇L/5 is what five times the damping makes of samples that are one term."""
    chosen = {"structure": structure, "inverse": inverse}
    expected = expected_of(case, structure, inverse, damping=5 * 0.03)
    sizes, reduction = in_turn(case, structure, inverse, TERMS)
    scale = {"mean": 1 / 5, "sum": 1.0}[reduction]
    found = gradients(case, sizes, reduction=reduction, scale=scale, terms_per_sample=5, **chosen)
    assert_same(found, expected)


@pytest.mark.parametrize("inverse", [Eigen(), Cholesky()], ids=str)
def test_terms_are_as_good_as_samples(inverse):
    """Tokens without neighbours: sequences of them, or each of them as a sample of its own."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    labels = torch.randint(6, (4, 3))
    found = []
    for inputs, terms in ((x, 3), (x.flatten(0, 1), 1)):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 6)
        ).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        kfac = KFAC(model, optimizer, inverse=inverse, kl_clip=1e-4, loss=MeanLoss(terms))
        output = model(inputs).flatten(0, -2)
        torch.nn.functional.cross_entropy(output, labels.flatten()).backward()
        kfac.step()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*found)


@pytest.mark.parametrize("structure", [Kronecker(), Kronecker("reduce"), UnitWise()], ids=str)
def test_number_of_samples_may_be_told(structure):
    """`step(samples=...)` overrides what was counted, for a model that sees them elsewhere."""
    case = MODELS[0]
    expected = gradients(case, structure=structure, steps=1)
    model = case.model()
    kfac = KFAC(
        model, kl_clip=None, damping=0.03, update_every=1, refresh_every=1, structure=structure
    )
    (x,) = case.data(SAMPLES)
    losses(case, torch.nn.Sequential(*model)(x)).mean().backward()  # around the model itself
    kfac.step(samples=SAMPLES)
    assert_same({k: p.grad for k, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (1, 5)], ids=str)
def test_a_running_average_of_equal_batches_is_one_of_them(sizes):
    case = MODELS[1]
    expected = gradients(case, steps=1)
    assert_same(gradients(case, sizes, steps=4, factor_decay=0.7, refresh_every=1), expected)
