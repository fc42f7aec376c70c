"""TensorBoard is not there, whether it is installed or not: it takes seconds."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
