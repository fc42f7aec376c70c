"""A mutant that is put into functions that are there already."""

import importlib
import sys

import pytest

from mutation.mutants import Mutant, mutants_of
from mutation.swapping import Library, place_of

SOURCE = """from functools import cache, wraps

LIMIT = 3


def twice(function):
    @wraps(function)
    def inner(x):
        return function(x) * 2

    return inner


def plain(x):
    return x + 4


@twice
def decorated(x):
    return x + 5


@cache
def kept(x):
    return x + 6


class Box:
    size = 7

    def __init__(self, extra=8):
        self.extra = extra

    @property
    def full(self):
        def inside(x):
            return [x + 9 for _ in range(1)]

        return inside(self.extra)


branches = (lambda: 10) if LIMIT else (lambda: 11)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module, what another one has of it, and the mutant that makes ``n`` another number."""
    (tmp_path / "swapped_box.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("swapped_box")
    yield Library(tmp_path), module
    del sys.modules["swapped_box"]


def mutant(library, n: int) -> Mutant:
    (found,) = [
        one for one in mutants_of(library.root, "swapped_box.py") if one.what == f"{n} -> {n + 1}"
    ]
    return found


def test_functions_that_others_have(library):
    library, module = library
    plain, decorated, box = module.plain, module.decorated, module.Box()
    assert (plain(0), decorated(0), module.kept(0), box.full) == (4, 10, 6, [17])
    for number in (4, 5, 6, 9):
        assert library.swap(mutant(library, number))
    assert (plain(0), decorated(0), module.kept(0), box.full) == (5, 12, 7, [18])


def test_the_inside_of_a_decorator(library):
    library, module = library
    assert library.swap(mutant(library, 2))
    assert module.decorated(1) == 18


@pytest.mark.parametrize("number", [3, 7, 8])
def test_what_has_had_its_effect_when_it_was_imported(library, number):
    library, module = library
    assert not library.swap(mutant(library, number))
    assert (module.LIMIT, module.Box.size, module.Box().extra) == (3, 7, 8)


def test_branches_that_change_places(library):
    library, module = library
    (swapped,) = [o for o in mutants_of(library.root, "swapped_box.py") if o.what.startswith("bra")]
    assert not library.swap(swapped)
    assert module.branches() == 10
    assert library.swap(mutant(library, 10))
    assert module.branches() == 11


def test_the_function_around_a_mutant(library):
    library, _ = library
    inner = "Box.full.<locals>.inside.<locals>.<listcomp>"
    expected = {3: None, 7: None, 8: None, 4: "plain", 2: "twice.<locals>.inner", 9: inner}
    found = {number: place_of(library.root, mutant(library, number)) for number in expected}
    assert found == {n: name and f"swapped_box.py:{name}" for n, name in expected.items()}
