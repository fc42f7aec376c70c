"""Loss, gradients and sizes of a model over data, however these are cut and called."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dense_matrices import Dense, Transformer, mlp, ready, sentences, uneven
from natgrad import Diagonal
from natgrad import operators as ops
from natgrad.curvature.losses import CrossEntropy
from natgrad.errors import CoverageError, SettingError
from natgrad.operators import Problem
from oracles import close
from unit.operators.small_problems import CASES, IGNORED, N, case, classes, known, randn, says


@pytest.mark.parametrize("name", CASES)
def test_first_derivatives(name):
    """Three batches of different sizes are one, whatever the samples weigh."""
    own = known(name)
    for problem in (own.problem(), Problem(own.model, own.loss, (own.x, own.y))):
        dense = own.dense
        assert problem.samples == N
        total = float(problem.loss.total(dense.f, own.y))
        assert problem.weight == pytest.approx(total / float(dense.loss(dense.theta)), rel=1e-12)
        assert problem.value() == pytest.approx(float(dense.loss(dense.theta)), rel=1e-12)
        assert close(problem.gradient(), dense.gradient, 1e-12)
        each = torch.cat(list(problem.sample_gradients()))
        assert close(each, dense.sample_gradients, 1e-12)
        assert close(each.mean(0), dense.gradient, 1e-12)


@pytest.mark.parametrize("name", ["ignored", "weighted", "sequence", "pixels", "square", "ahead"])
def test_the_weight_is_not_the_number_of_samples(name):
    assert case(name).problem().weight != N


def test_sizes_are_counted_once():
    own, seen = case("classes"), []
    own.model.register_forward_hook(lambda *_: seen.append(1))
    problem = Problem(own.model, own.loss, own.cut, check=False)
    assert not seen
    assert (problem.samples, problem.weight) == (N, N)
    assert len(seen) == len(own.cut)
    problem.gradient()
    assert len(seen) == 2 * len(own.cut)


def test_what_a_pass_has_counted_is_not_counted_again():
    own, seen = case("classes"), []
    own.model.register_forward_hook(lambda *_: seen.append(1))
    problem = Problem(own.model, own.loss, own.cut, check=False)
    ops.ggn(problem, structure=Diagonal())
    assert (problem.samples, problem.weight) == (N, N)
    assert len(seen) == len(own.cut)


def test_a_problem_is_made_once_for_many_matrices():
    own = case("classes")
    problem = own.problem()
    assert Problem.of(problem, None, None) is problem
    for make in (ops.hessian, ops.ggn, ops.fisher):
        assert make(problem).problem is problem


def test_the_model_is_left_as_it_was():
    own = case("classes")
    own.model[0].bias.requires_grad_(False)
    before = {k: v.clone() for k, v in own.model.state_dict().items()}
    for make in (ops.hessian, ops.ggn, ops.fisher):
        operator = make(own.model, own.loss, own.cut, parameters="*.weight")
        operator @ randn(operator.size)
        operator.diagonal()
    wanted = [name for name, p in own.model.named_parameters() if p.requires_grad]
    assert wanted == ["0.weight", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert all(torch.equal(v, before[k]) for k, v in own.model.state_dict().items())
    assert all(p.grad is None for p in own.model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own.model.modules())


def test_gradients_are_turned_on():
    own = case("classes")
    dense = own.dense
    with torch.no_grad():
        assert close(ops.hessian(own.model, own.loss, own.cut).dense(), dense.H)
        assert close(ops.ggn(own.model, own.loss, own.cut).dense(), dense.G)
        assert close(own.problem().gradient(), dense.gradient)
        assert not torch.is_grad_enabled()


class Keywords(nn.Module):
    """Called as Hugging Face's models are, and answers as they do."""

    def __init__(self):
        super().__init__()
        self.inner = ready(Transformer())

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None):
        assert attention_mask is not None
        return SimpleNamespace(loss=None, logits=self.inner(input_ids))


