"""Runs that start from the weights of others, and phases made of them."""

import shutil
from dataclasses import replace

import pytest
import torch

from natgrad.comm.torchrun import joined
from natgrad.errors import SettingError
from natgrad.lab import data
from natgrad.lab.train import preset, train
from natgrad.lab.train.logs import read
from natgrad.lab.train.training import Training
from unit.lab.train import digit_runs as runs

TEXT = "To be, or not to be, that is the question. " * 60
SIZES = {"layers": 1, "heads": 2, "width": 8, "batch_size": 8, "micro_batch": 3}


@pytest.fixture
def first(tmp_path):
    """A run of another kind, without K-FAC and by AdamW, that leaves two checkpoints."""
    pytest.importorskip("sklearn")
    train(
        runs.settings(kfac=False, optimizer="adamw", lr=1e-3, steps=4, seed=5),
        tmp_path / "first",
    )
    return tmp_path / "first"


def test_the_weights_of_a_run(first, tmp_path):
    """They are where the first step begins; nothing else has come along."""
    settings = runs.settings(steps=2)
    train(runs.settings(steps=2, start_from=str(first)), tmp_path / "second")
    with joined() as (comm, device):
        expected = Training(settings, comm, device)
        expected.network.load_state_dict(runs.weights(first))
        for step, batches in expected.batches(0):
            expected.step(step, batches)
    found = runs.weights(tmp_path / "second")
    for name, value in expected.network.state_dict().items():
        assert torch.equal(found[name], value), name
        assert not torch.equal(found[name], runs.weights(first)[name]), name


def test_the_weights_of_a_file(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(runs.weights(first), "weights.pt")
    for start in ("first", "weights.pt", str(first / "checkpoints" / "step-00000004" / "state.pt")):
        name = start.replace("/", "-")
        train(runs.settings(steps=2, start_from=start), tmp_path / "from" / name)
        runs.assert_same(tmp_path / "from" / "first", tmp_path / "from" / name)


def test_going_on_asks_for_them_no_more(first, tmp_path):
    settings = runs.settings(start_from=str(first))
    train(settings, tmp_path / "whole")
    train(runs.settings(start_from=str(first), steps=5), tmp_path / "parts")
    shutil.rmtree(first)
    train(settings, tmp_path / "parts", resume=True)
    runs.assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_run_goes_on_from_where_it_started(first, tmp_path):
    train(runs.settings(steps=1), tmp_path / "run")
    with pytest.raises(SettingError) as error:
        train(runs.settings(steps=2, start_from="other"), tmp_path / "run", resume=True)
    assert str(error.value) == (
        f"start_from is 'other' but the run in {tmp_path / 'run'} has '', and would be another: "
        "leave it out to go on, or name another folder with --out."
    )


def test_what_is_not_there(tmp_path):
    for start, why in (
        (tmp_path / "none", "which is not there: name the folder of a run, or a file of weights."),
        (
            tmp_path,
            "a folder without a checkpoint: name that of a run which has saved one, or a file of "
            "weights.",
        ),
    ):
        with pytest.raises(SettingError) as error:
            train(runs.settings(start_from=str(start)), tmp_path / "run")
        assert str(error.value) == f"start_from is {start}, {why}"
    assert not (tmp_path / "run").exists()


REMEDY = "name a run with the same network, width, layers, heads, data and, for gpt, context."


def test_another_network(first, tmp_path):
    file = first / "checkpoints" / "step-00000004" / "state.pt"
    with pytest.raises(SettingError) as error:
        train(runs.settings(width=5, start_from=str(first)), tmp_path / "wide")
    assert str(error.value) == (
        f"start_from {file} has '0.weight' of shape [4, 1, 3, 3] but the model's has [5, 1, 3, 3]: "
        f"{REMEDY}"
    )
    with pytest.raises(SettingError) as error:
        train(runs.settings(network="mlp", start_from=str(first)), tmp_path / "other")
    assert str(error.value) == f"start_from {file} lacks '1.weight', which the model has: {REMEDY}"


@pytest.fixture
def _text(monkeypatch):
    """A short one, in place of those that must be fetched."""
    monkeypatch.setattr(data, "tinyshakespeare", lambda folder: TEXT)
    monkeypatch.setattr(data, "wikitext2", lambda folder: data.Split(TEXT, TEXT[:400]))
    words = data.build_vocabulary(TEXT, 60)
    whole = data.masked_words
    monkeypatch.setattr(data, "masked_words", lambda text, length: whole(text, words, length))


@pytest.mark.usefixtures("_text")
def test_windows_of_another_length_in_a_gpt(tmp_path):
    """It has weights for as many positions as it was made with."""
    settings = preset("gpt-shakespeare", epochs=0.0, steps=1, context=8, **SIZES)
    short = tmp_path / "short"
    train(settings, short)
    with pytest.raises(SettingError) as error:
        train(replace(settings, context=16, start_from=str(short)), tmp_path / "long")
    file = short / "checkpoints" / "step-00000001" / "state.pt"
    assert str(error.value) == (
        f"start_from {file} has 'place.weight' of shape [8, 8] but the model's has [16, 8]: "
        f"{REMEDY}"
    )


@pytest.mark.usefixtures("_text")
def test_phases_of_bert(tmp_path):
    """Short windows with LAMB, then long ones with K-FAC (Pauloski 2022); resume bit for bit."""
    pytest.importorskip("transformers")
    # A rate that is the same whatever the length of the run is.
    rate = {"schedule": "constant", "warmup_share": 0.0, "lr": 0.01, "log_every": 1}
    one, two, parts = tmp_path / "one", tmp_path / "two", tmp_path / "parts"
    train(preset("bert-phase1", steps=3, context=12, **SIZES, **rate), one)
    second = preset("bert-phase2", steps=4, context=24, start_from=str(one), **SIZES, **rate)
    train(second, two)
    for folder, expected in ((one, False), (two, True)):
        steps = [line for line in read(folder) if line["kind"] == "train"]
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
        assert {"share" in line for line in steps} == {expected}
        assert (runs.checkpoint(folder)["kfac"] is not None) == expected
    train(replace(second, steps=3), parts)
    train(second, parts, resume=True)
    runs.assert_same(two, parts)
