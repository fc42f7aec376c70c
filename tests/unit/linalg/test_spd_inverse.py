"""Inverses of positive definite matrices by halves."""

from itertools import pairwise

import pytest
import torch

from natgrad.linalg import spd_inverse
from natgrad.linalg.spd_inverse import cholesky_inverse, inverse_rows, recursive_inverse_


def positive(d):
    m = torch.randn(d, d + 3, dtype=torch.float64)
    return m @ m.T / d + 0.1 * torch.eye(d, dtype=torch.float64)


@pytest.mark.parametrize("d", [1, 2, 7, 191, 192, 193, 200, 385, 450])
def test_is_the_inverse(d):
    matrix = positive(d)
    found = recursive_inverse_(matrix.clone())
    eye = torch.eye(d, dtype=torch.float64)
    assert (found @ matrix - eye).norm() <= 1e-10 * d
    assert (found - found.T).norm() <= 1e-12 * found.norm()


@pytest.mark.parametrize("d", [32, 33, 48, 65, 150, 301])
def test_every_depth_of_the_recursion(monkeypatch, d):
    monkeypatch.setattr(spd_inverse, "_LEAF", 32)
    matrix = positive(d)
    expected = torch.linalg.inv(matrix)
    assert (recursive_inverse_(matrix) - expected).norm() <= 1e-11 * expected.norm()


@pytest.mark.parametrize("d", [5, 60])
def test_in_place_and_from_the_upper_triangle_alone(monkeypatch, d):
    monkeypatch.setattr(spd_inverse, "_LEAF", 32)
    matrix = positive(d)
    expected = torch.linalg.inv(matrix)
    below = torch.ones_like(matrix).tril(-1).bool()
    upper = matrix.masked_fill(below, torch.nan)
    assert recursive_inverse_(upper) is upper
    assert (upper - expected).norm() <= 1e-10 * expected.norm()


def test_a_leaf():
    matrix = positive(6)
    torch.testing.assert_close(cholesky_inverse(matrix), torch.linalg.inv(matrix))


@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("leaf", [32, 192])
def test_not_positive_definite(monkeypatch, leaf, where):
    monkeypatch.setattr(spd_inverse, "_LEAF", leaf)
    matrix = torch.eye(100, dtype=torch.float64)
    matrix[where, where] = -1
    with pytest.raises(torch.linalg.LinAlgError):
        recursive_inverse_(matrix)


def test_float32():
    matrix = positive(300)
    found = recursive_inverse_(matrix.float())
    assert found.dtype == torch.float32
    assert (found.double() @ matrix - torch.eye(300)).norm() < 1e-2


@pytest.mark.parametrize("d", [1, 7, 200])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_make_up_the_inverse(d, ranks):
    torch.manual_seed(d)
    root = torch.randn(d, d, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(d, dtype=torch.float64)
    before, expected = matrix.clone(), torch.linalg.inv(matrix)
    ends = [index * d // ranks for index in range(ranks + 1)]
    rows = [inverse_rows(matrix, a, b) for a, b in pairwise(ends)]
    assert (torch.cat(rows) - expected).norm() <= 1e-11 * expected.norm()
    assert torch.equal(matrix, before)
    assert all(one.is_contiguous() for one in rows)


def test_rows_of_a_matrix_that_has_no_inverse():
    with pytest.raises(torch.linalg.LinAlgError):
        inverse_rows(-torch.eye(3), 0, 2)
