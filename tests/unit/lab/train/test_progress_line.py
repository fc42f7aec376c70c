"""What a run says: lines of progress, the log, and TensorBoard where it is installed."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from natgrad.errors import CheckpointError
from natgrad.lab.train import progress_line
from natgrad.lab.train.logs import Log, kfac_share, read

VALUES = {"loss": 0.12345, "lr": 0.1, "seconds": 0.0123, "share": 0.181, "accuracy": 0.975}


def test_the_line():
    assert progress_line.line(VALUES) == "loss 0.1235, 12.3 ms a step, K-FAC 18%, accuracy 97.5%"


def test_plain_lines_are_few():
    said = []
    plain = progress_line.RunLines(said.append)
    plain.start(0, 200)
    for step in range(1, 201):
        plain.step(step, {"loss": 1.0})
    plain.tested(200, {"loss": 0.5, "dice": 0.9})
    plain.end()
    assert len(said) == 21
    assert said[0] == "step 10 of 200: loss 1"
    assert said[-1] == "step 200 of 200: test loss 0.5, dice 90.0%"


@pytest.mark.parametrize(("steps", "interval"), [(300, 10), (140, 10), (39, 1), (1000, 7)])
def test_plain_lines_are_about_twenty_at_any_interval_of_the_log(steps, interval):
    said = []
    plain = progress_line.RunLines(said.append)
    plain.start(0, steps)
    for step in range(interval, steps + 1, interval):
        plain.step(step, {"loss": 1.0})
    assert min(20, steps // interval) * 0.7 <= len(said) <= 20


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    assert isinstance(progress_line.shown(print), progress_line.RunLines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = progress_line.shown(print)
    assert isinstance(bar, progress_line.RunBar)
    bar.start(3, 10)
    bar.step(4, VALUES)
    bar.tested(4, {"accuracy": 0.5})
    bar.end()
    assert "step 4: test accuracy 50.0%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert isinstance(progress_line.shown(print), progress_line.RunLines)


def test_the_log_is_lines_of_json(tmp_path):
    log = Log(tmp_path, 0)
    log("train", 1, {"loss": 0.5})
    log("test", 1, {"accuracy": 0.25})
    log.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == read(tmp_path)
    assert read(tmp_path)[1] == {"kind": "test", "step": 1, "accuracy": 0.25}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk(tmp_path):
    log = Log(tmp_path, 0)
    log._file.close()
    log._file = open("/dev/full", "w")  # noqa: SIM115
    for call in (lambda: log("train", 1, {"loss": 0.5}), log.close):
        with pytest.raises(CheckpointError) as error:
            call()
        assert str(error.value) == (
            f"The log {tmp_path / 'log.jsonl'} could not be written (No space left on device), "
            "checkpoints are intact: make room, or name another folder with --out."
        )
    assert log._file.closed
    log.close()


def test_a_log_that_cannot_be_cut_stays(tmp_path, monkeypatch):
    log = Log(tmp_path, 0)
    for step in (1, 2):
        log("train", step, {"loss": 0.5})
    log.close()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"cannot be written to \(No space left on device\)"):
        Log(tmp_path, 1)
    assert [line["step"] for line in read(tmp_path)] == [1, 2]


def test_tensorboard_gets_the_same(tmp_path, monkeypatch):
    told = []

    class Writer:
        def __init__(self, folder, purge_step):
            told.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def close(self):
            told.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = Log(tmp_path, 4)
    log("train", 5, {"loss": 0.5, "lr": 0.1})
    log.close()
    assert told == [
        (tmp_path / "tensorboard", 5),
        ("train/loss", 0.5, 5),
        ("train/lr", 0.1, 5),
        "closed",
    ]


def test_tensorboard_reads_it(tmp_path, monkeypatch):
    """The real one: of a run that goes on, what came after its checkpoint is there once."""
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = Log(tmp_path, start)
        for step in steps:
            log("train", step, {"loss": step / 8})
        log("stages", steps[-1], {"seconds": {"refresh": 1.0}})  # no number
        log.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["train/loss"]
    told = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert told == [(step, step / 8) for step in (1, 2, 3, 4)]


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = Log(tmp_path, 0)
    log("train", 1, {"loss": 0.5})
    log.close()
    assert len(read(tmp_path)) == 1


def test_the_share_of_k_fac_counts_all_steps():
    lines = [
        {"kind": "train", "step": 1, "elapsed": 1.0, "loss": 1.0, "seconds": 1.0, "share": 0.9},
        {"kind": "train", "step": 11, "elapsed": 2.0, "loss": 1.0, "seconds": 0.1, "share": 0.4},
        {"kind": "train", "step": 12, "elapsed": 3.0, "loss": 1.0, "seconds": 1.0},
    ]
    assert kfac_share(lines) == pytest.approx((0.9 + 0.4) / 2)
    assert kfac_share(lines[2:]) is None
