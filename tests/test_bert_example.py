"""BERT in two phases learns in both of them, and K-FAC acts in the second alone."""

import sys
from pathlib import Path

import pytest

import natgrad
from natgrad.lab import data

EXAMPLES = Path(__file__).parents[1] / "examples"
# Every word is always followed by the same one, so that there is something to learn in few steps.
TEXT = "to be or not that is the question whether tis nobler in mind suffer slings arrows "
SIZES = ["--windows", "8", "16", "--batch", "16", "8", "--vocabulary", "64"]
LONG = [*SIZES, "--steps", "30", "20", "--lr", "0.05", "0.05"]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(data, "wikitext2", lambda: data.Split(TEXT * 80, TEXT * 20))
    import bert_phases

    yield bert_phases
    for name in ("bert_phases", "application"):
        sys.modules.pop(name, None)


def test_phases(example, monkeypatch, capsys):
    pytest.importorskip("transformers")
    seen, acted = [], []  # weights at the start, and steps of K-FAC, of each phase
    learn, step = example.train, natgrad.KFAC.step

    def train(model, phase, *others):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        acted.append(0)
        learn(model, phase, *others)

    def counted(kfac, *others):
        acted[-1] += 1
        step(kfac, *others)

    monkeypatch.setattr(example, "train", train)
    monkeypatch.setattr(natgrad.KFAC, "step", counted)
    first, second, alone = example.main(LONG)
    assert acted == [0, 20, 0]
    for phase in (first, second, alone):
        assert phase.after[0] < phase.before[0]
        assert phase.after[1] > phase.before[1]
    assert second.before == alone.before  # the same weights
    assert all((seen[1][name] == seen[2][name]).all() for name in seen[1])
    assert second.after != alone.after
    said = capsys.readouterr().out
    assert "windows of 16, LAMB and K-FAC, 20 steps\n" in said
    assert said.count("windows of 8, LAMB") == 2  # the phase, and its row
    assert f"{first.before[0]:.4f} → {first.after[0]:.4f}" in said


def test_micro_batches_and_bfloat16(example):
    pytest.importorskip("transformers")
    options = ["--no-compare", "--micro", "5", "--bfloat16", "--steps", "4", "4"]
    first, second = example.main([*SIZES, *options])
    assert (first.kfac, second.kfac) == (False, True)
    assert first.after[0] < first.before[0]


def test_without_transformers(monkeypatch, example):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        natgrad.errors.SettingError, match="BERT needs transformers, which is not install"
    ):
        example.main(SIZES)
