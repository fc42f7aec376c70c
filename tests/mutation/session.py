"""The tests, collected once: pytest hands them over instead of running them, and they are run in
forked processes, each of which has its own small change of the library."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mutation.processes import Teller, cpu_seconds
from mutation.rooms import TESTS

# A test that takes so many times its seconds, and so many more, hangs: others use the machine, too.
SLOWER, PATIENCE = 20.0, 40.0


class Collected:
    """A plugin of pytest: it collects, and then ``work`` has the tests."""

    def __init__(self, work: Callable[[list[pytest.Item]], None]) -> None:
        self.work = work
        self.failed = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("Some tests cannot be collected.")
        self.work(session.items)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def run(
        self,
        items: Sequence[pytest.Item],
        teller: Teller,
        seconds: float,
        usual: Callable[[str], float],
    ) -> None:
        """One after the other, in this process, up to the first that fails, or until so many
        seconds of processors have gone. ``usual``: what a test takes."""
        end = cpu_seconds() + seconds
        for item, after in zip(items, [*items[1:], None], strict=True):
            teller.begins(item.nodeid, PATIENCE + SLOWER * usual(item.nodeid))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed:
                return teller.ends("failed", self.failed)
            if cpu_seconds() > end and after is not None:
                return teller.ends("stopped", item.nodeid)
        return teller.ends("passed")


class Chosen:
    """A plugin of pytest that runs these tests alone, in this order, in a process that imports and
    collects all anew."""

    def __init__(
        self, tests: Sequence[str], teller: Teller, seconds: float, usual: Callable[[str], float]
    ) -> None:
        self.place = {name: index for index, name in enumerate(tests)}
        self.inner = Collected(lambda items: self.inner.run(items, teller, seconds, usual))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        able = [item for item in items if item.nodeid in self.place]
        items[:] = sorted(able, key=lambda item: self.place[item.nodeid])


def collect(paths: Sequence[str], scratch: Path, plugins: Sequence[object]) -> int:
    """Call pytest, without the tests that start commands or need other libraries. Ranks are forked
    from the process of a test, with the change that it has."""
    os.environ["NATGRAD_TEST_RANKS"] = "fork"
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
    options += ["-m", "not slow and not peers", f"--rootdir={TESTS.parent}"]
    options += [f"--basetemp={scratch / 'pytest'}"]
    return int(pytest.main([*options, *paths], plugins=list(plugins)))
