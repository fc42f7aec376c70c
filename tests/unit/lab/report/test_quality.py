"""The quality of approximations, against dense matrices from autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.report import quality as module
from natgrad.lab.report.quality import Quality, quality, table
from natgrad.operators import Problem
from unit.lab.report.small_network import blocks, data, dense, only, problem

DAMPING = 0.05


@pytest.fixture(scope="module")
def found():
    return quality(problem(), "start", damping=DAMPING, draws=2, seed=3)


@pytest.fixture(scope="module")
def truth():
    hessian, fisher, empirical, gradient, _ = dense(problem())
    return {"H": hessian, "F": fisher, "C": empirical}, gradient


def distance(one, other, v):
    solved = [torch.linalg.solve(m + DAMPING * torch.eye(len(m)).to(m), v) for m in (one, other)]
    error = (one - other).norm() / other.norm()
    return float(error), float(F.cosine_similarity(*solved, dim=0))


def kept(matrix, structure):
    if structure == "full":
        return matrix
    groups = {
        "layer block": [index.flatten() for index in blocks()],
        "unit-wise": [row for index in blocks() for row in index],
        "diagonal": torch.arange(len(matrix)).view(-1, 1),
    }
    return only(matrix, groups[structure])


@pytest.mark.parametrize("structure", ["full", "layer block", "unit-wise", "diagonal"])
@pytest.mark.parametrize("matrix", ["H", "F", "C"])
def test_distances_are_those_of_dense_matrices(found, truth, matrix, structure):
    full, v = truth
    approximation = kept(full[matrix], structure)
    cell = found.cell(matrix, structure)
    for got, reference in ((cell.own, full[matrix]), (cell.fisher, full["F"])):
        error, cosine = distance(approximation, reference, v)
        assert got.error == pytest.approx(error, abs=1e-9)
        assert got.cosine == pytest.approx(cosine, abs=1e-9)


def inputs_and_gradients():
    """``a [n, cols]``, and ``g [n, 3, rows]`` of every output, of both layers."""
    given = problem()
    x, _ = given.data.source[0]
    hidden = given.model[0](x).tanh()
    back = given.model[2].weight.unsqueeze(0) * (1 - hidden.square()).unsqueeze(1)  # [n, 3, 4]
    ones = torch.ones(len(x), 1, dtype=x.dtype)
    own = torch.eye(3, dtype=x.dtype).expand(len(x), 3, 3)
    with_ones = [torch.cat([a, ones], 1) for a in (x, hidden)]
    return [(a.detach(), g.detach()) for a, g in zip(with_ones, (back, own), strict=True)]


@pytest.mark.parametrize("structure", ["Kronecker", "EKFAC"])
def test_kronecker_factors_of_the_fisher(found, truth, structure):
    full, v = truth
    p = problem().model(data()[0]).softmax(1).detach()
    curved = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    approximation = torch.zeros_like(full["F"])
    for (a, g), index in zip(inputs_and_gradients(), blocks(), strict=True):
        A = a.mT @ a / len(a)
        G = torch.einsum("nci,ncd,ndj->ij", g, curved, g) / len(a)
        block = torch.kron(G, A)
        where = index.flatten()
        if structure == "EKFAC":
            q = torch.kron(*(torch.linalg.eigh(m)[1] for m in (G, A)))
            rotated = q.mT @ full["F"][where[:, None], where] @ q
            block = q @ torch.diag(rotated.diagonal()) @ q.mT
        approximation[where[:, None], where] = block
    error, cosine = distance(approximation, full["F"], v)
    own = found.cell("F", structure).own
    assert own.error == pytest.approx(error, abs=1e-9)
    assert own.cosine == pytest.approx(cosine, abs=1e-9)


def test_drawn_targets_come_nearer_with_their_number():
    few, many = (
        quality(problem(), "start", draws=draws, structures=["full"]) for draws in (1, 400)
    )
    errors = [one.cell("F_mc", "full").fisher.error for one in (few, many)]
    assert errors[1] < errors[0] / 4
    assert few.cell("F_mc", "full").own.error == 0


def test_all_are_there(found):
    assert len(found.cells) == 4 * 6
    with pytest.raises(KeyError, match="There is no 'Full' of 'H' in 'start'"):
        found.cell("H", "Full")


def test_the_table_shows_them(found):
    shown = table(found)
    assert shown.title == "Approximations at start"
    row = next(row for row in shown.rows if row[:2] == ("C", "Kronecker"))
    cell = found.cell("C", "Kronecker")
    numbers = (cell.own.error, cell.own.cosine, cell.fisher.error, cell.fisher.cosine)
    assert row[2:] == tuple(f"{value:.3f}" for value in numbers)


def test_a_loss_without_curvature_has_no_distance():
    model = nn.Linear(3, 2, bias=False).double()
    nn.init.zeros_(model.weight)
    x, y = torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    found = quality(Problem(model, F.cross_entropy, (x, y)), "start", structures=["diagonal"])
    assert {cell.own.error for cell in found.cells} == {0.0}
    assert {cell.own.cosine for cell in found.cells} == {1.0}


def test_too_many_parameters(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 10)
    with pytest.raises(
        SettingError,
        match=r"^The model has 39 parameters, of which a full matrix has 11.9 KiB; full matrices "
        r"are compared up to 10 parameters: take a smaller model, or some of its parameters\.$",
    ):
        quality(problem(), "start")


@pytest.mark.parametrize("damping", [0.0, -1.0, float("nan")])
def test_damping_that_leaves_matrices_singular(damping):
    with pytest.raises(SettingError, match=r"^damping is .* but must be above 0, as some of the"):
        quality(problem(), "start", damping=damping)


def test_an_unknown_structure():
    with pytest.raises(SettingError, match=r"^There is no structure 'kfac': give some of full, "):
        quality(problem(), "start", structures=["kfac"])


@pytest.mark.parametrize("own", [None, True, False])
def test_one_bar_is_enough(monkeypatch, own):
    """That of all cells; passes over the data for each of them show none."""
    seen = []

    def track(items, label, wanted):
        for item in items:
            seen.append((label, wanted, given.progress))
            yield item

    monkeypatch.setattr(module, "track", track)
    given = problem()
    given.progress = own
    quality(given, "start", structures=["diagonal"], progress=True)
    assert set(seen) == {("approximations, start", True, False)}
    assert len(seen) == 1 + 4 * 2
    assert given.progress is own


def test_what_is_kept_is_plain_data(found):
    assert isinstance(found, Quality)
    assert found == Quality("start", DAMPING, found.cells)
