"""``python -m mutation``: of how many small wrong changes do the tests of the same room say so?

    make mutation COUNT=25            so many mutants of each room, the same ones for the same SEED
    make mutation ROOM=linalg SEED=3

The tests of all rooms that are asked for are collected once (`mutation.session`). For each mutant a
process is forked, in which the code of one function is exchanged (`mutation.swapping`), and which
runs the tests of the room (`mutation.rooms`) that reach this function (`mutation.reached`), up to
the first one that fails, those in one process before those on several ranks. What has its effect
when it is imported is tried in a process that imports and collects anew: `--anew` does that for
every mutant, which shows the same, slowly.

Which tests reach what is found with each ``--sample``-th of their parameters; mutants are tried on
all parameters, for ``--seconds`` of processors. Results are kept in ``mutation.jsonl``: an
interrupted run goes on where it was, and ``--again`` tries those that have survived once more. Of
the mutants that survive some change nothing (`mutation.equivalents`): they are not tried. To look
at a few by name, pass ``--only linalg/polar.py:31``.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation.anew import Anew, ChangedTree
from mutation.equivalents import equivalent
from mutation.mutants import Mutant, mutants_of, mutated
from mutation.processes import Ended, Teller, cpu_seconds, watched
from mutation.reached import Calls, Known, Map, function_of, order, stamp_of
from mutation.rooms import ROOMS, SOURCES, TESTS, belongs, sources_of
from mutation.session import Collected, collect
from mutation.swapping import Library, differences, place_of

USUAL = 1.0  # seconds of a test that is not known


@dataclass
class Tried:
    """What has become of a mutant: as `Ended` says, or ``equivalent``, or ``unreached``."""

    mutant: str
    how: str
    test: str = ""
    seconds: float = 0.0
    ways: list[str] = field(default_factory=list)

    @property
    def noticed(self) -> bool:
        return Ended(self.how).noticed


class Trials:
    """All that is tried of mutants, in the process that has collected the tests."""

    def __init__(self, given: argparse.Namespace, folder: Path, anew: Anew) -> None:
        self.given, self.folder, self.anew = given, folder, anew
        self.session = Collected(self.run)
        self.calls = Calls(SOURCES, folder)
        self.results: dict[str, Tried] = {}
        self.kills: dict[tuple[str, str], int] = {}
        if given.results.exists():
            for line in map(json.loads, given.results.read_text().splitlines()):
                self._know(Tried(**line))
        self.early: set[str] = set()

    def _know(self, tried: Tried) -> None:
        self.results[tried.mutant] = tried
        if tried.noticed:
            key = tried.mutant.partition(" ")[0], function_of(tried.test)
            self.kills[key] = self.kills.get(key, 0) + 1

    def collect(self, rooms: Sequence[str]) -> int:
        """And try them."""
        paths = list(dict.fromkeys(str(TESTS / one) for room in rooms for one in ROOMS[room]))
        with self.calls.recorded():
            _import_all(rooms)
            return collect(paths, self.folder / "scratch", [self.session, self])

    def pytest_collection_finish(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.early = self.calls.names()

    def run(self, items: list[Any]) -> None:
        self.items = {item.nodeid: item for item in items}
        self.library = Library(SOURCES)
        self.tree = ChangedTree(self.folder / "changed")
        stamps: dict[str, str] = {}

        def stamp(test: str) -> str:
            file = test.partition("::")[0]
            if file not in stamps:
                stamps[file] = stamp_of(TESTS.parent / file)
            return stamps[file]

        self.map = Map(
            self.given.results.with_name(f"mutation.map-{self.given.sample}.jsonl"), stamp
        )
        self._survey(stamp)
        for room, mutants in chosen(self.given).items():
            self._room(room, mutants)

    def _survey(self, stamp: Callable[[str], str]) -> None:
        from parameter_samples import sampled

        names = list(self.items)
        kept = [names[i] for i in sampled(map(function_of, names), self.given.sample)]
        missing = [name for name in kept if name not in self.map.known]
        print(f"{len(names)} tests are collected; {len(missing)} are run for the map", flush=True)
        if not missing:
            return

        def work(teller: Teller) -> None:
            from distributed import world
            from natgrad.comm import launch

            for module, name in ((world, "_called"), (launch, "_call_function")):
                setattr(module, name, self.calls.of_rank(getattr(module, name)))
            items = [self.items[name] for name in missing]
            for item, after in zip(items, [*items[1:], None], strict=True):
                teller.begins(item.nodeid, 600.0)
                before = cpu_seconds()
                with self.calls.recorded():
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self.session.failed:
                    return teller.ends("failed", self.session.failed)
                seconds = round((cpu_seconds() - before) / 2, 3)  # what is recorded takes twice
                ranks = item.get_closest_marker("distributed") is not None
                reached = frozenset(self.calls.names())
                one = Known(item.nodeid, stamp(item.nodeid), seconds, ranks, reached)
                self.map.add(one)
            return teller.ends("passed")

        ended = watched(work, self.folder / "scratch", seen=self.given.verbose)
        if ended.how != "passed":
            import pytest

            pytest.exit(f"Without a change {ended.test or 'a process'} {ended.how}.", 1)
        self.map = Map(self.map.path, stamp)

    def _room(self, room: str, mutants: list[Mutant]) -> None:
        same = equivalent(SOURCES, sources_of(room))
        for mutant in mutants:
            name = named(mutant)
            old = self.results.get(name)
            if mutant in same:
                self._know(Tried(name, "equivalent"))
                continue
            if (
                old is not None
                and old.how != "equivalent"
                and (old.noticed or not self.given.again)
            ):
                continue
            start = cpu_seconds()
            tried = self._try(room, mutant)
            tried.seconds = round(cpu_seconds() - start, 1)
            self._know(tried)
            with self.given.results.open("a") as file:
                file.write(json.dumps(vars(tried)) + "\n")
            by = f" by {tried.test.removeprefix('tests/')}" if tried.noticed else ""
            how = tried.how if tried.noticed else tried.how.upper()
            print(f"{how}{by}: {name} ({tried.seconds:.0f} s, {tried.ways})", flush=True)

    def _try(self, room: str, mutant: Mutant) -> Tried:
        tried = Tried(named(mutant), "unreached")
        if not differences(SOURCES, mutant):  # Python makes the same of both
            tried.how = "equivalent"
            return tried
        place = place_of(SOURCES, mutant)
        known = [
            one
            for name, one in self.map.known.items()
            if name in self.items and belongs(name, room)
        ]
        if place in self.early and not any(place in one.reached for one in known):
            place = None  # it has had its effect
        able = order(known, mutant.file, place, self.kills)
        left = self.given.seconds
        for ranks in (False, True):
            own = [one for one in able if one.ranks == ranks]
            tests = self._with_all_parameters(own)
            if not tests:
                continue
            before = cpu_seconds()
            ended = self._ended(mutant, place, tests, left, tried.ways)
            left = max(left - (cpu_seconds() - before), self.given.seconds / 10)
            tried.how = ended.how if ended.how != "passed" or tried.how != "stopped" else "stopped"
            tried.test = ended.test
            if ended.noticed:
                break
        return tried

    def _with_all_parameters(self, known: Sequence[Known]) -> list[str]:
        """Those in the map in their order, then the others of the same test functions."""
        first = [one.test for one in known]
        place = {one.function: index for index, one in reversed([*enumerate(known)])}
        taken = set(first)
        rest = [
            (place[function_of(name)], index, name)
            for index, name in enumerate(self.items)
            if name not in taken and function_of(name) in place
        ]
        return first + [name for *_, name in sorted(rest)]

    def _ended(
        self, mutant: Mutant, place: str | None, tests: list[str], seconds: float, ways: list[str]
    ) -> Ended:
        early = place is None or place in self.early
        if not self.given.anew:
            ended = self._swapped(mutant, tests, seconds)
            if ended is not None and (ended.noticed or not early):
                ways.append("swapped")
                return ended
        ways.append("anew")
        return self.anew.ask(mutant, tests, seconds, max(map(self._usual, tests)))

    def _swapped(self, mutant: Mutant, tests: list[str], seconds: float) -> Ended | None:
        right = (SOURCES / mutant.file).read_text()
        self.tree.put(mutant.file, mutated(SOURCES, mutant))

        def work(teller: Teller) -> None:
            if not self.library.swap(mutant):
                return teller.ends("impossible")
            self.tree.come_first()
            return self.session.run(
                [self.items[one] for one in tests], teller, seconds, self._usual
            )

        ended = watched(work, self.folder / "scratch", seen=self.given.verbose)
        self.tree.put(mutant.file, right)
        return None if ended.how == "impossible" else ended

    def _usual(self, test: str) -> float:
        """The seconds that a test takes, or else the longest of the same function."""
        own = self.map.known.get(test)
        if own is not None:
            return own.seconds
        alike = [o.seconds for o in self.map.known.values() if o.function == function_of(test)]
        return max(alike, default=USUAL)


def _import_all(rooms: Sequence[str]) -> None:
    """Modules that are imported on first use would come from the right files later."""
    import importlib

    import natgrad

    if Path(natgrad.__file__).parent != SOURCES:
        sys.exit(
            f"natgrad is imported from {Path(natgrad.__file__).parent} but mutants are made of "
            f"{SOURCES}: put {SOURCES.parent} into PYTHONPATH."
        )
    for file in (file for room in rooms for file in sources_of(room)):
        parts = Path(file).with_suffix("").parts
        name = ".".join(("natgrad", *(part for part in parts if part != "__init__")))
        try:
            importlib.import_module(name)
        except ImportError as error:  # of a library that is not there: its mutants are made anew
            print(f"{name} cannot be imported ({error})", flush=True)


def named(mutant: Mutant) -> str:
    return f"{mutant.file} {mutant.line} {mutant.index}: {mutant.what}"


def chosen(given: argparse.Namespace) -> dict[str, list[Mutant]]:
    """The mutants of each room."""
    rooms = list(ROOMS) if given.room == "all" else given.room.split(",")
    found = {}
    for room in rooms:
        every = [one for file in sources_of(room) for one in mutants_of(SOURCES, file)]
        if given.only:
            every = [one for one in every if f"{one.file}:{one.line}" in given.only]
            found[room] = every
        else:
            count = min(given.count, len(every))
            found[room] = random.Random(f"{room} {given.seed}").sample(every, count)
    return found


def table(results: dict[str, Tried], mutants: dict[str, list[Mutant]]) -> str:
    """The score is that of the mutants that change something."""
    rows = [
        "| room | mutants | noticed | equivalent | survived | score |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    alive: list[str] = []
    sums = [0, 0, 0, 0]
    for room, own in mutants.items():
        tried = [results[named(one)] for one in own if named(one) in results]
        if not tried:
            continue
        dead = sum(one.noticed for one in tried)
        same = sum(one.how == "equivalent" for one in tried)
        counts = [len(tried), dead, same, len(tried) - dead - same]
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        rows.append(row(f"`{room}`", counts))
        alive += [f"{o.mutant} ({o.how})" for o in tried if not o.noticed and o.how != "equivalent"]
    return "\n".join([*rows, row("all", sums), "", *alive])


def row(name: str, counts: list[int]) -> str:
    many, dead, same, _ = counts
    score = f"{dead / (many - same):.0%}" if many > same else ""
    return f"| {name} | {' | '.join(map(str, counts))} | {score} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("--room", default="all", help=f"all, or some of {','.join(ROOMS)}")
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=8, help="of parameters, each N-th, mapped")
    parser.add_argument("--seconds", type=float, default=120.0, help="of tests, for one mutant")
    parser.add_argument("--again", action="store_true", help="try those that have survived")
    parser.add_argument("--anew", action="store_true", help="import anew for each mutant")
    parser.add_argument("--only", nargs="*", default=[], help="mutants of these lines, file:line")
    parser.add_argument("--verbose", action="store_true", help="what the tests print")
    parser.add_argument("--results", type=Path, default=Path("mutation.jsonl"))
    given = parser.parse_args()
    rooms = list(ROOMS) if given.room == "all" else given.room.split(",")
    if unknown := set(rooms) - set(ROOMS):
        parser.error(f"--room is {given.room} but {unknown} are none of {', '.join(ROOMS)}.")
    import numpy
    import torch
    import torch.distributed.checkpoint

    assert numpy, "torch needs it"
    torch.set_num_threads(1)  # a process that has threads cannot be forked
    given.results = given.results.resolve()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(TESTS.parent)
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="natgrad-mutants-") as name:
        folder = Path(name).resolve()
        trials = Trials(given, folder, Anew(folder))
        code = trials.collect(rooms)
    if code == 0:
        print(table(trials.results, chosen(given)))
    return code


if __name__ == "__main__":
    sys.exit(main())
