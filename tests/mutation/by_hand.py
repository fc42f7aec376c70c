"""``python -m mutation.by_hand``: mistakes that somebody has made, or might, each with its test.

Random mutants (`mutation.__main__`) say how closely a room is watched. These here are chosen: what
an adversary has found in the library is put back into it, one mistake at a time, and the test that
stands for it must fail. The tests pass without any change first, or nothing is counted.

    python -m mutation.by_hand                 all of them; prints the table of docs/reliability.md
    python -m mutation.by_hand --only copies   those with such a case

A text that is to be replaced must be in its file exactly once: `test_by_hand` looks at that in
every run of the tests, so that this list does not fall behind the library.
"""

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mutation.mistakes import MISTAKES, Mistake
from mutation.processes import cpu_seconds, forked
from mutation.rooms import SOURCES, TESTS

SECONDS = 600.0  # that the tests of one mistake may take, on a machine that does other things


@dataclass
class Ended:
    """The first test that has failed, and how many have passed."""

    failed: str = ""
    passed: int = 0

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False):
            self.failed = self.failed or str(getattr(report, "nodeid", ""))
        elif getattr(report, "when", "") == "call" and getattr(report, "passed", False):
            self.passed += 1


def changed(mistake: Mistake) -> str:
    """The source of its file with the mistake in it."""
    text = (SOURCES / mistake.file).read_text()
    if text.count(mistake.right) != 1:
        sys.exit(
            f"{mistake.right!r} is {text.count(mistake.right)} times in {mistake.file} but must be "
            "there once: bring mutation/mistakes.py up to date."
        )
    return text.replace(mistake.right, mistake.wrong)


def tried(tests: tuple[str, ...], mistake: Mistake | None) -> Ended:
    """What the tests say of the library, with a mistake or as it is."""
    with tempfile.TemporaryDirectory(prefix="natgrad-mistake-") as name:
        folder = Path(name)
        note = folder / "note"

        def work() -> int:
            import pytest

            if mistake is not None:
                shutil.copytree(SOURCES, folder / "natgrad")
                (folder / "natgrad" / mistake.file).write_text(changed(mistake))
                sys.path.insert(0, name)
                known = os.environ.get("PYTHONPATH", "")
                os.environ["PYTHONPATH"] = f"{name}{os.pathsep}{known}"  # for ranks
            ended = Ended()
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            paths = [str(TESTS / test) for test in tests]
            code = int(
                pytest.main([*options, f"--rootdir={TESTS.parent}", *paths], plugins=[ended])
            )
            note.write_text(f"{ended.passed} {ended.failed}")
            return code

        code = forked(work, SECONDS)
        passed, _, failed = note.read_text().partition(" ") if note.exists() else ("0", "", "")
        if code and not failed:
            failed = "(it could not be run to its end)"
        return Ended(failed, int(passed))


def table(mistakes: list[Mistake]) -> str:
    """As in docs/reliability.md."""
    rows = ["| case | the mistake | test |", "|---|---|---|"]
    rows += [f"| {one.case} | {one.what} | `{one.test}` |" for one in mistakes]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation.by_hand", description=__doc__)
    parser.add_argument("--only", default="", help="cases with this in their name")
    given = parser.parse_args()
    import numpy
    import torch
    import torch.distributed.checkpoint

    assert numpy, "torch needs it"
    torch.set_num_threads(1)
    chosen = [one for one in MISTAKES if given.only in one.case]
    for one in chosen:
        changed(one)
    unnoticed = untried = 0
    for one in chosen:
        start = cpu_seconds()
        right = tried((one.test,), None)
        if right.failed or not right.passed:
            untried += 1
            print(f"{one.test} does not pass without any change ({right.failed})", flush=True)
            continue
        wrong = tried((one.test,), one)
        unnoticed += not wrong.failed
        word = f"noticed by {wrong.failed}" if wrong.failed else "NOT NOTICED"
        print(f"{one.case}: {one.what}: {word} ({cpu_seconds() - start:.0f} s of CPU)", flush=True)
    print(
        f"{len(chosen)} mistakes, {unnoticed} not noticed, {untried} not tried\n\n{table(chosen)}"
    )
    return min(unnoticed + untried, 1)


if __name__ == "__main__":
    sys.exit(main())
