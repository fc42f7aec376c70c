"""Data by name, from files and from functions."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler

from natgrad.cli.datasets import WantedData, find
from natgrad.curvature.losses import BinaryCrossEntropy, CrossEntropy, SquareLoss
from natgrad.errors import SettingError
from natgrad.lab.models.by_name import NamedNetwork
from natgrad.operators import Problem
from unit.cli import problem as curved

MLP = nn.Sequential(nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))
IMAGES = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))


def wanted(samples=None, batch_size=None, seed=0, shape=None, dtype=torch.float32, device="cpu"):
    return WantedData(samples, batch_size, seed, shape, dtype, torch.device(device))


def data(name, model=MLP, loss=None, sample=None, **options):
    network = NamedNetwork("some:network", None, lambda: model, sample)
    return find(name, network, model, loss or CrossEntropy(), wanted(**options))


def test_digits_in_the_shape_that_the_model_takes():
    ((flat, labels),) = data("digits")
    assert flat.shape == (1797, 64)
    assert labels.shape == (1797,)
    assert 0 <= float(flat.min()) < float(flat.max()) == 1
    ((images, _),) = data("digits", IMAGES)
    assert images.shape == (1797, 1, 8, 8)
    assert torch.equal(images.flatten(1), flat)


def test_digits_in_the_model_s_dtype():
    ((x, _),) = data("digits", nn.Linear(64, 10).double(), dtype=torch.float64)
    assert x.dtype == torch.float64


@pytest.mark.parametrize("name", ["digits", "random"])
@pytest.mark.parametrize("loss", [CrossEntropy(), SquareLoss()], ids=["classes", "square"])
def test_data_are_where_the_model_is(name, loss):
    model = nn.Linear(64, 10, device="meta")
    ((x, y),) = data(name, model, loss, sample=(64,), device="meta")
    assert x.device.type == y.device.type == "meta"


def test_some_of_them_in_batches():
    batches = data("digits", samples=100, batch_size=30, seed=1)
    assert [len(x) for x, _ in batches] == [30, 30, 30, 10]
    chosen = torch.cat([x for x, _ in batches])
    ((everything, labels),) = data("digits")
    where = [int((everything == x).all(1).nonzero()[0]) for x in chosen]
    assert len(set(where)) == 100
    assert max(where) > 200  # not the first ones
    assert torch.equal(torch.cat([y for _, y in batches]), labels[where])
    other = torch.cat([x for x, _ in data("digits", samples=100, seed=2)])
    assert not torch.equal(chosen, other)


def test_a_model_that_takes_no_digits():
    with pytest.raises(SettingError) as error:
        data("digits", nn.Linear(5, 10))
    assert str(error.value).startswith(
        "The model takes neither images of shape [1, 8, 8] nor rows of 64 numbers, which the "
        "digits are ("
    )
    assert str(error.value).endswith("): name a model for them, such as small-cnn, or other data.")
    assert "\n" not in str(error.value)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SettingError, match=r"scikit-learn, which is not installed: pip install"):
        data("digits")


@pytest.mark.parametrize(
    ("loss", "check"),
    [
        (CrossEntropy(), lambda y: y.shape == (7,) and y.dtype == torch.int64 and y.max() < 10),
        (SquareLoss(), lambda y: y.shape == (7, 10) and y.is_floating_point()),
        (BinaryCrossEntropy(), lambda y: y.shape == (7, 10) and set(y.unique().tolist()) == {0, 1}),
    ],
    ids=["classes", "square", "binary"],
)
def test_random_targets_are_those_of_the_loss(loss, check):
    ((x, y),) = data("random", loss=loss, sample=(64,), samples=7)
    assert x.shape == (7, 64)
    assert check(y)


def test_random_pixels():
    ((_, y),) = data("random", nn.Conv2d(1, 4, 1), sample=(1, 3, 3), samples=2)
    assert y.shape == (2, 3, 3)
    assert int(y.max()) <= 3


def test_random_data_have_a_seed_and_a_size():
    ((x, _),) = data("random", sample=(64,))
    assert len(x) == 64
    assert torch.equal(x, data("random", sample=(64,))[0][0])
    assert not torch.equal(x, data("random", sample=(64,), seed=1)[0][0])
    ((x, _),) = data("random", nn.Linear(5, 2), sample=(64,), shape=(5,))
    assert x.shape == (64, 5)


def test_a_model_that_takes_other_random_inputs():
    with pytest.raises(
        SettingError, match=r"^The model does not take inputs of shape \[3\] \(.*\)"
    ):
        data("random", shape=(3,))


def test_a_model_without_one_output():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(SettingError, match="Random targets need a model that returns one tensor"):
        data("random", Pair(), shape=(3,))


def test_a_file_in_the_model_s_dtype(tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, x=np.ones((4, 64)), y=np.array([1, 2, 3, 4], dtype=np.int32))
    batches = data(str(file), batch_size=3)
    assert [x.dtype for x, _ in batches] == [torch.float32] * 2
    assert [y.tolist() for _, y in batches] == [[1, 2, 3], [4]]
    assert batches[0][1].dtype == torch.int64


def test_bytes_of_a_file_are_numbers(tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, x=np.full((4, 64), 200, dtype=np.uint8), y=np.arange(4, dtype=np.uint8))
    ((x, y),) = data(str(file), dtype=torch.float64)
    assert (x.dtype, y.dtype) == (torch.float64, torch.int64)
    assert torch.equal(x, torch.full((4, 64), 200.0, dtype=torch.float64))
    (tokens,) = data(str(file), nn.Sequential(nn.Embedding(256, 3), nn.Flatten(), MLP))
    assert tokens[0].dtype == torch.int64


def test_a_model_that_returns_no_tensor():
    class Nothing(nn.Module):
        def forward(self, x):
            return None

    with pytest.raises(
        SettingError, match=r"^The model returned an object of type NoneType but must"
    ):
        data("digits", Nothing())


def test_a_model_that_returns_logits():
    class Named(nn.Module):
        def forward(self, x):
            return {"logits": MLP(x)}

    ((x, _),) = data("digits", Named())
    assert x.shape == (1797, 64)


def test_what_a_function_returns_is_left_alone():
    found = data("unit.cli.problem:separable")
    assert isinstance(found, list)
    assert [len(x) for x, _ in found] == [len(x) for x, _ in curved.separable()]


def test_some_of_what_a_function_returns():
    batches = data("unit.cli.problem:separable", samples=24, batch_size=10, seed=1)
    assert [len(x) for x, _ in batches] == [10, 10, 4]
    x, y = (torch.cat(one) for one in zip(*batches, strict=True))
    whole, labels = (torch.cat(one) for one in zip(*curved.separable(), strict=True))
    where = [int((whole == row).all(1).nonzero()[0]) for row in x]
    assert where == sorted(set(where))
    assert torch.equal(y, labels[where])
    other = data("unit.cli.problem:separable", samples=24, seed=2)
    assert not torch.equal(other[0][0], x)
    assert [len(x) for x, _ in data("unit.cli.problem:separable", batch_size=20)] == [20, 10]
    assert [len(x) for x, _ in data("unit.cli.problem:separable", samples=99)] == [30]


@pytest.mark.parametrize("options", [{}, {"samples": 4}, {"batch_size": 4}])
def test_a_function_s_numbers_in_the_model_s_dtype(options):
    found = data("unit.cli.problem:in_another_precision", **options)
    assert {(x.dtype, y.dtype) for x, y in found} == {(torch.float32, torch.float32)}
    found = data("unit.cli.problem:separable", dtype=torch.float64, **options)
    assert {(x.dtype, y.dtype) for x, y in found} == {(torch.float64, torch.int64)}


def test_a_function_s_mappings_in_the_model_s_dtype():
    found = data("unit.cli.problem:mappings")
    assert len(found) == 2
    for _ in range(2):  # as often as asked for
        assert [x["input"].dtype for x, _ in found] == [torch.float32] * 2
    problem = Problem(nn.Linear(5, 3), CrossEntropy(), found)
    assert problem.samples == 30


def test_a_function_s_loader_still_says_that_it_shuffles():
    found = data("unit.cli.problem:shuffled")
    assert [x.dtype for x, _ in found] == [torch.float32] * 2
    assert isinstance(found.sampler, RandomSampler)


@pytest.mark.parametrize("options", [{}, {"samples": 4}, {"batch_size": 4}])
def test_nothing_from_a_function(options):
    assert data("unit.cli.problem:empty", **options) == []


def test_what_cannot_be_cut():
    with pytest.raises(SettingError) as error:
        data("unit.cli.problem:mappings", samples=3)
    assert str(error.value) == (
        "DATA 'unit.cli.problem:mappings' gives batches of dict and Tensor, but --samples and "
        "--batch-size can only cut pairs of tensors with a row for each sample: leave them out, "
        "and cut the data in the function."
    )
    with pytest.raises(SettingError) as error:
        data("unit.cli.problem:ragged", batch_size=3)
    assert str(error.value) == (
        "DATA 'unit.cli.problem:ragged' gives samples of unlike shapes, [[3], []] and [[4], []], "
        "which --samples and --batch-size cannot put together: leave them out, and cut the data "
        "in the function."
    )


def test_what_is_no_function():
    with pytest.raises(SettingError) as error:
        data("unit.cli.problem:NUMBER")
    assert str(error.value) == (
        "DATA 'unit.cli.problem:NUMBER' is of type int but must be a function that returns batches "
        "(inputs, targets): name one as module:function."
    )
    with pytest.raises(
        SettingError, match=r"^DATA 'unit\.cli\.problem:nothing' cannot be imported"
    ):
        data("unit.cli.problem:nothing")
