"""What every test shares: one thread a process, the same random numbers in every run, a sample."""

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

from distributed.world import PRELOAD
from natgrad.comm import launch
from parameter_samples import sampled

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--sample",
        type=int,
        default=1,
        metavar="N",
        help="of every test function, only each N-th of its parameters: always the same ones, "
        "and at least one (for a quick look; 1, the default, runs all)",
    )


def pytest_collection_modifyitems(config, items):
    every = config.getoption("--sample")
    if every < 1:
        raise pytest.UsageError(f"--sample is {every} but must be at least 1.")
    if every > 1:
        kept = set(sampled([function_of(item) for item in items], every))
        config.hook.pytest_deselected(
            items=[item for index, item in enumerate(items) if index not in kept]
        )
        items[:] = [item for index, item in enumerate(items) if index in kept]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Tests that are collected are no garbage, nor is torch: collections of garbage, some of which
    runs ask for, need not look at them, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def function_of(item: pytest.Item) -> str:
    """What all parameters of a test have in common."""
    return item.nodeid.partition("[")[0]


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked():
    """Ranks that the library starts come from the server that those of `World` come from: a new
    interpreter takes seconds to import torch. ``unit/comm/test_launch.py`` has new ones."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started = SimpleNamespace(**{**vars(multiprocessing), "get_context": lambda _: context})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessing", started)
        yield


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch before each test, so that a test gives the same numbers alone and in company."""
    value = 0
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def _unchanged_defaults():
    """A test that changes a default of torch would change the tests after it."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    assert torch.get_default_dtype() == dtype, "the test changed torch's default dtype"
    assert torch.get_num_threads() == threads, "the test changed torch's number of threads"
