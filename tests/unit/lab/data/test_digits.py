"""scikit-learn's digits."""

import sys

import pytest
import torch

from natgrad.errors import DataError
from natgrad.lab.data import digits
from unit.lab.data.error_text import says


def test_two_parts_of_all():
    datasets = pytest.importorskip("sklearn.datasets")
    train, test = digits()
    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    held = torch.cat([train.images, test.images]).flatten(1)
    labels = torch.cat([train.labels, test.labels])
    found = datasets.load_digits()
    given = torch.tensor(found.data, dtype=torch.uint8)
    rows = {(*row.tolist(), label) for row, label in zip(held, labels.tolist(), strict=True)}
    assert rows == {
        (*row.tolist(), label) for row, label in zip(given, found.target.tolist(), strict=True)
    }
    assert torch.equal(digits().test.labels, test.labels)


def test_normalised_and_not():
    pytest.importorskip("sklearn")
    train, _ = digits()
    x, _ = train.tensors()
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    unit, _ = train.unit().tensors()
    assert float(unit.min()) == 0
    assert float(unit.max()) == 1


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    says(
        DataError,
        "The digits come with scikit-learn, which is not installed: pip install 'natgrad[demo]'.",
        digits,
    )
