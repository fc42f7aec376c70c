"""Copies of experts' matrices: which experts are in them, or that nothing is known."""

import pytest
import torch
from torch import Tensor

from natgrad.capture.expert_products import copied
from natgrad.capture.expert_views import Matrices, read

EXPERTS, ROWS, COLS = 4, 3, 2
INDEX = torch.tensor([1, 0, 1])


def matrices() -> Matrices:
    w = torch.randn(EXPERTS, ROWS, COLS, dtype=torch.float64)
    return Matrices(w, "oi", torch.arange(EXPERTS), range(ROWS), None)


def picked(t: Tensor, index) -> tuple:
    return "__getitem__", (t, index), {}, t[index]


def selected(t: Tensor, dim: int) -> tuple:
    return "index_select", (t, dim, INDEX), {}, t.index_select(dim, INDEX)


def named(t: Tensor, dim: int) -> tuple:
    settings = {"dim": dim, "index": INDEX}
    return "index_select", (t,), settings, t.index_select(**settings)


KNOWN = {
    "experts": lambda w: picked(w, INDEX),
    "a list": lambda w: picked(w, [3, 1]),
    "in a tuple": lambda w: picked(w, (INDEX,)),
    "and all rows": lambda w: picked(w, (INDEX, slice(None))),
    "and all rows and columns": lambda w: picked(w, (INDEX, slice(None), slice(None))),
    "and all else": lambda w: picked(w, (INDEX, ...)),
    "by a table": lambda w: picked(w, INDEX.view(3, 1)),
    "selected": lambda w: selected(w, 0),
    "selected, counted from behind": lambda w: selected(w, -3),
    "selected by names": lambda w: named(w, 0),
    "of the last two": lambda w: picked(w[2:], torch.tensor([1, 0, 1])),
    "of transposes": lambda w: picked(w.mT, INDEX),
}
UNKNOWN = {
    "some rows": lambda w: picked(w, (INDEX, torch.tensor([0, 2, 1]))),
    "some columns": lambda w: picked(w, (slice(None), slice(None), torch.tensor([0, 1, 1]))),
    "rows are selected": lambda w: named(w, 1),
    "columns are selected": lambda w: named(w, 2),
    "rows of one": lambda w: picked(w[1], torch.tensor([2, 0])),
    "rows in front": lambda w: picked(w.transpose(0, 1), torch.tensor([2, 0])),
    "columns in front": lambda w: picked(w.permute(2, 0, 1), torch.tensor([1, 0])),
    "one that repeats itself": lambda w: picked(w[1:2].expand(5, -1, -1), torch.tensor([4, 2])),
    "no index": lambda w: picked(w, ()),
    "no function that copies": lambda w: ("exp", (w,), {}, w.exp()),
}


def found(call):
    of = matrices()
    name, args, kwargs, out = call(of.tensor)
    view = read(args[0], of)
    assert view is not None
    return of, copied(name, args, kwargs, view, out)


@pytest.mark.parametrize("case", KNOWN)
def test_each_matrix_is_that_of_its_expert(case):
    of, copy = found(KNOWN[case])
    assert copy is not None
    assert len(copy.ids) == len(copy.tensor)
    for expert, one in zip(copy.ids.tolist(), copy.tensor, strict=True):
        assert torch.equal(one.mT if copy.order == "io" else one, of.tensor[expert])


@pytest.mark.parametrize("case", UNKNOWN)
def test_nothing_is_known_of_other_copies(case):
    assert found(UNKNOWN[case])[1] is None


@pytest.mark.parametrize(("first", "end"), [(1, 5), (3, 6), (0, 6)])
def test_what_goes_on_behind_the_matrices_is_no_view_of_them(first, end):
    """Others may lie in the same memory; up to the last one it is a view."""
    memory = torch.randn(EXPERTS + 2, ROWS, COLS, dtype=torch.float64)
    of = Matrices(memory[:EXPERTS], "oi", torch.arange(EXPERTS), range(ROWS), None)
    assert read(memory[first:end], of) is None
    view = read(memory[first:EXPERTS], of)
    assert view is not None
    assert view.ids.tolist() == list(range(first, EXPERTS))
