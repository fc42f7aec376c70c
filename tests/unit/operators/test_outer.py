"""G, F and C by both ways of making products, for every loss and kind of model."""

from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense_matrices import Dense, network, ready, uneven
from natgrad import EmpiricalFisher, Full, Kronecker, MonteCarloFisher
from natgrad import operators as ops
from natgrad.curvature.losses import CrossEntropy
from natgrad.errors import SettingError
from natgrad.operators import Problem, outer, vectors
from natgrad.operators.vectors import Draws
from oracles import close
from unit.operators.small_problems import CASES, N, case, classes, known, log_cosh, randn, says

WAYS = ("rows", "model", "rows, in pieces", "model, in pieces")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """How products are made; returns whether rows are kept."""
    if request.param.startswith("model"):
        monkeypatch.setattr(outer, "_EACH" if "pieces" in request.param else "_KEPT", 0)
    if request.param.endswith("in pieces"):
        monkeypatch.setattr(outer, "_MADE", 1)
        monkeypatch.setattr(vectors, "_NUMBERS", 1)
    return request.param.startswith("rows")


def check(operator, truth, tolerance=1e-12):
    v, m = randn(len(truth)), randn(len(truth), 3)
    for _ in range(2):  # what is kept is right as well
        assert close(operator @ v, truth @ v, tolerance)
        assert close(operator @ m, truth @ m, tolerance)
    assert close(operator.dense(), truth, tolerance)
    assert close(operator.diagonal(), truth.diagonal(), tolerance)
    assert float(operator.trace()) == pytest.approx(float(truth.trace()), rel=tolerance)
    assert float(operator.norm()) == pytest.approx(float(truth.norm()), rel=tolerance)
    values = torch.linalg.eigvalsh(truth).flip(0)
    found = operator.exact_eigenvalues()
    least = min(len(found), len(values))
    assert close(found[:least], values[:least], 1e-10)
    assert float(values[least:].abs().sum()) <= 1e-10 * float(values[0])


@pytest.mark.parametrize("name", CASES)
def test_losses(name, way):
    """Three batches of different sizes are one, also where the weight is not the number."""
    own = known(name)
    one, several = Problem(own.model, own.loss, (own.x, own.y)), own.problem()
    for problem in (one, several):
        g = ops.ggn(problem)
        check(g, own.dense.G)
        assert (g._kept_rows() is not None) == way
        check(ops.fisher(problem, curvature=EmpiricalFisher()), own.dense.C)
    v = randn(g.size)
    assert torch.equal(ops.fisher(several) @ v, ops.ggn(several) @ v)


def test_drawn_targets(way):
    """Both ways see the same ones, and so does a structure."""
    own = known("weighted sequence")
    problem, curvature = own.problem(), MonteCarloFisher(3, seed=1)
    truth = torch.zeros_like(own.dense.G)
    batches, jacobians = problem.batches(), own.dense.jacobian.split((1, 3, 2))
    for index, (batch, jacobian) in enumerate(zip(batches, jacobians, strict=True)):
        v = torch.cat(list(Draws(3, 1).stacks(problem.loss, problem.output(batch), batch, index)))
        rows = torch.einsum("qnd,ndp->qnp", v.flatten(2), jacobian).flatten(0, 1)
        truth += rows.T @ rows / problem.weight
    check(ops.fisher(problem, curvature=curvature), truth)
    assert not close(truth, own.dense.G, 0.1)
    blocks = ops.fisher(problem, curvature=curvature, structure=Full())
    assert close(blocks.dense(), own.dense.full(truth))


def test_drawn_targets_come_near_the_exact_matrix():
    """`E |F_n - G|² = V / n`, with the variance `V` of one draw summed over all that may be drawn.

    Logits are small, as classes that are hardly ever drawn would need far more seeds.
    """
    model, x, y = ready(nn.Linear(2, 3)), randn(N, 2), classes(N)
    with torch.no_grad():
        model.weight.mul_(0.3)
        model.bias.mul_(0.3)
    dense = Dense(model, F.cross_entropy, (x,), y)
    problem = Problem(model, F.cross_entropy, uneven(x, y))
    counts, seeds = (1, 4, 16, 64), 30
    squares = torch.stack(
        [
            torch.stack(
                [(drawn(problem, n, seed) - dense.G).square().sum() for seed in range(seeds)]
            )
            for n in counts
        ]
    )
    means, errors = squares.mean(1), squares.std(1) / seeds**0.5
    n = torch.tensor(counts).double()
    variance = variance_of_one_draw(dense)
    assert ((means - variance / n).abs() < 3 * errors).all()
    x = n.log() - n.log().mean()
    weights = x / x.square().sum()
    slope = float(weights @ means.sqrt().log())
    error = float((weights * errors / means / 2).norm())
    assert error < 0.03
    assert abs(slope + 0.5) < 3 * error


