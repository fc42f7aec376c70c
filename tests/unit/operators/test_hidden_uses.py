"""Whether layers show all that a model does with its weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import CASES, losses
from dense_matrices import NETWORKS, network, ready
from natgrad import operators as ops
from natgrad.operators import Problem
from natgrad.operators.hidden_uses import unseen
from unit.operators.small_problems import classes, randn
from unit.operators.test_outer import Bare, Functional, Positions, TiedBias, Twice, indices, plain

SHARED = (
    "The gradients of {} samples cannot be told apart in Embedding 'places', which has one input "
    "for several of them, or after which the model mixes them: give it an input for every sample, "
    "leave it out with parameters=[...], or take structure=None."
)
CASES_IN_FRONT = [
    case
    for case in CASES
    # Statistics of a batch are refused before.
    if case.batched and not case.batch_axis and "untracked" not in case.name
]


def of(model, data, **options):
    return unseen(Problem(model, F.cross_entropy, data, **options))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", CASES_IN_FRONT, ids=str)
def test_all_layers_are_seen(case):
    """Tokens that stand along the axis of samples, layers that are called twice, and all others."""
    model, inputs = case.model().eval(), case.data(3)
    problem = Problem(
        model, lambda f, _: losses(case, f).mean(), (inputs, torch.zeros(3)), check=False
    )
    problem.check = True  # of what layers show, not of the loss
    assert unseen(problem) == ""


@pytest.mark.parametrize("name", NETWORKS)
def test_all_of_a_network_is_seen(name):
    dense = network(name)
    problem = Problem(dense.model, F.cross_entropy, (*dense.inputs, dense.targets), check=False)
    problem.check = True
    assert unseen(problem) == ""


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [True, False])
def test_recurrent_networks_are_seen(kind, first):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = kind(3, 2, batch_first=first), nn.Linear(2, 2)

        def forward(self, x):
            out = self.inner(x if first else x.transpose(0, 1))[0]
            return self.last(out[:, -1] if first else out[-1])

    assert of(ready(Net()), (randn(4, 3, 3), classes(4) % 2)) == ""


@pytest.mark.parametrize("build", [Bare, Twice, TiedBias])
def test_what_is_no_matter_of_it(build):
    """Other parameters, which have no layer to show them."""
    data = indices(5) if build is TiedBias else plain()
    assert of(ready(build()), data) == ""


@pytest.mark.parametrize(("n", "tokens"), [(5, 3), (3, 3), (2, 4), (4, 2)])
@pytest.mark.parametrize("leading", [False, True])
def test_an_input_that_samples_share(n, tokens, leading):
    """Also where its length is that of the batch, or a multiple of it."""
    model = ready(Positions(tokens, leading))
    assert of(model, indices(n, tokens)) == SHARED.format(n)
    x, y = indices(n, tokens)
    assert of(model, [(x[:1], y[:1]), (x, y)]) == SHARED.format(n)  # one sample shows nothing
    assert of(model, (x, y), parameters=["words.*", "last.*"]) == ""


def test_samples_that_are_mixed():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return self.inner(x) + self.inner(x).tanh().mean(0)

    assert "cannot be told apart in Linear 'inner'" in of(ready(Mixing()), plain())


def test_a_weight_without_its_layer():
    assert "more to do with the output" in of(ready(Functional()), plain())

    class Never(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return F.linear(self.first(x), self.inner.weight, self.inner.bias)

    assert "The weight of Linear 'inner'" in of(ready(Never()), plain())


def test_looked_for_once_and_only_if_wanted():
    seen = []
    model = ready(Functional())
    model.register_forward_hook(lambda *_: seen.append(1))
    problem = Problem(model, F.cross_entropy, plain())
    seen.clear()
    first = unseen(problem)
    assert first
    assert len(seen) == 1
    assert unseen(problem) == first
    assert len(seen) == 1
    assert unseen(Problem(model, F.cross_entropy, plain(), check=False)) == ""
    assert len(seen) == 1
    ops.ggn(problem)
    assert len(seen) == 1
