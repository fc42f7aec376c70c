"""A fixed sample of what ``make fuzz`` tries in one process, and what has failed once."""

import pytest
from hypothesis import given

from fuzz.known import ONE_PROCESS
from fuzz.one_process import CASES, run


@pytest.mark.slow
@given(CASES)
def test_a_step_is_that_of_dense_blocks(case):
    run(*case)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_what_has_failed_once(name):
    run(*ONE_PROCESS[name])
