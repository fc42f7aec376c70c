"""Runs that are lost end; those of which one batch is lost, or that are interrupted, go on."""

import math
import signal

import pytest

from natgrad.lab.train import loop, train
from natgrad.lab.train.interruption import Interruption
from natgrad.lab.train.logs import read
from natgrad.lab.train.training import Training
from unit.lab.train import digit_runs as runs


@pytest.fixture(autouse=True)
def _digits():
    with runs.made_up_digits():
        yield


def moments(folder):
    return [line["step"] for line in read(folder) if line["kind"] == "test"]


def test_a_run_whose_weights_are_lost_ends(tmp_path):
    """At the next line of the log, without a checkpoint of what is lost."""
    lost = {"optimizer": "sgd", "kfac": False, "lr": 1e8, "mixup": 0.0, "checkpoint_every": 1}
    outcome = train(runs.settings(steps=200, log_every=5, **lost), tmp_path)
    assert outcome.diverged
    assert not math.isfinite(outcome.metrics["loss"])
    assert outcome.step % 5 == 0 < outcome.step < 100
    assert moments(tmp_path)[-1] == outcome.step
    assert runs.checkpoint(tmp_path)["step"] == outcome.step - 1
    again = train(runs.settings(steps=200, log_every=5, **lost), tmp_path, resume=True)
    assert (again.step, again.diverged) == (outcome.step, True)


def test_a_batch_that_is_lost_is_no_end(tmp_path, monkeypatch):
    """Weights are looked at, and are there."""
    mean, losses = Training.mean, iter([1.0, math.nan, math.inf, 1.0])
    monkeypatch.setattr(Training, "mean", lambda self, loss: next(losses, None) or mean(self, loss))
    outcome = train(runs.settings(), tmp_path)
    assert (outcome.step, outcome.diverged) == (8, False)
    assert moments(tmp_path) == [2, 3, 8]


def test_an_interruption_around_several_runs(tmp_path, monkeypatch):
    """It is the one that a run looks at, and no other takes its place."""
    handler = signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        monkeypatch.setattr(loop, "Interruption", None)
        first = train(runs.settings(), tmp_path / "first", interruption=interruption)
        assert (first.step, first.signal) == (8, 0)
        signal.raise_signal(signal.SIGTERM)
        second = train(runs.settings(), tmp_path / "second", interruption=interruption)
    assert (second.step, second.signal) == (1, signal.SIGTERM)
    assert runs.checkpoint(tmp_path / "second")["step"] == 1
    assert signal.getsignal(signal.SIGTERM) == handler
