"""The ablation: every variant is what its row says, trains, and is drawn beside the default."""

import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import natgrad
from benchmarks import ablation, ablation_variants
from benchmarks.ablation_variants import VARIANTS
from natgrad.lab.compare import Comparison
from natgrad.lab.schemes.optimizers_by_name import OptimizerRequest
from unit.lab.compare import sample_setups as made
from unit.lab.train import digit_runs as runs


@lru_cache
def weights(name):
    """After 22 steps: intervals of up to 20 have passed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    drawn = VARIANTS[name].settings.get("fisher") == "monte-carlo"
    curvature = natgrad.MonteCarloFisher() if drawn else None
    groups = [{"params": list(model.parameters())}]
    asked = OptimizerRequest(groups, 0.01, 0.9, model, curvature)
    optimizer = getattr(ablation_variants, name).build(asked)
    for step in range(22):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x.argmax(1) % 3).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_another_optimizer(name):
    assert weights(name).isfinite().all()
    assert torch.equal(weights(name), weights("DEFAULT")) == (name == "DEFAULT")


@pytest.mark.parametrize("name", ablation.TASKS)
def test_every_task_can_be_asked(name):
    setup = ablation.TASKS[name].setup(VARIANTS, 1)
    assert (setup.trials, setup.seeds) == (5, 3)
    assert len({one.key for one in setup.contenders}) == len(VARIANTS)
    assert setup.task.weight_decay == 0


def test_it_is_written_as_a_table_and_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    some = {name: VARIANTS[name] for name in ("DEFAULT", "POWER_0")}
    task = ablation.AblationTask("Tiny: loss", "digits-cnn", {**made.TINY, "steps": 4})
    timed = ablation.AblationTask("Tiny: steps", "digits-cnn", {**made.TINY, "steps": 4}, 1e-9)
    monkeypatch.setattr(ablation, "VARIANTS", some)
    monkeypatch.setattr(ablation, "TASKS", {"tiny": task, "timed": timed})
    monkeypatch.setattr(ablation, "TRIALS", 2)
    monkeypatch.setattr(ablation, "SEEDS", 2)
    folders = ["--folder", str(tmp_path / "results"), "--docs", str(tmp_path)]
    with runs.made_up_digits():
        assert ablation.main(folders) == 0
        page = (tmp_path / "ablation.md").read_text()
        assert ablation.main([*folders, "--table"]) == 0
    assert (tmp_path / "ablation.md").read_text() == page
    found = Comparison.read(tmp_path / "results" / "ablation-tiny")
    default, other = found.entries
    assert (default.key, other.key) == ("default", "power-0")
    assert [len(one.runs) for one in found.entries] == [2, 2]
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert rows[0] == "| what is changed | to | Tiny: loss | Tiny: steps |"
    assert rows[-1].startswith("| power | 0 | ")
    assert "| never (" in rows[-1]  # nobody gets to a loss of 1e-9 in four steps
    both = ablation.relative({"tiny": found}, "POWER_0", "tiny")
    ends = sorted(run.final for run in default.runs)
    assert both == pytest.approx([run.final / (sum(ends) / 2) for run in other.runs])
    picture = (tmp_path / "images" / "ablation.svg").read_text()
    assert "<svg" in picture
