"""What every test shares: one thread a process, the same random numbers in every run, and which of
its parameters are taken."""

import gc
import multiprocessing
import os
from types import SimpleNamespace

import pytest

# transformers read this when they are imported: no test asks the network for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
# pytest-xdist starts one process a core; more threads than that only wait for each other. The
# commands that tests start read it from the environment.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

import natgrad
from distributed.world import GARBAGE, PRELOAD, START
from natgrad.comm import launch
from parameter_samples import (
    all_combinations,
    all_pairs,
    function_of,
    pairs_of,
    sampled,
    skips_itself,
)

torch.set_num_threads(1)
# All that loads on first use: some tests forget what is imported while they run.
ALL = [getattr(natgrad, name) for name in natgrad.__all__]


def pytest_addoption(parser):
    parser.addoption(
        "--sample",
        type=int,
        default=1,
        metavar="N",
        help="of every test function, only each N-th of its parameters: always the same ones, "
        "and at least one (for a quick look; 1, the default, runs all)",
    )
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="of tests that are marked with pairs, all combinations of their parameters, and not "
        "only as many as each two values need to meet",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """After -k and -m, so that what they ask for is there: the pairs are those of what is left."""
    every = config.getoption("--sample")
    if every < 1:
        raise pytest.UsageError(f"--sample is {every} but must be at least 1.")
    take(config, items, pairs_of(items, all_combinations=config.getoption("--all-combinations")))
    if every > 1:
        take(config, items, sampled([function_of(item) for item in items], every))
    if (workers := getattr(config, "workerinput", {}).get("workercount", 1)) > 1:
        items[:] = long_ones_first(items, workers)


def take(config, items, chosen):
    """Of ``items`` those at the places in ``chosen``."""
    kept = set(chosen)
    if len(kept) == len(items):
        return
    config.hook.pytest_deselected(
        items=[item for index, item in enumerate(items) if index not in kept]
    )
    items[:] = [item for index, item in enumerate(items) if index in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A case that skips itself would be one that has every pair of its values alone."""
    report = yield
    if skips_itself(item, report):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} is marked with pairs and skips itself, so that other cases are left "
            "out for the pairs that it has: say which cases mean nothing by pairs(unless=...), "
            "and what is missing on this machine by skipif."
        )
    return report


def long_ones_first(items, workers):
    """Every worker begins with an equal share of the tests that start processes: with such a one at
    the end of the run, all others would wait for it. Neighbours, which share fixtures, stay
    together. (Each worker gets an equal part of the list, from its beginning to its end.)"""
    long = [item for item in items if "distributed" in item.path.parts or _is_slow(item)]
    known = set(map(id, long))
    short = [item for item in items if id(item) not in known]
    found = []
    for worker in range(workers):
        for some in (long, short):
            first, end = (len(some) * k // workers for k in (worker, worker + 1))
            found += some[first:end]
    return found


def _is_slow(item):
    return item.get_closest_marker("slow") is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Tests that are collected are no garbage, nor is torch: collections of garbage, some of which
    runs ask for, need not look at them, neither now nor later. The others come less often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(*GARBAGE)


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked():
    """Ranks that the library starts come from the server that those of `World` come from: a new
    interpreter takes seconds to import torch. ``unit/comm/test_launch.py`` has new ones."""
    context = multiprocessing.get_context(START)
    context.set_forkserver_preload(PRELOAD)
    started = SimpleNamespace(**{**vars(multiprocessing), "get_context": lambda _: context})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessing", started)
        yield


@pytest.fixture(scope="session")
def in_pairs(pytestconfig):
    """``in_pairs(A, B, C)``, for loops inside of a test, is what ``pairs`` is for parameters."""
    return all_combinations if pytestconfig.getoption("--all-combinations") else all_pairs


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch before each test, so that a test gives the same numbers alone and in company."""
    value = 0
    # torch.manual_seed() also notes, for each kind of GPU there might be, from where it was called.
    torch.default_generator.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def _unchanged_defaults():
    """A test that changes a default of torch would change the tests after it."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    assert torch.get_default_dtype() == dtype, "the test changed torch's default dtype"
    assert torch.get_num_threads() == threads, "the test changed torch's number of threads"