def test_batches_as_mappings():
    x, y = sentences(5)
    y[1, 1:] = IGNORED
    model = Keywords()
    mask = torch.ones_like(x)
    cut = [
        {"input_ids": a, "attention_mask": b, "labels": c}
        for a, b, c in zip(x.split((2, 3)), mask.split((2, 3)), y.split((2, 3)), strict=True)
    ]
    dense = Dense(model.inner, lambda f, y: F.cross_entropy(f.mT, y), (x,), y)
    loss = CrossEntropy(class_axis=-1)
    problem = Problem(model, loss, cut)
    assert problem.weight == int((y != IGNORED).sum())
    assert close(problem.gradient(), dense.gradient)
    v = randn(dense.size)
    assert close(ops.hessian(problem) @ v, dense.H @ v)
    assert close(ops.ggn(problem) @ v, dense.G @ v)
    one = ops.ggn(model, loss, cut[1])  # a mapping is one batch
    assert one.problem.samples == 3


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=7, n_positions=4, n_embd=4, n_layer=1, n_head=2, n_inner=5
    )
    model = ready(transformers.GPT2LMHeadModel(config))
    x = torch.randint(7, (3, 4))
    mean = lambda f, y: F.cross_entropy(f[:, :-1].flatten(0, 1), y[:, 1:].flatten())  # noqa: E731
    dense = Dense(model, mean, (x,), x)
    data = [{"input_ids": one, "labels": one} for one in x.split((1, 2))]
    problem = Problem(model, CrossEntropy(class_axis=-1, ahead=1), data)
    v = randn(dense.size)
    assert close(ops.hessian(problem) @ v, dense.H @ v)
    assert close(ops.ggn(problem) @ v, dense.G @ v)
    with pytest.raises(CoverageError, match=r"cannot be told apart in Embedding 'transformer.wpe'"):
        ops.ggn(problem, structure=Diagonal())
    data = [{**one, "position_ids": torch.arange(4).expand(len(one["labels"]), 4)} for one in data]
    problem = Problem(model, CrossEntropy(class_axis=-1, ahead=1), data)
    assert ops.ggn(problem)._kept_rows() is not None
    assert close(ops.ggn(problem) @ v, dense.G @ v)
    assert close(ops.ggn(problem, structure=Diagonal()).diagonal(), dense.G.diagonal())


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, a, b):
            return self.one(a).tanh() * self.two(b), None

    model, a, b, y = ready(Two()), randn(5, 3), randn(5, 4), classes(5) % 2
    plain = Dense(_First(model), F.cross_entropy, (a, b), y)
    for inputs in ((a, b), [a, b], {"b": b, "a": a}):
        operator = ops.ggn(model, F.cross_entropy, [(inputs, y)])
        assert close(operator.dense(), plain.G)


class _First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)[0]


def test_loaders():
    own = case("classes")
    loader = DataLoader(TensorDataset(own.x, own.y), batch_size=4)
    assert close(ops.hessian(own.model, own.loss, loader).dense(), own.dense.H)
    shuffled = DataLoader(TensorDataset(own.x, own.y), batch_size=4, shuffle=True)
    assert close(ops.ggn(own.model, own.loss, shuffled).dense(), own.dense.G)


def test_float32():
    own = case("classes")
    model, x = mlp().float(), own.x.float()
    model.load_state_dict(own.model.state_dict())
    for make, truth in ((ops.hessian, own.dense.H), (ops.ggn, own.dense.G)):
        for data in ((x, own.y), uneven(x, own.y)):
            operator = make(model, own.loss, data)
            assert operator.dtype == torch.float32
            found = operator @ torch.ones(operator.size)
            assert found.dtype == torch.float32
            assert close(found.double(), truth.sum(1), 1e-5)
            assert (operator @ torch.ones(operator.size).double()).dtype == torch.float32
            solved = operator.solve(torch.ones(operator.size), damping=3.0)
            damped = truth + 3 * torch.eye(len(truth))
            assert close(damped @ solved.double(), torch.ones(len(truth)).double(), 1e-4)
    problem = Problem(model, own.loss, uneven(x, own.y))
    assert close(problem.gradient().double(), own.dense.gradient, 1e-5)


class TestMessages:
    def test_samples_in_another_axis(self):
        class Turned(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(3, 2)

            def forward(self, x):
                return self.inner(x).mT

        says(
            SettingError,
            "The model returned a tensor of shape [2, 5] for 5 samples but its first axis must be "
            "theirs: return one row for each sample.",
            Problem,
            Turned(),
            F.cross_entropy,
            (torch.zeros(5, 3), classes(5)),
        )

    def test_a_single_number(self):
        class Loss(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(3, 2)

            def forward(self, x):
                return self.inner(x).sum()

        says(
            SettingError,
            "The model returned a tensor of shape [] for 5 samples but its first axis must be "
            "theirs: return one row for each sample.",
            Problem,
            Loss(),
            F.cross_entropy,
            (torch.zeros(5, 3), classes(5)),
        )

    def test_parameters_that_take_no_part(self):
        model = nn.Sequential(nn.Linear(3, 2))
        model.spare = nn.Linear(2, 2)
        model.forward = lambda x: model[0](x)
        message = (
            "The model's output depends on none of the 2 chosen parameters, such as "
            "'spare.weight', so there is no matrix: choose others, or let gradients through in the "
            "model."
        )
        data = torch.zeros(5, 3), classes(5) % 2
        problem = Problem(model, F.cross_entropy, data, parameters="spare.*")
        says(SettingError, message, problem.gradient)
        says(SettingError, message, lambda: ops.hessian(problem).trace())
        says(SettingError, message, lambda: ops.ggn(problem).trace())
        operator = ops.hessian(model, F.cross_entropy, data)  # beside others they are zeros
        assert (operator.dense()[-6:] == 0).all()
