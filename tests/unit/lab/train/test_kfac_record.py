"""What a run tells of K-FAC, against what its factors are."""

import json

import numpy as np
import pytest
import torch

from natgrad import KFAC, Cholesky, Diagonal
from natgrad.lab.models import mlp
from natgrad.lab.train import kfac_record, logs, train
from unit.lab.train import digit_runs as runs


def trained(**options):
    torch.manual_seed(0)
    model = mlp((5, 7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, update_every=1, refresh_every=1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(20, 5)).square().sum(1).mean().backward()
        kfac.step()
        optimizer.step()
    return kfac


def test_quantiles_of_the_change_rate():
    kfac = trained()
    changes = kfac.drift().change
    found = kfac_record.drift(kfac)
    assert found.keys() == {"A", "G"}
    for name, quantiles in found.items():
        own = [v for (_, factor), v in changes.items() if factor == name]
        assert quantiles == pytest.approx(
            np.quantile(own, kfac_record.QUANTILES).tolist(), rel=1e-6
        )


@pytest.mark.parametrize("inverse", [None, Cholesky()], ids=["eigen", "cholesky"])
def test_spectra_are_those_of_the_factors(inverse):
    kfac = trained(inverse=inverse)
    found = {(one["block"], one["factor"]): one for one in kfac_record.record(kfac)["spectra"]}
    assert len(found) == 4
    for block in kfac.blocks:
        for name, mean in block.kept().items():
            dense = block.forms[name].dense(mean).double()
            expected = torch.linalg.eigvalsh(dense).flatten().flip(0)
            one = found[block.name, name]
            assert one["size"] == len(expected)
            assert one["values"] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)


def test_spectra_of_diagonal_factors():
    kfac = trained(structure=Diagonal())
    found = kfac_record.record(kfac)["spectra"]
    block = kfac.blocks[0]
    expected = sorted(next(iter(block.kept().values())).flatten().tolist(), reverse=True)
    assert found[0]["values"] == pytest.approx(expected)


def test_many_eigenvalues_are_picked_evenly():
    values = torch.arange(1000.0)[torch.randperm(1000)]
    picked = kfac_record._picked(values)
    assert len(picked) == kfac_record.VALUES
    assert (picked[0], picked[-1]) == (999.0, 0.0)
    assert picked == sorted(picked, reverse=True)
    assert max(-np.diff(picked)) <= 6.0


def test_large_factors_are_not_decomposed_for_the_record(monkeypatch):
    monkeypatch.setattr(kfac_record, "LARGEST", 6)
    found = kfac_record.record(trained(inverse=Cholesky()))["spectra"]
    assert {(one["block"], one["factor"], one["size"]) for one in found} == {
        ("0", "A", 6),
        ("2", "G", 3),
    }


def test_the_record_of_a_run(tmp_path):
    pytest.importorskip("sklearn")
    train(runs.settings(), tmp_path)
    found = json.loads((tmp_path / "kfac.json").read_text())
    assert (found["format"], found["step"]) == (1, 8)
    for name in ("coverage", "memory", "timings", "drift", "traffic"):
        table = found[name]
        assert table["rows"] or name == "traffic"  # of one process there is none
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    blocks = found["placement"]["blocks"]
    assert found["placement"]["ranks"] == 1
    assert all(one["workers"] == [0] for one in blocks)
    sizes = {
        (one["name"], factor["name"]): factor["size"] for one in blocks for factor in one["factors"]
    }
    assert sizes == {(one["block"], one["factor"]): one["size"] for one in found["spectra"]}
    assert all(f["decomposers"] == f["keepers"] == [0] for one in blocks for f in one["factors"])
    stages = [line for line in logs.read(tmp_path) if line["kind"] == "stages"]
    assert stages[-1]["calls"]["apply"] == 8


def test_without_kfac_there_is_nothing_to_tell(tmp_path):
    pytest.importorskip("sklearn")
    train(runs.settings(kfac=False), tmp_path)
    assert not (tmp_path / "kfac.json").exists()
    assert {line["kind"] for line in logs.read(tmp_path)} == {"train", "test"}
