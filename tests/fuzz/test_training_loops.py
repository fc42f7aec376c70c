"""A fixed sample of training loops in which anything happens."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from fuzz.training_loops import Loops


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_weights_are_those_of_a_quiet_loop():
    some = settings(settings.get_profile("ci"), max_examples=20, stateful_step_count=15)
    run_state_machine_as_test(Loops, settings=some)
