"""A comparison on several processes: all of them go the same way, and one of them writes."""

import os
import signal
from dataclasses import replace
from unittest.mock import patch

import pytest

from natgrad.errors import SettingError
from natgrad.lab.compare import Comparison, compare
from natgrad.lab.compare.progress_bar import ComparisonLines
from natgrad.lab.train.training import Training
from unit.lab.compare import sample_setups as made
from unit.lab.train import digit_runs as runs

pytestmark = pytest.mark.distributed

ASKED = made.setup(trials=1, seeds=1, task=made.task(precision="float64"))


def on_ranks(folder, resume=False, asked=ASKED):
    """What is told, and what is found."""
    said = []
    with runs.made_up_digits():
        return said, compare(asked, folder, ComparisonLines(said.append), resume=resume)


def plain(found):
    """All that does not depend on time."""
    return [
        (run.folder, run.lr, run.status, run.steps)
        for one in found.entries
        for run in (*one.trials, *one.runs)
    ]


def finals(found):
    return [run.final for one in found.entries for run in (*one.trials, *one.runs)]


def test_two_processes_go_the_way_of_one(world, tmp_path):
    _, alone = on_ranks(tmp_path / "one")
    (told, first), (silent, second) = world.run(on_ranks, tmp_path / "two", ranks=2)
    assert len(told) == 4
    assert silent == []
    assert first == second == Comparison.read(tmp_path / "two")
    assert plain(first) == plain(alone)
    assert finals(first) == pytest.approx(finals(alone), rel=1e-9)
    assert (first.facts["processes"], alone.facts["processes"]) == ("2", "1")


def interrupted(folder):
    """A signal to one of them, in the second run."""
    import torch.distributed as dist

    step, left = Training.step, iter(range(1000))

    def noted(self, *args):
        if next(left) == 10 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    with patch.object(Training, "step", noted):
        _, found = on_ranks(folder)
    return found.signal, plain(found)


def test_a_signal_to_one_stops_all(world, tmp_path):
    stopped = world.run(interrupted, tmp_path / "parts", ranks=2)
    assert stopped[0] == stopped[1]
    assert stopped[0][0] == signal.SIGTERM
    assert len(stopped[0][1]) == 1
    again = world.run(on_ranks, tmp_path / "parts", True, ranks=2)
    _, whole = world.run(on_ranks, tmp_path / "whole", ranks=2)[0]
    assert all(plain(found) == plain(whole) for _, found in again)
    assert all(finals(found) == finals(whole) for _, found in again)


def refused(folder):
    with pytest.raises(SettingError) as error:
        on_ranks(folder, True, replace(ASKED, trials=3))
    return str(error.value), error.value.everywhere


def test_what_is_refused_is_refused_by_all(world, tmp_path):
    on_ranks(tmp_path)
    for said, everywhere in world.run(refused, tmp_path, ranks=2):
        assert said.startswith("trials is 3 but the comparison in ")
        assert everywhere
