"""What every test shares: one thread a process, and the same random numbers in every run."""

import os

import pytest
import torch

# transformers read this when they are imported: no test asks the network for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
# pytest-xdist starts one process a core; more threads than that only wait for each other.
torch.set_num_threads(1)


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
