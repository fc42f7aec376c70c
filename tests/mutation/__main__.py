"""``python -m mutation``: of how many small wrong changes do the tests of the same room say so?

    make mutation COUNT=25            so many mutants of each room, the same ones for the same SEED
    make mutation ROOM=linalg SEED=3

Results are kept in ``mutation.jsonl``: an interrupted run goes on where it was. A mutant is tried
on the tests of its room (`ROOMS`) that reach its function (`mutation.reached`), up to the first one
that fails: those that have failed most often come first. One that no test reaches survives.
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mutation.mutants import Mutant, mutants_of, mutated
from mutation.reached import Chosen, Reached, Recorder, function_of, order

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "natgrad"
ROOMS = {
    "linalg": ["unit/linalg"],
    "layers": ["contracts/test_layers.py", "contracts/test_recurrent.py", "unit/layers"],
    "structures": [
        "unit/structures",
        "contracts/test_structures.py",
        "contracts/test_geometry.py",
    ],
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


def forked(work: Callable[[], int]) -> int:
    """The exit code of some work in a process of its own, which has torch already and imports
    natgrad anew."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return status
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = 1
    try:
        os.chdir(TESTS.parent)
        code = work()
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def run_tests(paths: list[str], plugin: object, sample: int) -> int:
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--sample={sample}"]
    options += ["-m", "not slow and not distributed and not peers", f"--rootdir={TESTS.parent}"]
    code = int(pytest.main([*options, *paths], plugins=[plugin]))
    return 0 if code == 5 else code  # none of them can be run here


def survey(room: str, sample: int, path: Path) -> Reached:
    """Run the tests of a room as it is, once."""

    def work() -> int:
        recorder = Recorder(SOURCES / room, SOURCES)
        code = run_tests([str(TESTS / p) for p in ROOMS[room]], recorder, sample)
        if not code:
            recorder.write(path)
        return code

    if not path.exists() and forked(work):
        sys.exit(f"The tests of {room} fail without any change: mend them first.")
    found: Reached = json.loads(path.read_text())
    return found


def survives(mutant: Mutant, names: list[str], sample: int) -> tuple[bool, str]:
    """And which test has noticed it. One that takes too long is noticed by that."""
    if not names:
        return True, ""
    note = Path(tempfile.mkstemp()[1])

    def work() -> int:
        sys.meta_path.insert(0, Mutated(mutant))
        chosen = Chosen(names)
        files = list(dict.fromkeys(name.split("::")[0] for name in names))
        code = run_tests(files, chosen, sample)
        note.write_text(chosen.failed)
        return code

    code = forked(work)
    said = note.read_text()
    note.unlink()
    return code == 0, said


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
    kills: dict[str, int] = {}
    if given.results.exists():
        for line in map(json.loads, given.results.read_text().splitlines()):
            results[line["mutant"]] = line["survives"]
            kills[line.get("by", "")] = kills.get(line.get("by", ""), 0) + 1
    rooms = list(ROOMS) if given.room == "all" else [given.room]
    chosen = {room: sampled(room, given.count, given.seed) for room in rooms}
    for room, mutants in chosen.items():
        path = given.results.with_suffix(f".{room}-{given.sample}.json")
        reached = survey(room, given.sample, path)
        print(f"{room}: {len(reached)} tests pass without a change", flush=True)
        for mutant in mutants:
            if repr(mutant) in results:
                continue
            start = time.monotonic()
            names = order(reached, function_of(SOURCES, mutant), kills)
            alive, by = survives(mutant, names, given.sample)
            results[repr(mutant)] = alive
            kills[by] = kills.get(by, 0) + 1
            word = "SURVIVES" if alive else "killed"
            seconds = f"{len(names)} tests, {time.monotonic() - start:.0f} s"
            print(f"{word} {mutant.file}:{mutant.line} {mutant.what} ({seconds})", flush=True)
            with given.results.open("a") as file:
                line = {"mutant": repr(mutant), "survives": alive, "by": by}
                file.write(json.dumps(line) + "\n")
    print(table(results, chosen))


if __name__ == "__main__":
    main()
