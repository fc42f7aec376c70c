"""Which tests a mutant is tried on."""

import json

from mutation.reached import Calls, Known, Map, order


def known(test, seconds, *reached, ranks=False):
    return Known(test, "stamp", seconds, ranks, frozenset(reached))


def test_tests_that_reach_it_those_that_notice_most_in_the_least_time_first():
    slow, fast = known("slow", 2.0, "a.py:f"), known("fast[1]", 0.1, "a.py:f", "b.py:g")
    sharp, other = known("sharp", 3.0, "a.py:f"), known("other", 0.0, "b.py:g")
    every = [slow, fast, sharp, other]
    assert order(every, "a.py", "a.py:f", {("a.py", "sharp"): 5}) == [sharp, fast, slow, other]
    assert order(every, "b.py", "b.py:g", {}) == [other, fast, slow, sharp]
    assert order(every, "a.py", "a.py:f", {("c.py", "sharp"): 5})[:3] == [fast, sharp, slow]
    assert order(every, "a.py", "a.py:f", {("a.py", "fast"): 1})[:3] == [fast, slow, sharp]
    assert order(every, "a.py", None, {}) == [fast, slow, sharp, other]
    assert order(every, "c.py", "c.py:f", {}) == [other, fast, slow, sharp]
    assert order(every, "b.py", "b.py:h", {}) == [other, fast, slow, sharp]


def test_a_test_of_a_file_that_has_changed_is_not_known(tmp_path):
    path, stamps = tmp_path / "map.jsonl", {"one": "stamp", "two": "stamp"}
    first = Map(path, stamps.__getitem__)
    first.add(known("one", 0.1, "a.py:f", "a.py:g"))
    first.add(known("two", 0.2, ranks=True))
    assert Map(path, stamps.__getitem__).known == first.known
    stamps["two"] = "other"
    assert list(Map(path, stamps.__getitem__).known) == ["one"]


def test_calls_of_the_library_are_seen_in_ranks_too(tmp_path):
    (tmp_path / "sources").mkdir()
    file = tmp_path / "sources" / "box.py"
    file.write_text(
        "def outer(n):\n    return [inner(i) for i in range(n)]\n\n\ndef inner(i):\n    return i\n"
    )
    names: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    calls = Calls(tmp_path / "sources", tmp_path)
    with calls.recorded():
        names["inner"](3)
    assert calls.names() == {"box.py:inner"}
    (tmp_path / "rank-7").write_text(json.dumps(["box.py:other"]))
    with calls.recorded():
        assert calls.of_rank(names["outer"])(2) == [0, 1]
    found = {"box.py:outer", "box.py:inner", "box.py:outer.<locals>.<listcomp>"}
    assert calls.names() == {*found, "box.py:other"}
    assert list(tmp_path.glob("rank-*")) == []


def test_other_test_functions_come_before_more_parameters_of_one():
    every = [known(f"f[{i}]", 0.1, "a.py:f") for i in range(3)] + [known("g", 0.2, "a.py:f")]
    assert [one.test for one in order(every, "a.py", "a.py:f", {})] == ["f[0]", "g", "f[1]", "f[2]"]
