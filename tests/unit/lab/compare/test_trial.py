"""One run: what its log says, and what becomes of errors."""

import math

import pytest
import torch

from natgrad.comm import Alone
from natgrad.errors import CheckpointError, DataError, SettingError
from natgrad.lab.compare.results import ComparedCurve, Status
from natgrad.lab.compare.trial import curve, recorded, remove_checkpoints, run_trial, sentence
from natgrad.lab.train.interruption import Interruption
from natgrad.lab.train.logs import kfac_share
from natgrad.lab.train.loop import Outcome
from natgrad.lab.train.progress_line import NoRunProgress
from unit.lab.compare import sample_setups as made


def line(kind, step, elapsed, **values):
    return {"kind": kind, "step": step, "elapsed": elapsed, **values}


LINES = [
    line("train", 1, 0.5, loss=3.0, seconds=0.5, share=0.8),
    line("train", 10, 2.3, loss=2.0, seconds=0.2, share=0.5),
    line("drift", 10, 2.3, A=[1.0]),
    line("test", 10, 2.3, loss=2.0, accuracy=0.5),
    line("fit", 10, 2.3, loss=1.5, accuracy=0.6),
    line("stages", 10, 2.3, seconds={}, calls={}),
    line("train", 20, 4.3, loss=1.0, seconds=0.2, share=0.1),
    line("test", 20, 4.3, loss=1.0, accuracy=0.7),
    line("fit", 20, 4.3, loss=0.5, accuracy=0.8),
]


def test_the_curve_of_a_log():
    assert curve(LINES) == ComparedCurve(
        (10, 20),
        (2.3, 4.3),
        {
            "test_loss": (2.0, 1.0),
            "test_accuracy": (0.5, 0.7),
            "fit_loss": (1.5, 0.5),
            "fit_accuracy": (0.6, 0.8),
        },
    )


def test_a_log_that_ends_in_the_middle_of_a_test():
    assert curve(LINES[:-1]).steps == (10,)
    assert curve([]) == ComparedCurve()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_part_of_a_curve(value):
    test = line("test", 30, 6.0, loss=value, accuracy=0.1)
    fit = line("fit", 30, 6.0, loss=1.0, accuracy=0.1)
    assert curve([*LINES, test, fit]) == curve(LINES)


def test_the_share_of_kfac():
    """By hand: 1 step of 0.5 s, 9 of 0.2 s, 10 of 0.2 s."""
    spent = 0.8 * 0.5 + 0.5 * 1.8 + 0.1 * 2.0
    assert kfac_share(LINES) == pytest.approx(spent / 4.3)
    assert kfac_share([line("train", 1, 0.5, loss=3.0, seconds=0.5)]) is None


def test_a_run_by_its_log():
    run = recorded(LINES, made.task(lr=0.5, seed=3), "here", Status.DIVERGED, "Oh.")
    assert (run.lr, run.seed, run.folder) == (0.5, 3, "here")
    assert (run.status, run.said) == (Status.DIVERGED, "Oh.")
    assert (run.steps, run.seconds) == (20, 4.3)
    assert recorded([], made.task(), "here", Status.FAILED, "").steps == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("Sample 9 is spoilt: remove it."), "Sample 9 is spoilt: remove it."),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (MemoryError(), "MemoryError"),
        (torch.linalg.LinAlgError("no end"), "LinAlgError: no end"),
    ],
    ids=["ours", "lines", "nothing", "torch"],
)
def test_what_went_wrong_is_one_line(error, said):
    assert sentence(error) == said


def tried(monkeypatch, tmp_path, result, comm=None):
    def train(settings, folder, progress, **others):
        assert others["resume"]
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("natgrad.lab.compare.trial.train", train)
    return run_trial(made.task(), tmp_path, "run", comm or Alone(), NoRunProgress(), Interruption())


@pytest.mark.parametrize(
    ("outcome", "status", "signal"),
    [
        (Outcome(4, 4), Status.DONE, 0),
        (Outcome(2, 4, diverged=True), Status.DIVERGED, 0),
        (Outcome(2, 4, signal=15), Status.RUNNING, 15),
        (Outcome(4, 4, signal=2), Status.DONE, 2),
    ],
    ids=["done", "diverged", "interrupted", "at its end"],
)
def test_how_a_run_ends(monkeypatch, tmp_path, outcome, status, signal):
    run, number = tried(monkeypatch, tmp_path, outcome)
    assert (run.status, number) == (status, signal)


@pytest.mark.parametrize(
    "error",
    [
        SettingError("No."),
        torch.linalg.LinAlgError("No."),
        torch.OutOfMemoryError("No."),
        MemoryError(),
    ],
    ids=["ours", "linalg", "device", "memory"],
)
def test_an_error_is_the_run_s_own(monkeypatch, tmp_path, error):
    run, signal = tried(monkeypatch, tmp_path, error)
    assert (run.status, run.said, signal) == (Status.FAILED, sentence(error), 0)


def test_a_full_disk_is_everybody_s(monkeypatch, tmp_path):
    with pytest.raises(CheckpointError):
        tried(monkeypatch, tmp_path, CheckpointError("The disk is full: make room."))


def test_on_several_ranks_only_what_all_raise_is_the_run_s_own(monkeypatch, tmp_path):
    error, comm = DataError("No."), Alone()
    comm.size = 2
    with pytest.raises(DataError):
        tried(monkeypatch, tmp_path, error, comm)
    error.everywhere = True
    run, _ = tried(monkeypatch, tmp_path, error, comm)
    assert run.status is Status.FAILED


def test_checkpoints_of_ended_runs_go(tmp_path):
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "log.jsonl").write_text("")
    remove_checkpoints(tmp_path)
    remove_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
