"""``python -m mutation``: of how many small wrong changes do the tests of the same room say so?

    make mutation COUNT=25            so many mutants of each room, the same ones for the same SEED
    make mutation ROOM=linalg SEED=3

Results are kept in ``mutation.jsonl``: an interrupted run goes on where it was, and ``--again``
tries those that have survived once more. A mutant is tried on the tests of its room (`ROOMS`) that
reach its function (`mutation.reached`), up to the first one that fails: those that have failed most
often come first. Which tests reach what is found with each ``--sample``-th of their parameters;
mutants are tried on all parameters, for ``--seconds``. One that no test reaches survives.
"""

import argparse
import json
import os
import random
import shutil
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
    "kfac": [
        "unit/kfac",
        "unit/test_errors.py",
        "test_invariance.py",
        "test_state.py",
        "test_robustness.py",
    ],
    "placement": ["unit/placement"],
    "comm": ["unit/comm"],
}
# Rooms whose tests start ranks: what is called in those is not recorded, so that all such tests are
# tried on every mutant.
RANKS = ("comm",)
HANGS = 90  # seconds that a single test may last; a mutant that takes longer is noticed by that


def changed_tree(mutant: Mutant, folder: Path) -> None:
    """A copy of the library with that change, compiled files included."""
    shutil.copytree(SOURCES, folder / "natgrad")
    (folder / "natgrad" / mutant.file).write_text(mutated(SOURCES, mutant))


def forked(work: Callable[[], int], seconds: float) -> int:
    """The exit code of some work in a process of its own, which has torch already and imports
    natgrad anew. What takes longer is killed with the ranks that it has started."""
    pid = os.fork()
    if pid:
        end, ended = time.monotonic() + seconds, (0, 0)
        try:
            while not ended[0] and time.monotonic() < end:
                time.sleep(0.05)
                ended = os.waitpid(pid, os.WNOHANG)
        finally:
            if not ended[0]:
                os.killpg(pid, signal.SIGKILL)
                ended = os.waitpid(pid, 0)
        return ended[1]
    os.setsid()
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


def run_tests(room: str, paths: list[str], plugin: object, sample: int) -> int:
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--sample={sample}"]
    marks = "not slow and not peers" + " and not distributed" * (room not in RANKS)
    options += ["-m", marks, f"--rootdir={TESTS.parent}"]
    code = int(pytest.main([*options, *paths], plugins=[plugin]))
    return 0 if code == 5 else code  # none of them can be run here


def survey(room: str, sample: int, path: Path) -> Reached:
    """Run the tests of a room as it is: all of them once, later those in files that have changed
    since."""
    known: Reached = {}
    failed = path.with_suffix(".failed")
    files = [file for name in ROOMS[room] for file in test_files(TESTS / name)]
    made = path.stat().st_mtime if path.exists() else 0.0
    if all(file.stat().st_mtime < made for file in (SOURCES / room).rglob("*.py")):
        known = json.loads(path.read_text())
        files = [file for file in files if file.stat().st_mtime > made]
        again = {str(file.relative_to(TESTS.parent)) for file in files}
        known = {name: own for name, own in known.items() if name.split("::")[0] not in again}

    def work() -> int:
        recorder = Recorder(SOURCES / room, SOURCES)
        code = run_tests(room, list(map(str, files)), recorder, sample)
        if not code:
            path.write_text(json.dumps(known | recorder.found))
        failed.write_text(recorder.failed)
        return code

    if files and forked(work, float("inf")):
        first = failed.read_text() if failed.exists() else ""
        sys.exit(f"Tests of {room} fail without any change, {first or 'as they are collected'}.")
    found: Reached = json.loads(path.read_text())
    return found


def test_files(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def survives(room: str, mutant: Mutant, names: list[str], seconds: float) -> tuple[bool, str]:
    """And which test has noticed it. One with which a test hangs is noticed by that."""
    if not names:
        return True, ""
    with tempfile.TemporaryDirectory(prefix="natgrad-mutant-") as folder:
        note = Path(folder) / "failed"

        def work() -> int:
            changed_tree(mutant, Path(folder))
            sys.path.insert(0, folder)
            # For the ranks that tests start.
            os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            chosen = Chosen(names, seconds)
            files = list(dict.fromkeys(name.split("::")[0] for name in names))
            code = run_tests(room, files, chosen, sample=1)
            note.write_text(chosen.failed)
            return 0 if chosen.stopped and not chosen.failed else code

        code = forked(work, seconds + HANGS)
        return code == 0, note.read_text() if note.exists() else ""


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
    parser.add_argument("--sample", type=int, default=8, help="of parameters, each N-th, mapped")
    parser.add_argument("--seconds", type=float, default=120.0, help="of tests, for one mutant")
    parser.add_argument("--again", action="store_true", help="try those that have survived")
    parser.add_argument("--results", type=Path, default=Path("mutation.jsonl"))
    given = parser.parse_args()
    import numpy
    import torch
    import torch.distributed.checkpoint

    assert numpy, "torch needs it"
    torch.set_num_threads(1)
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.default_int_handler)
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
            if repr(mutant) in results and not (given.again and results[repr(mutant)]):
                continue
            start = time.monotonic()
            names = order(reached, function_of(SOURCES, mutant), kills)
            alive, by = survives(room, mutant, names, given.seconds)
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
