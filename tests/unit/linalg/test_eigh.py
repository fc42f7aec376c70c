"""Bases of null spaces that depend on the space alone."""

import pytest
import torch

from natgrad.linalg.eigh import eigh, settle_null_spaces


def turned(rows, values, seed):
    """Another basis of the same null space."""
    generator = torch.Generator().manual_seed(seed)
    count = int((values == 0).sum())
    turn, _ = torch.linalg.qr(torch.randn(count, count, generator=generator, dtype=rows.dtype))
    rows = rows.clone()
    rows[values == 0] = turn @ rows[values == 0]
    return rows


@pytest.mark.parametrize("reverse", [False, True], ids=["smallest first", "largest first"])
@pytest.mark.parametrize("rank", [0, 1, 3, 6, 7])
def test_any_basis_becomes_the_same(rank, reverse):
    x = torch.randn(7, rank, dtype=torch.float64)
    values, rows = eigh((x @ x.mT)[None])
    values[0, : 7 - rank] = 0
    if reverse:
        values, rows = values.flip(1), rows.flip(1)
    found = []
    for seed in range(3):
        basis = turned(rows[0], values[0], seed)[None]
        settle_null_spaces(values, basis)
        torch.testing.assert_close(basis[0] @ basis[0].mT, torch.eye(7, dtype=torch.float64))
        torch.testing.assert_close(basis[0].mT * values[0] @ basis[0], x @ x.mT)
        found.append(basis[0].square())  # but for signs
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])


def test_a_basis_without_a_null_space_stays():
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    values, rows = eigh(x @ x.mT)
    before = rows.clone()
    settle_null_spaces(values, rows)
    assert torch.equal(rows, before)
