"""What has no matrix, or another one than was meant, is refused in one sentence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import natgrad
from natgrad import ExactFisher, MonteCarloFisher
from natgrad.curvature import Gaussian
from natgrad.errors import SettingError
from natgrad.operators import Problem

X, Y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0])


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64)


def refused(message, function, *args, **options):
    with pytest.raises(SettingError) as error:
        function(*args, **options)
    assert str(error.value) == message


def test_weighted_targets_hidden_in_a_function():
    weights = torch.tensor([1.0, 3.0], dtype=torch.float64)
    with pytest.raises(SettingError, match="so it is no mean over samples: divide by their number"):
        Problem(linear(), lambda f, t: F.cross_entropy(f, t, weight=weights), (X, Y))
    Problem(linear(), natgrad.curvature.CrossEntropy(class_weights=weights), (X, Y))


def test_a_random_loss():
    with pytest.raises(SettingError, match="for the same outputs, so its matrices are not defined"):
        Problem(linear(), lambda f, t: f.square().mean() * torch.rand(()), (X, Y))


def test_statistics_of_the_batch():
    model = nn.Sequential(linear(), nn.BatchNorm1d(2, track_running_stats=False)).double().eval()
    refused(
        "BatchNorm1d '1' has no running statistics, so that it always mixes the samples of a "
        "batch: give it track_running_stats=True, or take a norm layer of single samples.",
        Problem,
        model,
        F.cross_entropy,
        (X, Y),
    )


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (nn.Linear(3, 2, dtype=torch.bfloat16), "bfloat16"),
        (
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, dtype=torch.float64)),
            "float32 and float64",
        ),
    ],
    ids=["half", "mixed"],
)
def test_precisions(model, kinds):
    refused(
        f"The parameters are {kinds} but must all be float32 or all float64, as matrices are added "
        "up and decomposed: call model.float() or model.double().",
        Problem,
        model,
        F.cross_entropy,
        (X, Y),
    )


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"sampler": SubsetRandomSampler(range(6))}],
    ids=["shuffle", "subset"],
)
def test_an_order_that_changes(options):
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, **options)
    problem = Problem(linear(), F.cross_entropy, loader)
    refused(
        "The data come from a DataLoader that shuffles, so that every pass would draw for other "
        "samples: give one with shuffle=False.",
        natgrad.fisher,
        problem,
        curvature=MonteCarloFisher(),
    )
    refused(
        "The data come from a DataLoader that shuffles, so that two passes would see other samples "
        "at a place: give one with shuffle=False.",
        natgrad.operators.gram_gauss_newton,
        natgrad.ggn(problem),
        0.1,
    )


def test_a_likelihood_of_another_loss():
    refused(
        "The likelihood is Gaussian(variance=1.0) but that of CrossEntropy is Categorical: leave "
        "it out.",
        natgrad.fisher,
        linear(),
        F.cross_entropy,
        (X, Y),
        curvature=ExactFisher(Gaussian()),
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"loss": F.mse_loss}, "loss"),
        ({"data": (X, Y)}, "data"),
        ({"parameters": "0.*"}, "parameters"),
    ],
)
def test_more_beside_a_problem(options, name):
    problem = Problem(linear(), F.cross_entropy, (X, Y))
    refused(
        f"{name} was given beside a Problem, which has its own: leave it out, or make another "
        "Problem.",
        natgrad.ggn,
        problem,
        **options,
    )


@pytest.mark.parametrize("structure", ["kronecker", natgrad.Kronecker, 3], ids=str)
def test_no_structure(structure):
    refused(
        f"structure is {structure!r} but must be None, a structure such as natgrad.Kronecker(), or "
        "a function from a layer to one: give one of them.",
        natgrad.ggn,
        linear(),
        F.cross_entropy,
        (X, Y),
        structure=structure,
    )


@pytest.mark.parametrize("structure", [None, natgrad.Kronecker()], ids=str)
def test_dampings(structure):
    g = natgrad.ggn(linear(), F.cross_entropy, (X, Y), structure=structure)
    v = torch.ones(g.size, dtype=torch.float64)
    for damping in (-1.0, "a", float("nan")):
        for function in (
            lambda d: g.solve(v, d),
            lambda d: g.cg(v, d),
            lambda d: g.power(v, 0.5, d),
            g.logdet,
        ):
            with pytest.raises(
                SettingError, match=r"^damping is .* but must be finite and at least"
            ):
                function(damping)


def test_operands_that_are_none():
    g = natgrad.ggn(linear(), F.cross_entropy, (X, Y))
    for function in (lambda: g + 1, lambda: g - "a", lambda: g * "a", lambda: g * g):
        with pytest.raises(TypeError, match=r"unsupported operand|can't multiply"):
            function()
    refused(
        "The vector's part 'weight' is of type int but must be a tensor: convert it.",
        lambda: g @ {"weight": 1, "bias": torch.zeros(2)},
    )


def test_numbers_that_are_not_finite():
    x = X.clone()
    x[0, 0] = torch.nan
    with pytest.raises(
        natgrad.errors.CoverageError, match="The gradient of the model's output is not fin"
    ):
        natgrad.ggn(linear(), F.cross_entropy, (x[:1], Y[:1]), structure=natgrad.Kronecker())


class Scaled(nn.Module):
    """A parameter outside of any layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = linear(), nn.Parameter(torch.ones(2, dtype=torch.float64) * 1.5)

    def forward(self, x):
        return self.inner(x) * self.scale


def test_compiled_models_have_the_matrices_of_plain_ones():
    model = Scaled()
    compiled = torch.compile(model, backend="eager")
    plain = natgrad.ggn(model, F.cross_entropy, (X, Y))
    found = natgrad.ggn(compiled, F.cross_entropy, (X, Y))
    assert found.space.names == plain.space.names
    torch.testing.assert_close(found.dense(), plain.dense())
    with pytest.raises(natgrad.errors.CoverageError, match="Parameter 'scale' has no block"):
        natgrad.ggn(compiled, F.cross_entropy, (X, Y), structure=natgrad.Kronecker())


def test_a_tied_parameter_by_its_second_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x).relu())

    problem = Problem(Tied().double(), F.cross_entropy, (X, Y), parameters="two.weight")
    assert problem.space.names == ("one.weight",)


def test_the_gram_matrix_of_several_batches():
    """Blocks between batches, without writing the rows out."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 2)).double()
    loader = [(X[:1], Y[:1]), (X[1:4], Y[1:4]), (X[4:], Y[4:])]
    found = natgrad.ggn(model, F.cross_entropy, loader)
    whole = natgrad.ggn(model, F.cross_entropy, (X, Y))
    dense = torch.linalg.eigvalsh(whole.dense()).flip(0)[:12]
    torch.testing.assert_close(found.exact_eigenvalues(), dense, rtol=1e-9, atol=1e-12)
    assert abs(found.norm() - whole.dense().norm()) < 1e-10
