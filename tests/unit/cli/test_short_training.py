"""A short training, and the accuracy it aims at."""

import pytest
import torch
from torch import nn

from natgrad.cli.short_training import accuracy, train
from natgrad.curvature.losses import CrossEntropy, SquareLoss
from natgrad.operators import Problem
from unit.cli import problem as curved


def same(logits, targets, loss=None):
    """The accuracy of a model that gives back its inputs."""
    model = nn.Linear(1, 1)  # a problem needs a parameter
    model.forward = lambda x: x
    return accuracy(Problem(model, loss or CrossEntropy(), (logits, targets), check=False))


LOGITS = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0], [1.0, 0.0, 0.0], [0.0, 5.0, 0.0]])


def test_the_share_of_right_answers():
    assert same(LOGITS, torch.tensor([0, 2, 1, 1])) == 0.75
    assert same(LOGITS, torch.tensor([0, 2, -100, 0])) == pytest.approx(2 / 3)
    assert same(LOGITS, torch.full((4,), -100)) is None


def test_of_probabilities_and_of_positions():
    assert same(LOGITS, torch.eye(3)[torch.tensor([0, 2, 1, 1])]) == 0.75
    pixels = LOGITS.unsqueeze(0).mT  # [1, classes, pixels]
    assert same(pixels, torch.tensor([[0, 2, 1, 1]])) == 0.75
    tokens = LOGITS.unsqueeze(0)
    assert same(tokens, torch.tensor([[0, 2, 1, 1]]), CrossEntropy(class_axis=-1)) == 0.75


def test_what_has_no_accuracy():
    assert same(LOGITS, LOGITS, SquareLoss()) is None
    ahead = CrossEntropy(class_axis=-1, ahead=1)
    assert same(LOGITS.unsqueeze(0), torch.zeros(1, 4, dtype=torch.long), ahead) is None


@pytest.fixture
def problem():
    torch.manual_seed(0)
    return Problem(curved.scaled().eval(), CrossEntropy(), curved.separable(), progress=False)


def test_training_stops_at_the_accuracy(problem):
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    trained, steps = train(problem, 0.6)
    assert 0 < steps < 500
    assert accuracy(trained) >= 0.6
    assert accuracy(trained) > accuracy(problem)
    assert not any(module.training for module in trained.model.modules())
    for name, value in problem.model.state_dict().items():
        assert torch.equal(value, before[name])
    # Statistics of the norm are those of training.
    assert int(trained.model[1].num_batches_tracked) == steps


def test_training_stops_at_the_limit(problem):
    trained, steps = train(problem, 1.0, limit=3)
    assert steps == 3
    assert not trained.model.training


def test_all_parameters_are_trained_but_the_matrix_is_over_the_same(problem):
    some = Problem(problem.model, CrossEntropy(), curved.separable(), parameters="3.*")
    trained, _ = train(some, 1.0, limit=2)
    assert list(trained.parameters) == ["3.weight", "3.bias"]
    assert not torch.equal(trained.model[0].weight, problem.model[0].weight)
