"""``python -m mutation``: of how many small wrong changes do the tests of the same room say so?

    make mutation COUNT=25            so many mutants of each room, the same ones for the same SEED
    make mutation ROOM=linalg SEED=3

Results are kept in ``mutation.jsonl``: an interrupted run goes on where it was. A mutant is tried
on the test file with its file's name first, then on all tests of its room (`ROOMS`).
"""

import argparse
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

from mutation.mutants import Mutant, mutants_of, mutated

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "natgrad"
ROOMS = {
    "linalg": ["unit/linalg"],
    "layers": ["contracts/test_layers.py", "contracts/test_recurrent.py", "unit/layers"],
    "structures": ["contracts/test_structures.py", "contracts/test_geometry.py"],
    "inverses": ["unit/inverses", "contracts/test_inverses.py"],
    "capture": ["unit/capture", "test_compat.py", "test_robustness.py"],
    "kfac": ["unit/kfac", "test_invariance.py", "test_state.py", "test_robustness.py"],
    "placement": ["unit/placement"],
    "comm": ["unit/comm"],
}
SECONDS = 240  # of a processor, for one mutant; one that runs longer is noticed by that


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from other source."""

    def __init__(self, mutant: Mutant) -> None:
        self.source = mutated(SOURCES, mutant)
        self.path = SOURCES / mutant.file
        parts = ["natgrad", *Path(mutant.file).with_suffix("").parts]
        self.package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.package else parts)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(
            name,
            self.path,
            loader=self,
            submodule_search_locations=[str(self.path.parent)] if self.package else None,
        )

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def tests_of(mutant: Mutant) -> list[list[str]]:
    room, *rest = Path(mutant.file).parts
    own = TESTS / "unit" / room / Path(*rest[:-1]) / f"test_{rest[-1]}"
    stages = [[str(own)]] if own.exists() else []
    stages.append([str(TESTS / path) for path in ROOMS[room]])
    return stages


def survives(mutant: Mutant, sample: int) -> bool:
    """In a process of its own, which has torch already and imports natgrad anew."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return status == 0
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = 1
    try:
        import pytest

        sys.meta_path.insert(0, Mutated(mutant))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--sample={sample}"]
        options += ["-m", "not slow and not distributed and not peers", f"--rootdir={TESTS.parent}"]
        os.chdir(TESTS.parent)
        for stage in tests_of(mutant):
            code = int(pytest.main([*options, *stage]))
            if code == 5:  # all of them start processes
                code = 0
            if code:
                break
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def sampled(room: str, count: int, seed: int) -> list[Mutant]:
    files = sorted(p.relative_to(SOURCES) for p in (SOURCES / room).rglob("*.py"))
    every = [one for file in files for one in mutants_of(SOURCES, str(file))]
    return random.Random(f"{room} {seed}").sample(every, min(count, len(every)))


def table(results: dict[str, bool], chosen: dict[str, list[Mutant]]) -> str:
    rows = ["| room | mutants | killed | score |", "|---|---:|---:|---:|"]
    for room, mutants in chosen.items():
        known = [results[repr(one)] for one in mutants if repr(one) in results]
        if known:
            dead = known.count(False)
            rows.append(f"| `{room}` | {len(known)} | {dead} | {dead / len(known):.0%} |")
    alive = [one for some in chosen.values() for one in some if results.get(repr(one))]
    rows += ["", *(f"{one.file}:{one.line}: {one.what}" for one in alive)]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("--room", choices=["all", *ROOMS], default="all")
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=8, help="of parameters of tests, each N-th")
    parser.add_argument("--results", type=Path, default=Path("mutation.jsonl"))
    given = parser.parse_args()
    import numpy
    import torch
    import torch.distributed.checkpoint

    assert numpy, "torch needs it"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    results: dict[str, bool] = {}
    if given.results.exists():
        lines = map(json.loads, given.results.read_text().splitlines())
        results = {line["mutant"]: line["survives"] for line in lines}
    rooms = list(ROOMS) if given.room == "all" else [given.room]
    chosen = {room: sampled(room, given.count, given.seed) for room in rooms}
    for room in rooms:
        unchanged = Mutant(f"{room}/__init__.py", -1, 0, "nothing")
        if not survives(unchanged, given.sample):
            sys.exit(f"The tests of {room} fail without any change: mend them first.")
        print(f"{room}: the tests pass without a change", flush=True)
    # All rooms in turns, so that a short run says something of each.
    for turn in range(given.count):
        for mutants in chosen.values():
            if turn >= len(mutants) or repr(mutants[turn]) in results:
                continue
            mutant, start = mutants[turn], time.monotonic()
            results[repr(mutant)] = survives(mutant, given.sample)
            word = "SURVIVES" if results[repr(mutant)] else "killed"
            print(
                f"{word} {mutant.file}:{mutant.line} {mutant.what} "
                f"({time.monotonic() - start:.0f} s)",
                flush=True,
            )
            with given.results.open("a") as file:
                line = {"mutant": repr(mutant), "survives": results[repr(mutant)]}
                file.write(json.dumps(line) + "\n")
    print(table(results, chosen))


if __name__ == "__main__":
    main()
