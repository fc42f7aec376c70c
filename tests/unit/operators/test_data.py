"""Batches as loaders give them."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from natgrad.errors import SettingError
from natgrad.operators import Problem
from natgrad.operators.data import Data, read
from unit.operators.small_problems import says

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


def sizes(source):
    return [batch.samples for batch in Data(source)]


class Stream(IterableDataset):
    """Samples without a known number."""

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Loader:
    """Nothing but `__iter__`."""

    def __iter__(self):
        yield X[:4], Y[:4]
        yield X[4:], Y[4:]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ((X, Y), [6]),
        ([X, Y], [6]),
        (((X, X), Y), [6]),
        ({"inputs": X, "labels": Y}, [6]),
        ([(X, Y)], [6]),
        ([(X, Y), (X[:2], Y[:2])], [6, 2]),
        ([[X, Y], [X[:2], Y[:2]]], [6, 2]),
        (((X, Y), (X[:2], Y[:2])), [6, 2]),
        ([{"inputs": X, "labels": Y}, {"inputs": X[:1], "labels": Y[:1]}], [6, 1]),
        (DataLoader(TensorDataset(X, Y), batch_size=4), [4, 2]),
        (DataLoader(Stream(), batch_size=4), [4, 2]),
        (Loader(), [4, 2]),
    ],
    ids=[
        "tuple",
        "list",
        "tuple of inputs",
        "mapping",
        "loader of one",
        "list of tuples",
        "list of lists",
        "tuple of tuples",
        "list of mappings",
        "DataLoader",
        "streaming DataLoader",
        "iterable",
    ],
)
def test_one_batch_or_a_loader_of_them(source, expected):
    for _ in range(2):  # as often as wanted
        assert sizes(source) == expected


def test_a_single_batch_is_known_as_such():
    assert Data((X, Y)).single
    assert Data([X, Y]).single
    assert Data({"inputs": X, "labels": Y}).single
    assert not Data([(X, Y)]).single
    assert not Data([(X, Y), (X, Y)]).single
    assert not Data(DataLoader(TensorDataset(X, Y), batch_size=6)).single


def test_length():
    assert len(Data((X, Y))) == 1
    assert len(Data([(X, Y)] * 3)) == 3
    assert len(Data(DataLoader(TensorDataset(X, Y), batch_size=4))) == 2
    assert len(Data(DataLoader(Stream(), batch_size=4))) == 0  # which nobody knows
    assert len(Data(Loader())) == 0


@pytest.mark.parametrize("batched", [X, (X, X), {"x": X}, OrderedDict(x=X)], ids=str)
def test_samples_are_along_the_first_axis(batched):
    assert read((batched, Y)).samples == 6


class TestCalls:
    """How a model is called, and what is taken of its answer."""

    def test_a_tensor(self):
        assert torch.equal(read((X, Y)).call(nn.Identity()), X)

    def test_several_arguments(self):
        model = nn.Bilinear(2, 2, 3)
        assert torch.equal(read(((X, X), Y)).call(model), model(X, X))
        assert torch.equal(read(([X, X], Y)).call(model), model(X, X))

    def test_keywords(self):
        model = nn.Bilinear(2, 2, 3)
        other = X.flip(0)
        expected = model(input1=X, input2=other)
        assert not torch.equal(model(input1=other, input2=X), expected)
        assert torch.equal(read(({"input2": other, "input1": X}, Y)).call(model), expected)
        batch = read({"input2": other, "labels": Y, "input1": X})
        assert torch.equal(batch.call(model), expected)
        assert batch.targets is Y

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda x: SimpleNamespace(loss=None, logits=x),
            lambda x: {"hidden": 2 * x, "logits": x},
            lambda x: (x, 2 * x),
            lambda x: [x, None],
        ],
    )
    def test_answers(self, wrap):
        class Model(nn.Module):
            def forward(self, x):
                return wrap(x)

        assert torch.equal(read((X, Y)).call(Model()), X)

    @pytest.mark.parametrize("answer", [None, {"hidden": X}, (), SimpleNamespace(), (None, X)])
    def test_no_answer(self, answer):
        class Model(nn.Module):
            def forward(self, x):
                return answer

        says(
            SettingError,
            f"The model returned an object of type {type(answer).__name__} but must return a "
            "tensor, a tuple that starts with one, or something with .logits: wrap it in a module "
            "that does.",
            read((X, Y)).call,
            Model(),
        )


class TestMessages:
    def test_no_data(self):
        says(
            SettingError,
            "data is an object of type int but must be a batch (inputs, targets) or a loader of "
            "batches: give one of them.",
            Data,
            3,
        )
        says(
            SettingError,
            "data is an object of type TensorDataset but must be a batch (inputs, targets) or a "
            "loader of batches: give one of them.",
            Data,
            TensorDataset(X, Y),
        )

    @pytest.mark.parametrize(
        ("once", "kind"),
        [
            (iter([(X, Y)]), "list_iterator"),
            (((X, Y) for _ in range(2)), "generator"),
            (zip([X], [Y], strict=True), "zip"),
        ],
    )
    def test_what_can_be_read_only_once(self, once, kind):
        says(
            SettingError,
            f"data is a {kind}, which can be read only once, but a matrix reads its data at every "
            "product: give a list or a DataLoader.",
            Data,
            once,
        )

    @pytest.mark.parametrize("empty", [[], DataLoader(TensorDataset(X[:0], Y[:0]))])
    def test_no_batch(self, empty):
        says(
            SettingError,
            "data is empty, so there is nothing to average over: give at least one batch.",
            lambda: Problem(nn.Linear(3, 2), F.cross_entropy, empty),
        )

    @pytest.mark.parametrize("inputs", [X[:0], {}, (), torch.tensor(3.0)], ids=str)
    def test_a_batch_without_samples(self, inputs):
        says(
            SettingError,
            "A batch has no samples: the first axis of its inputs is empty, or there is no tensor "
            "in it; leave empty batches out.",
            read,
            (inputs, Y[:0]),
        )

    def test_a_mapping_without_labels(self):
        says(
            SettingError,
            "A batch is a mapping with the keys ['inputs', 'targets'] but needs 'labels' for the "
            "targets: rename that key, or give pairs (inputs, targets).",
            read,
            {"targets": Y, "inputs": X},
        )

    @pytest.mark.parametrize(("item", "kind"), [(X, "Tensor"), ((X, X, Y), "tuple"), (3, "int")])
    def test_no_pair(self, item, kind):
        says(
            SettingError,
            f"A batch is an object of type {kind} but must be a pair (inputs, targets) or a "
            "mapping with 'labels': give such batches.",
            read,
            item,
        )
