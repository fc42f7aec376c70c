"""Which tests reach which functions, found once: a mutant is tried on those alone.

    {"test": "tests/unit/linalg/test_polar.py::test_x", "seconds": 0.2, "stamp": "5f0c…",
     "ranks": false, "reached": ["linalg/polar.py:exact_polar", …]}

is a line of the map's file. A function is named by its file and its qualified name, so that the map
outlives changes elsewhere; tests of a file with another stamp are run again. Python tells of every
call (``sys.settrace``), in the ranks that a test starts, too, as those are forked; what happens
inside of a function is not looked at, so that tests take about twice their time.
"""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Known:
    """What is known of a test: ``seconds`` of processors, the functions that it has ``reached``."""

    test: str
    stamp: str
    seconds: float
    ranks: bool
    reached: frozenset[str]

    @property
    def function(self) -> str:
        """What all parameters of a test have in common."""
        return function_of(self.test)


class Map:
    """The tests that are known, in a file to which each is added as it has ended."""

    def __init__(self, path: Path, stamps: Callable[[str], str]) -> None:
        self.path = path
        self.known: dict[str, Known] = {}
        if path.exists():
            for line in map(json.loads, path.read_text().splitlines()):
                one = Known(**{**line, "reached": frozenset(line["reached"])})
                if stamps(one.test) == one.stamp:
                    self.known[one.test] = one

    def add(self, one: Known) -> None:
        self.known[one.test] = one
        with self.path.open("a") as file:
            file.write(json.dumps({**asdict(one), "reached": sorted(one.reached)}) + "\n")


class Calls:
    """Which functions of the library are called, here and in forked ranks."""

    def __init__(self, sources: Path, folder: Path) -> None:
        self.sources, self.folder = sources, folder
        self.codes: set[CodeType] = set()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self.codes = set()
        add = self.codes.add

        def seen(frame: Any, event: str, arg: Any) -> None:
            add(frame.f_code)

        threading.settrace(seen)
        sys.settrace(seen)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def names(self) -> set[str]:
        """Of all that was called, by ranks that have ended, too."""
        found = named(self.codes, self.sources)
        for file in self.folder.glob("rank-*"):
            found |= set(json.loads(file.read_text()))
            file.unlink()
        return found

    def of_rank(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """What a rank does, with the names of what it has called left behind for `names`."""

        def told(*args: Any) -> Any:
            try:
                return work(*args)
            finally:
                note = self.folder / f"rank-{os.getpid()}"
                note.with_name(f"of-{note.name}").write_text(
                    json.dumps(sorted(named(self.codes, self.sources)))
                )
                note.with_name(f"of-{note.name}").rename(note)

        return told


def named(codes: Iterable[CodeType], sources: Path) -> set[str]:
    """The functions of the library among some codes, which may be recording this."""
    prefix = f"{sources}{os.sep}"
    own = [one for one in list(codes) if one.co_filename.startswith(prefix)]
    return {f"{one.co_filename.removeprefix(prefix)}:{one.co_qualname}" for one in own}


def stamp_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.exists() else ""


def function_of(test: str) -> str:
    return test.partition("[")[0]


def order(
    known: Sequence[Known], file: str, place: str | None, kills: dict[tuple[str, str], int]
) -> list[Known]:
    """The tests that reach a function, then those that reach its file, then all others: parameters
    that are not in the map may reach it, too. Those that have noticed most mutants, of the same
    file above all, in the least time come first.

    Arguments:
        kills: how many mutants of a file a test function has noticed.
    """
    in_all: dict[str, int] = {}
    for (_, test), count in kills.items():
        in_all[test] = in_all.get(test, 0) + count

    def promise(one: Known) -> float:
        here = kills.get((file, one.function), 0)
        return (1 + 20 * here + in_all.get(one.function, 0)) / (0.05 + one.seconds)

    every = varied(known, promise)
    able = {one.test for one in every if place in one.reached}
    inside = {one.test for one in every if any(name.startswith(f"{file}:") for name in one.reached)}
    return sorted(every, key=lambda one: (one.test not in able, one.test not in inside))


def varied(known: Iterable[Known], promise: Callable[[Known], float]) -> list[Known]:
    """The most promising first. What has survived one parameter of a test function will often
    survive the next: each promises less than the one before."""
    met: dict[str, int] = {}
    found = []
    for one in sorted(known, key=lambda one: -promise(one)):
        met[one.function] = met.get(one.function, 0) + 1
        found.append((-promise(one) / met[one.function], len(found), one))
    return [one for *_, one in sorted(found, key=lambda each: each[:2])]
