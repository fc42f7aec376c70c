"""The benchmark of floors trains what it says."""

import json
import math

import pytest

from benchmarks import floors
from natgrad import NaturalMuon


@pytest.mark.parametrize("task", floors.STEPS)
def test_tasks_are_those_of_the_comparison_and_shorter(task):
    asked = floors.settings(task, 0.01, 2)
    assert (asked.steps, asked.seed, asked.lr) == (floors.STEPS[task], 2, 0.01)
    assert asked.steps <= floors.TASKS[task].task().steps
    assert 0 < asked.fit_samples <= floors.SAMPLES


def test_floors_are_what_the_optimizer_is_given(monkeypatch):
    asked, made = [], floors.natgrad.NaturalMuon

    def noted(*args, **more):
        asked.append(more["geometry"].floor)
        return made(*args, **more)

    monkeypatch.setattr(floors.natgrad, "NaturalMuon", noted)
    monkeypatch.setitem(floors.STEPS, "autoencoder-128", 3)
    losses = {
        floor: floors.train(floors.settings("autoencoder-128", 0.01, 0), floor)
        for floor in (0.002, 1.0)
    }
    assert asked == [0.002, 1.0]
    assert all(map(math.isfinite, losses.values()))
    assert losses[0.002] != losses[1.0]


def test_finished_runs_are_not_done_again(tmp_path, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(
        floors, "train", lambda asked, floor: trained.append(asked) or 1 + asked.seed
    )
    out = tmp_path / "floors.json"
    arguments = ["floors", "--tasks", "digits-128", "--floors", "0.1", "--seeds", "2"]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(out), "--markdown"])
    for _ in range(2):
        floors.main()
    assert len(trained) == 2
    assert sorted(json.loads(out.read_text()).values()) == [1, 2]
    assert "| digits-128, 100 steps | 1.5 ± 0.5 |" in " ".join(capsys.readouterr().out.split())


def test_the_default_is_among_them():
    assert NaturalMuon.__init__.__defaults__
    assert floors.natgrad.Spectral().floor in floors.FLOORS
