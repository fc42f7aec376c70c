"""A fixed sample of what ``make fuzz`` tries on two and three ranks."""

import pytest

from fuzz.worlds import drawn, judge


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_one_process(world, ranks):
    judge(world, ranks, drawn(ranks, 12))
