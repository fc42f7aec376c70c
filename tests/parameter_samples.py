"""Which of a test's parameters a run takes.

A quick run takes a sample of all tests. A test that is marked with ``pairs`` has three parameters
or more that have little to do with each other, and most mistakes need only two of them to be seen:
a structure with an inverse, or a layer with a structure. So of the product a run takes some cases
in which each value of one parameter still meets each value of every other, a *pairwise covering
array*; ``--all-combinations`` takes the whole of it.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from typing import Any

import pytest


def function_of(item: pytest.Item) -> str:
    """What all parameters of a test have in common."""
    return item.nodeid.partition("[")[0]


def sampled(functions: Iterable[str], every: int) -> list[int]:
    """Indices of the items to keep, one of ``every`` of each function and at least one.

    ``functions`` has the function of each item, in order. Of the first ``every`` items of one it
    is the first that is kept, of the next ones the second, and so on: a plain stride would meet
    the same few values of an inner parameter again and again.
    """
    seen: dict[str, int] = {}
    kept = []
    for index, function in enumerate(functions):
        count = seen.get(function, 0)
        seen[function] = count + 1
        turn, place = divmod(count, every)
        if place == turn % every:
            kept.append(index)
    return kept


def covering(cases: Sequence[Sequence[Hashable]], kept: Iterable[int] = ()) -> list[int]:
    """Indices of some ``cases``, in order, that have every pair of values which some case has.

    A case has one value for each axis. What is no case is not needed: of a product without the
    cases that mean nothing, all pairs are found that mean something. Cases in ``kept`` are among
    the result in any case, and what they have is needed no more.

    Greedy: always the case with most pairs that are still missing, and the first of several. How
    many those are only ever falls, so that a case need not be looked at while another one has more
    than it had when it was looked at last.
    """
    found = sorted(set(kept))
    if not cases or len(cases[0]) < 3:  # each is a pair by itself
        return list(range(len(cases)))
    pairs = [list(combinations(enumerate(case), 2)) for case in cases]
    missing = {pair for some in pairs for pair in some}
    for index in found:
        missing.difference_update(pairs[index])
    waiting = [(-len(some), index) for index, some in enumerate(pairs)]
    heapify(waiting)
    while missing:
        _, index = waiting[0]
        count = sum(pair in missing for pair in pairs[index])
        if not count:
            heappop(waiting)
            continue
        heapreplace(waiting, (-count, index))
        if waiting[0] == (-count, index):
            found.append(index)
            missing.difference_update(pairs[index])
    return sorted(found)


def all_pairs(
    *axes: Iterable[Any], unless: Callable[..., object] = lambda *_: False
) -> list[tuple[Any, ...]]:
    """Cases of the product of ``axes``, in its order, in which each two values of two axes meet,
    where they do so in a case that is not left out by ``unless``."""
    numbered = [list(enumerate(axis)) for axis in axes]
    cases = [tuple(zip(*case, strict=True)) for case in product(*numbered)]
    real = [(places, values) for places, values in cases if not unless(*values)]
    return [real[index][1] for index in covering([places for places, _ in real])]


def all_combinations(
    *axes: Iterable[Any], unless: Callable[..., object] = lambda *_: False
) -> list[tuple[Any, ...]]:
    """The whole product, as `all_pairs` of it."""
    return [case for case in product(*axes) if not unless(*case)]


class Pairs:
    """What the mark says: ``unless``, cases that mean nothing and are in no run; ``also``, those
    that are in every run. Both are functions of some of the test's parameters, called by name."""

    def __init__(
        self,
        *,
        unless: Callable[..., object] = lambda: False,
        also: Callable[..., object] = lambda: False,
    ) -> None:
        self.unless, self.also = unless, also

    def chosen(
        self,
        names: Sequence[Sequence[str]],
        cases: Sequence[Mapping[str, Any]],
        *,
        all_combinations: bool,
    ) -> list[int]:
        """Indices of the cases to run, of which each has the parameters by name. In ``names`` are
        those that belong together: they change at once. (A value is itself wherever it is met, as
        it stands in one list; others need not be comparable.)"""
        real = [i for i, values in enumerate(cases) if not _called(self.unless, values)]
        if all_combinations:
            return real
        places = [tuple(tuple(id(cases[i][name]) for name in some) for some in names) for i in real]
        kept = [at for at, i in enumerate(real) if _called(self.also, cases[i])]
        return [real[at] for at in covering(places, kept)]


def _called(function: Callable[..., object], values: Mapping[str, Any]) -> bool:
    """With those of ``values`` that it has names for."""
    code = function.__code__
    wanted = code.co_varnames[: code.co_argcount]
    return bool(function(**{name: values[name] for name in wanted}))


def pairs_of(items: Sequence[pytest.Item], *, all_combinations: bool) -> list[int]:
    """Places of the ``items`` to keep: of each test that is marked with ``pairs`` those that it
    asks for, and all of the others. A case that is skipped has no pair of what it would have had.
    """
    kept: list[int] = []
    marked: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        if item.get_closest_marker("pairs") is None or _skipped(item):
            kept.append(place)
        else:
            marked.setdefault(function_of(item), []).append(place)
    for places in marked.values():
        some: list[Any] = [items[place] for place in places]
        mark = Pairs(**some[0].get_closest_marker("pairs").kwargs)
        cases = [item.callspec.params for item in some]
        chosen = mark.chosen(axes_of(some[0]), cases, all_combinations=all_combinations)
        kept += [places[index] for index in chosen]
    return sorted(kept)


def axes_of(item: Any) -> list[Sequence[str]]:
    """Names of its parameters; those of one ``parametrize`` change together."""
    found: list[Sequence[str]] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        found.append([n.strip() for n in names.split(",")] if isinstance(names, str) else names)
    known = {name for names in found for name in names}
    return found + [[name] for name in item.callspec.params if name not in known]  # of fixtures


def _skipped(item: pytest.Item) -> bool:
    """By a mark, also by one of a value: ``pytest.param(..., marks=...)``."""
    conditions = [mark.args[0] for mark in item.iter_markers("skipif")]
    return item.get_closest_marker("skip") is not None or True in conditions


def skips_itself(item: pytest.Item, report: pytest.TestReport) -> bool:
    """Whether other cases were left out for the pairs of this one, which now tests nothing."""
    ran = report.when == "call" and report.skipped and not hasattr(report, "wasxfail")
    return ran and item.get_closest_marker("pairs") is not None
