"""The largest eigenpairs by random products: exact for thin data, and as near as spectra allow."""

import pytest
import torch
from torch import nn

from natgrad import KFAC
from natgrad.errors import SettingError
from natgrad.inverses import LowRank
from natgrad.inverses.low_rank import _MORE as MORE
from natgrad.specs import FactorSpec, Routine
from oracles import close

D = 120


def rows_of(count, batch=2, power=0.0):
    torch.manual_seed(0)
    rows = torch.randn(batch, count, D, dtype=torch.float64)
    return rows * torch.arange(1, D + 1, dtype=torch.float64).pow(-power)


def factor(rows):
    return rows.mT @ rows / rows.shape[1]


def damped(matrix, damping):
    return matrix + damping * torch.eye(D, dtype=torch.float64)


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 1.0])
def test_fewer_rows_than_the_rank_are_decomposed_exactly(exponent):
    """Without ever looking at the rows, of which running averages keep nothing."""
    inverse, matrix = LowRank(20), factor(rows_of(15))
    parts = inverse.decompose(matrix.clone(), torch.full((2,), 0.1, dtype=torch.float64))
    assert [tuple(part.shape) for part in parts] == [(2, 20, D), (2, 20), (2, 1)]
    m = torch.randn(2, D, 3, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(damped(matrix, 0.1))
    expected = vectors @ (values.pow(exponent).unsqueeze(-1) * (vectors.mT @ m))
    assert close(inverse.apply_power(parts, m, exponent), expected, 1e-9)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_error_is_about_the_first_eigenvalue_that_is_left_out(power):
    """In the spectral norm, against the best that any matrix of this rank could do."""
    inverse, matrix = LowRank(20), factor(rows_of(500, power=power))
    zero = torch.zeros(2, dtype=torch.float64)
    rows, values, rest = inverse.decompose(matrix.clone(), zero)
    kept = rows.mT @ (values.unsqueeze(-1) * rows)
    exact = torch.linalg.eigvalsh(matrix).flip(1)
    missing = torch.linalg.eigvalsh(matrix - kept).abs().amax(1)
    assert (missing <= 1.02 * exact[:, 20]).all()
    # The flat tail keeps the trace.
    total = values.sum(1) + (D - 20) * rest.squeeze(1)
    assert close(total, matrix.diagonal(dim1=1, dim2=2).sum(1), 1e-9)


def test_it_says_how_far_it_is_off():
    damping = torch.full((2,), 0.01, dtype=torch.float64)
    errors = []
    for rank in (5, 20, 39):
        inverse, matrix = LowRank(rank), factor(rows_of(500, power=1.0))
        parts = inverse.decompose(matrix.clone(), damping)
        errors.append(float(inverse.error(parts, matrix, damping)))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 3 * errors[-1]


def test_it_repeats_itself():
    inverse, matrix = LowRank(20), factor(rows_of(500))
    one, other = (inverse.decompose(matrix.clone(), torch.zeros(2).double()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_it_costs_a_fraction():
    spec = FactorSpec(9217, 1, 1)
    cost = LowRank(256).cost(spec)
    assert cost.decompose < Routine.EIGEN.operations(9217) / 50
    assert cost.apply == 4 * 256
    # Four products with the factor and bases of spans of k + 8 vectors: the first, one for each of
    # two further ones, and the last.
    wide = 256 + MORE
    each = 2 * 9217**2 * wide + 4 * 9217 * wide**2
    assert cost.decompose == 4 * each + Routine.EIGEN.operations(wide)
    # Of less than three times the rank and its spare vectors it is all of the decomposition.
    for dim, exact in ((83, True), (84, False)):
        own = 20 + MORE
        sketched = 4 * (2 * dim**2 * own + 4 * dim * own**2) + Routine.EIGEN.operations(own)
        expected = Routine.EIGEN.operations(dim) if exact else sketched
        assert LowRank(20).cost(FactorSpec(dim, 1, 1)).decompose == expected
    assert LowRank(256, products=0).cost(spec).decompose == 2 * each + Routine.EIGEN.operations(
        wide
    )
    narrow = FactorSpec(100, 3, 1)
    assert LowRank(256).cost(narrow).decompose == 3 * Routine.EIGEN.operations(100)


def test_a_network_learns_with_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    kfac = KFAC(model, optimizer, inverse=LowRank(8), update_every=1, refresh_every=1)
    x, y = torch.randn(64, 60), torch.randint(3, (64,))
    found = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        kfac.step()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.8 * found[0]
    assert kfac.memory().total["inverses"] < 4 * (61 + 40) * 10 + 4 * (41**2 + 3**2) + 1000


def test_ranks_are_whole_numbers():
    assert LowRank(1, products=0).rank == 1
    with pytest.raises(SettingError, match=r"LowRank.rank is 0 but must be a whole number"):
        LowRank(0)
    with pytest.raises(SettingError, match=r"LowRank.products is -1 but must be a whole number"):
        LowRank(4, products=-1)
