"""Buffers that are kept for the next call, up to a limit."""

import pytest
import torch

from natgrad.linalg import workspace

LIKE = torch.empty(0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    """Of 80 bytes, ten numbers."""
    workspace.release()
    monkeypatch.setattr(workspace._scratch, "limit", 80)
    yield
    workspace.release()


def kept(key, size):
    """Whether a second call gets the same memory."""
    first = workspace.workspace(key, (size,), LIKE)
    return workspace.workspace(key, (size,), LIKE) is first


def test_what_fills_the_limit_is_kept_and_what_exceeds_it_is_not():
    assert kept("all", 10)
    assert workspace.held() == 80
    assert not kept("more", 11)
    assert workspace.held() == 80


def test_the_one_that_was_used_longest_ago_goes_first():
    a, b = (workspace.workspace(key, (5,), LIKE) for key in "ab")
    assert workspace.workspace("a", (5,), LIKE) is a
    assert workspace.held() == 80
    workspace.workspace("c", (1,), LIKE)
    assert workspace.held() == 48
    assert workspace.workspace("a", (5,), LIKE) is a
    assert workspace.workspace("b", (5,), LIKE) is not b


def test_shape_and_dtype_are_those_that_are_asked_for():
    first = workspace.workspace("a", (2, 3), LIKE)
    assert (first.shape, first.dtype) == ((2, 3), torch.float64)
    assert workspace.workspace("a", (3, 2), LIKE).shape == (3, 2)
    assert workspace.workspace("a", (2, 3), LIKE.float()).dtype == torch.float32


def test_zeros_are_zero_once():
    first = workspace.workspace("a", (4,), LIKE, zero=True)
    assert torch.equal(first, torch.zeros(4, dtype=torch.float64))
    first.fill_(3.0)
    again = workspace.workspace("a", (4,), LIKE, zero=True)
    assert torch.equal(again, torch.full((4,), 3.0, dtype=torch.float64))
