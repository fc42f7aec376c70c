"""Which tests reach which function of a room, found once: a mutant is tried on those alone.

    {"unit/linalg/test_polar.py::test_x": {"seconds": 0.2, "reached": ["linalg/polar.py:31", ...]}}

A function is named by its file and first line. Python tells of every call (``sys.settrace``); what
happens inside of a function is not looked at, so that tests take about twice their time. Code of a
module itself, such as a constant, belongs to no function and is tried on all tests of the room.
Calls in other processes are not seen: a test that starts ranks is tried on all mutants of its room.
"""

import ast
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from mutation.mutants import Mutant

Reached = dict[str, dict[str, Any]]


class Recorder:
    """A plugin of pytest that records what each test calls of one room."""

    def __init__(self, room: Path, sources: Path) -> None:
        self.prefix, self.sources, self.found = f"{room}/", sources, {}
        self.calls: set[CodeType] = set()
        self.failed = ""

    def seen(self, frame: Any, event: str, arg: Any) -> None:
        self.calls.add(frame.f_code)

    def names(self) -> list[str]:
        """Of what was called of the room."""
        own = [code for code in self.calls if code.co_filename.startswith(self.prefix)]
        files = [Path(code.co_filename).relative_to(self.sources) for code in own]
        return sorted({f"{f}:{c.co_firstlineno}" for f, c in zip(files, own, strict=True)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.calls, start = set(), time.perf_counter()
        threading.settrace(self.seen)
        sys.settrace(self.seen)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.found[item.nodeid] = {
                "seconds": time.perf_counter() - start,
                "reached": self.names(),
                "ranks": item.get_closest_marker("distributed") is not None,
            }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


class Chosen:
    """A plugin of pytest that runs these tests in this order, then all other parameters of the same
    functions, as long as there is time, and leaves all else out; it keeps the name of the one that
    fails."""

    def __init__(self, order: list[str], seconds: float) -> None:
        self.place = {name: index for index, name in enumerate(order)}
        self.functions = {name.partition("[")[0]: i for i, name in reversed([*enumerate(order)])}
        self.end = time.monotonic() + seconds
        self.failed, self.stopped = "", False

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        found = []
        for item in items:
            function = item.nodeid.partition("[")[0]
            if function in self.functions:
                known = self.place.get(item.nodeid)
                where = (0, known) if known is not None else (1, self.functions[function])
                found.append((*where, len(found), item))
        items[:] = [item for *_, item in sorted(found, key=lambda one: one[:3])]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            self.stopped = True
            item.session.shouldstop = "there is no more time"


def function_of(root: Path, mutant: Mutant) -> str | None:
    """The innermost function around a mutant, as `Recorder` names it; None in no function."""
    around: ast.AST | None = None
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse((root / mutant.file).read_text())):
        inside = isinstance(node, kinds) and any(
            child.lineno <= mutant.line <= (child.end_lineno or 0) for child in node.body
        )
        if inside and (around is None or node.lineno > around.lineno):  # type: ignore[attr-defined]
            around = node
    if around is None:
        return None
    decorators = getattr(around, "decorator_list", [])  # where Python says that it begins
    return f"{mutant.file}:{min(node.lineno for node in (around, *decorators))}"


def order(reached: Reached, function: str | None, kills: dict[str, int]) -> list[str]:
    """The tests that reach it, and those that start ranks, which may: first those that have noticed
    most mutants, the short ones before the long ones."""
    able = [
        name
        for name, own in reached.items()
        if function is None or function in own["reached"] or own.get("ranks")
    ]
    return sorted(able, key=lambda name: (-kills.get(name, 0), reached[name]["seconds"]))
