"""The cost of optimizers is taken from whole cycles, and stages add up to a step."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import optimizer_cost
from benchmarks.workloads import Workload


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def found(monkeypatch):
    """On a clock that goes on by one at every look."""
    monkeypatch.setitem(optimizer_cost.WORKLOADS, "tiny", Workload(tiny, 4, (6,), 3))
    ticks = itertools.count()
    return optimizer_cost.tables("tiny", 2, lambda: float(next(ticks)))


def test_everybody_is_beside_the_faster_muon(found):
    pytest.importorskip("pytorch_optimizer")
    names = [row.name for row in found[0].rows]
    assert names == ["AdamW", "Muon", "Muon by torch", "SOAP", "NaturalMuon"]
    # A tick for a cycle: of five steps, or of ten. NaturalMuon's stages look at the clock, too.
    figures = [row.figure for row in found[0].rows]
    assert figures[:4] == pytest.approx([1.0, 1.0, 1.0, 0.5])
    assert figures[4] > 1
    # AdamW keeps two numbers a parameter, and its count of steps for each of six.
    parameters = sum(p.numel() for p in tiny().parameters())
    megabytes = (2 * 4 * parameters + 6 * 4) / 2**20
    assert found[0].rows[0].note.endswith(f", {megabytes:.1f} MB")
    model = tiny()
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    adamw.step()
    assert optimizer_cost.state_megabytes(adamw) == pytest.approx(megabytes)


def test_stages_are_all_there_and_add_up(found):
    rows = {row.name: row for row in found[1].rows}
    assert rows.keys() == {
        "statistics",
        "fold",
        "refresh",
        "whitening",
        "polar",
        "roots of factors",
        "momentum",
        "length",
        "copies and the rest",
        "AdamW for the rest",
        "forward, backward, update of weights",
    }
    assert all(row.figure > 0 for row in rows.values())
    shares = [float(row.note.removesuffix("%")) for row in rows.values()]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    # A look at the beginning and one at the end of each call: per cycle of 20 steps two layers'
    # stacks are whitened at every step, with the polar factor in between: two looks more. Each has
    # two roots of a refresh.
    calls = {name: row.figure * optimizer_cost.CYCLE / 1000 for name, row in rows.items()}
    assert calls["polar"] == 2 * optimizer_cost.CYCLE
    assert calls["whitening"] == 2 * calls["polar"]
    assert calls["roots of factors"] == 4
    assert calls["statistics"] == 2 * 5  # every fourth step, two layers


def test_what_is_watched_is_as_before_afterwards():
    model = tiny()
    made = optimizer_cost.optimizers()[optimizer_cost.NATURAL](model)
    before = (made.kfac.capture.on_pair, type(made.kfac.updating).__call__, made._adamw)
    with optimizer_cost.Stages(lambda: 0.0).watching(made):
        assert made.kfac.capture.on_pair is not before[0]
    assert (made.kfac.capture.on_pair, type(made.kfac.updating).__call__, made._adamw) == before
