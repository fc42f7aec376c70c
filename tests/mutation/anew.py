"""Mutants of what has its effect when it is imported: tried in processes that import all anew."""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from mutation.mutants import Mutant, mutated
from mutation.processes import Ended, Teller, watched
from mutation.rooms import SOURCES
from mutation.session import Chosen, collect


class ChangedTree:
    """A copy of the library for the interpreters that tests start, with one mutant in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = time.time()
        shutil.copytree(SOURCES, folder / "natgrad")

    def put(self, file: str, text: str) -> None:
        path = self.folder / "natgrad" / file
        path.write_text(text)
        self.written += 10  # compiled files are compared by seconds
        os.utime(path, (self.written, self.written))

    def come_first(self) -> None:
        """In this process, and those that it starts."""
        sys.path.insert(0, str(self.folder))
        known = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{self.folder}{os.pathsep}{known}"


class Anew:
    """A process that knows torch and nothing of natgrad, forked before anything is collected."""

    def __init__(self, folder: Path) -> None:
        self.pipe, theirs = Pipe()
        if os.fork():
            theirs.close()
            return
        self.pipe.close()
        try:
            self._serve(theirs, folder)
        finally:
            os._exit(0)

    def ask(self, mutant: Mutant, tests: Sequence[str], seconds: float, usual: float) -> Ended:
        self.pipe.send((mutant, list(tests), seconds, usual))
        answer = self.pipe.recv()
        assert isinstance(answer, Ended)
        return answer

    def _serve(self, pipe: Connection, folder: Path) -> None:
        tree = ChangedTree(folder / "anew")
        while True:
            try:
                mutant, tests, seconds, usual = pipe.recv()
            except EOFError:
                return
            right = (SOURCES / mutant.file).read_text()
            tree.put(mutant.file, mutated(SOURCES, mutant))
            pipe.send(self._ended(tree, tests, seconds, usual))
            tree.put(mutant.file, right)

    def _ended(
        self, tree: ChangedTree, tests: Sequence[str], seconds: float, usual: float
    ) -> Ended:
        scratch = tree.folder.with_name("scratch-anew")

        def work(teller: Teller) -> None:
            tree.come_first()
            chosen = Chosen(tests, teller, seconds, lambda _: usual)
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            code = collect(files, scratch, [chosen, chosen.inner])
            teller.ends("failed" if code else "passed", "(as tests are collected)")

        return watched(work, scratch)