def variance_of_one_draw(dense):
    total = 0.0
    for j, f in zip(dense.jacobian, dense.f, strict=True):
        p = f.softmax(0)
        scores = (p - torch.eye(len(p), dtype=p.dtype)) @ j
        outer_products = scores[:, :, None] * scores[:, None, :]
        mean = torch.einsum("c,cij->ij", p, outer_products)
        total += float(p @ (outer_products - mean).square().sum((1, 2))) / dense.n**2
    return total


def drawn(problem, samples, seed):
    return ops.fisher(problem, curvature=MonteCarloFisher(samples, seed)).dense()


# Models.


class Twice(nn.Module):
    """A layer that is called twice, with all kinds of others."""

    def __init__(self):
        super().__init__()
        self.again, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.again(self.again(x).tanh()).tanh())


class Bare(nn.Module):
    """Parameters that belong to no layer, one of them not in the output."""

    def __init__(self):
        super().__init__()
        self.scale, self.spare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer((x * self.scale).tanh())


class Functional(nn.Module):
    """A weight that is also used without its layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return F.linear(self.layer(x).tanh(), self.layer.weight)


class Positions(nn.Module):
    """An embedding of places that all samples share, as most language models have it."""

    def __init__(self, tokens=3, leading=False):
        super().__init__()
        self.words, self.places = nn.Embedding(5, 3), nn.Embedding(tokens, 3)
        self.last = nn.Linear(3, 2)
        self.leading = leading

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1])
        places = self.places(where[None] if self.leading else where)
        return self.last((self.words(x) + places).tanh().mean(1))


class TiedBias(nn.Module):
    """A tied weight beside a bias of one of its users."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x).tanh())


def plain(n=5):
    return randn(n, 3), classes(n) % 2


def indices(*shape):
    return torch.randint(5, shape), torch.randint(2, shape[:1])


MODELS = {
    "called twice": (Twice, plain, True),
    "bare parameters": (Bare, plain, False),
    "a weight without its layer": (Functional, plain, False),
    "shared places": (Positions, lambda: indices(5, 3), False),
    "as many places as samples": (Positions, lambda: indices(3, 3), False),
    "a multiple of the samples": (lambda: Positions(4), lambda: indices(2, 4), False),
    "one row of places": (lambda: Positions(leading=True), lambda: indices(5, 3), False),
    "tied": (TiedBias, lambda: indices(5), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, way):
    """Rows are kept where layers show all of them."""
    build, data, seen = MODELS[name]
    x, y = data()
    model = ready(build())
    dense = Dense(model, F.cross_entropy, (x,), y)
    operator = ops.ggn(model, F.cross_entropy, (x, y))
    check(operator, dense.G)
    assert (operator._kept_rows() is not None) == (way and seen)
    cut = uneven(x, y, (1, len(x) - 1))
    operator = ops.fisher(model, F.cross_entropy, cut, curvature=EmpiricalFisher())
    check(operator, dense.C)
    each = torch.cat(list(operator.problem.sample_gradients()))
    assert close(each, dense.sample_gradients)


def test_fused_attention(way):
    """The default kernels know no second derivatives, so they are left for the maths."""
    dense = network("transformer")
    data = (*dense.inputs, dense.targets)
    g = ops.ggn(dense.model, CrossEntropy(class_axis=-1), data)
    v = randn(dense.size, 2)
    assert close(g @ v, dense.G @ v)


@pytest.mark.parametrize("patterns", [None, ["2.*"], ["4.bias", "2.weight"], ["*.bias"]])
def test_frozen_and_chosen_parameters(patterns, way):
    own = case("classes")
    own.model[0].weight.requires_grad_(False)

    def chosen(name):
        return patterns is None or any(fnmatchcase(name, one) for one in patterns)

    dense = Dense(own.model, own.mean, (own.x,), own.y, chosen)
    operator = ops.ggn(own.model, own.loss, own.cut, parameters=patterns)
    assert operator.space.names == tuple(dense.parameters)
    check(operator, dense.G)
    blocks = ops.ggn(operator.problem, structure=Full())
    assert close(blocks.dense(), dense.full(dense.G))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.mul_(2),
        lambda p: p.data.mul_(2),
        lambda p: setattr(p, "data", 2 * p.data),
        lambda p: p.copy_(torch.randn_like(p)),
    ],
    ids=["in place", "in place of data", "data", "copy"],
)
def test_changed_parameters_are_seen(change, way):
    own = case("classes")
    for data in ((own.x, own.y), own.cut):
        g = ops.ggn(own.model, own.loss, data)
        v = randn(g.size)
        before = g @ v
        with torch.no_grad():
            change(own.model[0].weight)
        truth = Dense(own.model, own.mean, (own.x,), own.y).G
        assert close(g @ v, truth @ v)
        assert not close(g @ v, before, 1e-3)


