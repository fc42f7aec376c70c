"""Items of the papers that train on several processes, in seconds; and what one of them notes."""

import pytest

from natgrad import CommOpt, MemOpt
from natgrad.comm import launch
from natgrad.lab.reproduce import rank_profiles
from test_papers import ON_PROCESSES, measure_in_seconds


@pytest.fixture(autouse=True)
def _quick_processes(world, monkeypatch):
    """Forked from one that has imported torch."""

    def run(function, *args, ranks):
        return world.run(function, *args, ranks=ranks)

    monkeypatch.setattr(launch, "run", run)


@pytest.mark.parametrize("name", ON_PROCESSES)
def test_items_on_processes(name, tmp_path):
    measure_in_seconds(name, tmp_path)


def test_a_rank_notes_what_the_plan_says():
    """Bytes by purpose and memory, of both ends of Hybrid; and the weights, which are the same."""
    placements = (("comm", CommOpt()), ("mem", MemOpt()))
    job = rank_profiles.RankJob(placements, rounds=1, batch=4, depth=0, seed=3)
    ranks = rank_profiles.measured(job, 2)
    for one in ranks:
        for found in one.values():
            for kind in rank_profiles.KINDS:
                assert found["sent"][kind] == pytest.approx(found["planned"][kind])
            assert found["kept"] == found["planned_kept"] > 0
            assert found["weights"] == pytest.approx(ranks[0]["comm"]["weights"], rel=1e-4)
            assert found["seconds"]["refresh"]["refresh"] > 0
            assert found["seconds"]["stale"].get("refresh", 0.0) < 0.1
        assert "gradients" not in one["comm"]["sent"]["stale"]
        assert one["mem"]["sent"]["stale"]["gradients"] > 0
        assert one["comm"]["work"] > one["mem"]["work"]
