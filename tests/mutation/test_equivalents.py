"""The list of mutants that change nothing is one of the library as it is now."""

import pytest

from mutation.equivalents import EQUIVALENT, Equivalent
from mutation.rooms import ROOMS, SOURCES, TESTS, belongs, sources_of


@pytest.mark.parametrize("file", sorted({one.file for one in EQUIVALENT}))
def test_they_are_there(file):
    own = [one for one in EQUIVALENT if one.file == file]
    assert [(one.line, one.what) for one in own if not one.found(SOURCES)] == []
    assert [one.line for one in own if not one.why] == []


def test_one_of_several_in_a_line(tmp_path):
    (tmp_path / "box.py").write_text("def size(a, b):\n    return a + b + a * b\n")
    line = "return a + b + a * b"
    first, second, third = (
        Equivalent("box.py", line, "Add -> Sub", "why", nth).found(tmp_path) for nth in range(3)
    )
    assert [len(one) for one in (first, second, third)] == [1, 1, 0]
    assert first != second
    assert Equivalent("box.py", "return a", "Add -> Sub", "why").found(tmp_path) == []


def test_rooms_have_sources_and_tests():
    for room, tests in ROOMS.items():
        assert sources_of(room)
        assert [one for one in tests if not (TESTS / one).exists()] == []


def test_the_tests_of_a_room():
    assert belongs("tests/unit/linalg/test_polar.py::test_x[1]", "linalg")
    assert belongs("tests/contracts/test_layers.py::test_x", "layers")
    assert not belongs("tests/contracts/test_inverses.py::test_x", "layers")
