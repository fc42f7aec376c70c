"""Ranks that are started here: what they return, and what becomes of those that fail."""

import multiprocessing
import time

import pytest

from natgrad.comm import launch
from natgrad.comm.launch import RankError, run
from natgrad.errors import SettingError
from unit.comm import launch_functions

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("anew", [False, True])
def test_answers_come_in_the_order_of_ranks(monkeypatch, anew):
    """In new interpreters, as outside of tests, and in those of tests. All of them leave."""
    if anew:
        monkeypatch.setattr(launch, "multiprocessing", multiprocessing)
    answers = run(launch_functions.about, "word", ranks=2, threads=2)
    assert answers == [("word", 0, [0, 10], 2), ("word", 1, [0, 10], 2)]


def test_the_first_error_is_raised_and_nobody_is_waited_for():
    start = time.monotonic()
    with pytest.raises(SettingError, match=r"^This is wrong: do that\.$"):
        run(launch_functions.setting, ranks=2, timeout=200)
    assert time.monotonic() - start < 100


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("python", "Rank 0 of 1 failed with KeyError: 'missing'\nTraceback"),
        ("natgrad", "Rank 0 of 1 failed with TwoWordsError: onetwo\nTraceback"),
    ],
)
def test_errors_that_are_not_natgrad_s_or_cannot_be_pickled(kind, message):
    with pytest.raises(RankError) as error:
        run(launch_functions.other_error, kind, ranks=1)
    assert str(error.value).startswith(message)
    assert "in other_error" in str(error.value)


def test_a_rank_that_dies():
    with pytest.raises(RankError) as error:
        run(launch_functions.death, ranks=1)
    assert str(error.value) == (
        "Rank 0 of 1 ended with code 3 before it was done: look at what it printed, and whether "
        "memory ran out."
    )


@pytest.mark.parametrize(("ranks", "threads"), [(0, 1), (1, 0)])
def test_numbers_below_one(ranks, threads):
    with pytest.raises(SettingError) as error:
        run(launch_functions.death, ranks=ranks, threads=threads)
    assert str(error.value) == (
        f"ranks is {ranks} and threads is {threads} but both must be at least 1: pass such numbers."
    )
