"""Which tests a mutant is tried on."""

from mutation.mutants import Mutant
from mutation.reached import function_of, order

SOURCE = """LIMIT = 3


class Box:
    @property
    def size(self):
        def inner():
            return LIMIT + 1
        return inner() * 2
"""


def test_the_function_around_a_mutant_is_named_as_python_names_it(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "box.py").write_text(SOURCE)
    code: dict = {}
    exec(compile(SOURCE, "room/box.py", "exec"), code)
    first = code["Box"].size.fget.__code__.co_firstlineno
    of = {line: function_of(tmp_path, Mutant("room/box.py", 0, line, "")) for line in (1, 8, 9)}
    assert of == {1: None, 8: "room/box.py:7", 9: f"room/box.py:{first}"}


def test_tests_that_reach_it_those_that_notice_most_first():
    reached = {
        "slow": {"seconds": 2.0, "reached": ["a.py:1"]},
        "fast": {"seconds": 0.1, "reached": ["a.py:1", "b.py:1"]},
        "sharp": {"seconds": 3.0, "reached": ["a.py:1"]},
        "other": {"seconds": 0.0, "reached": ["b.py:1"]},
    }
    assert order(reached, "a.py:1", {"sharp": 2}) == ["sharp", "fast", "slow"]
    assert order(reached, None, {}) == ["other", "fast", "slow", "sharp"]
    assert order(reached, "c.py:1", {}) == []
    reached["ranks"] = {"seconds": 9.0, "reached": [], "ranks": True}
    assert order(reached, "c.py:1", {}) == ["ranks"]