def test_changed_statistics_are_seen(way):
    model = ready(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    own = known("classes")
    g = ops.ggn(model, own.loss, own.cut)
    v = randn(g.size)
    g @ v
    model[1].running_mean.add_(1)
    truth = Dense(model, own.mean, (own.x,), own.y)
    assert close(g @ v, truth.G @ v)


def test_rows_of_more_samples_than_parameters():
    """Then the dense matrix is the smaller one."""
    model, x, y = ready(nn.Linear(2, 2)), randn(40, 2), classes(40) % 2
    dense = Dense(model, F.cross_entropy, (x,), y)
    g = ops.ggn(model, F.cross_entropy, uneven(x, y, (25, 15)))
    found = g.exact_eigenvalues()
    assert len(found) == 6
    assert close(found, torch.linalg.eigvalsh(dense.G).flip(0))
    assert (found >= 0).all()


def test_a_loss_of_ones_own():
    own = known("own")
    says(
        SettingError,
        "The loss log_cosh has no output_hessian, which Gauss-Newton and Fisher matrices need: "
        "pass OwnLoss(function, output_hessian), or use the Hessian.",
        lambda: ops.ggn(own.model, log_cosh, own.cut).trace(),
    )
    c = ops.fisher(own.model, log_cosh, own.cut, curvature=EmpiricalFisher())
    check(c, own.dense.C)


def test_many_classes_are_not_kept():
    """A vocabulary has more vectors a sample than a pass through the model costs."""
    model = ready(nn.Linear(2, 70))
    x, y = randn(N, 2), torch.randint(70, (N,))
    dense = Dense(model, F.cross_entropy, (x,), y)
    g = ops.ggn(model, F.cross_entropy, uneven(x, y))
    assert g._kept_rows() is None
    v = randn(g.size)
    assert close(g @ v, dense.G @ v)
    assert close(g.diagonal(), dense.G.diagonal())


def test_three_million_parameters():
    """Nothing with the square of their number is made unless asked for."""
    model = nn.Sequential(nn.Linear(1000, 3000), nn.ReLU(), nn.Linear(3000, 3))
    x, y = torch.randn(4, 1000), torch.tensor([0, 1, 2, 0])
    for make in (ops.ggn, ops.hessian):
        operator = make(model, F.cross_entropy, (x, y))
        assert operator.size == 3_012_003
        v = torch.randn(operator.size)
        assert (operator @ v).shape == v.shape
        assert operator.eigenvalues(1).converged
        kind = "GGN" if make is ops.ggn else "Hessian"
        size = f"{3_012_003**2 * 4 / 2**30:,.1f} GiB"
        says(
            SettingError,
            f"{kind} has 3,012,003 x 3,012,003 entries, {size}, above the limit of 2 GiB: "
            "use products, or a structure.",
            operator.dense,
        )
        if make is ops.hessian:
            says(
                SettingError,
                "The exact diagonal of Hessian takes 3,012,003 products, more than 65,536: use "
                "estimated_diagonal(), trace(by=Hutchinson()) or a structure.",
                operator.trace,
            )
            trace = operator.trace(by=ops.Hutchinson(samples=4))
            assert trace.standard_error > 0
        else:
            exact = operator.trace()
            assert float(exact) == pytest.approx(
                float(operator.exact_eigenvalues().sum()), rel=1e-4
            )
            assert (ops.ggn(operator.problem, structure=Kronecker()) @ v).shape == v.shape


def test_a_gram_matrix_for_each_kind_of_layer():
    """Of convolutions, attention, norm layers and embeddings, in one batch."""
    for name in ("cnn", "transformer"):
        dense = network(name)
        loss = CrossEntropy(class_axis=-1) if name == "transformer" else F.cross_entropy
        g = ops.ggn(dense.model, loss, (*dense.inputs, dense.targets))
        gram = g.gram()
        rows = torch.cat(list(g.rows()))
        assert close(gram, rows @ rows.T)
        assert close(rows.T @ rows * g.scale, dense.G)
        u = randn(len(rows), 2)
        assert close(g.combined(u), rows.T @ u)
