"""Runs timed in CPU seconds: what they learn is what `natgrad train` learns, the best of equal
trials counts, and what was not reached is said."""

import time
from dataclasses import replace
from math import inf

import pytest

from natgrad.lab.reproduce import courses
from natgrad.lab.reproduce.courses import (
    best_course,
    count_text,
    course,
    last,
    seconds_to,
    settings_of,
    share_less,
    spread_text,
    steps_to,
)
from natgrad.lab.train.logs import read
from natgrad.lab.train.loop import train
from natgrad.lab.train.settings import Settings

TASK = Settings(network="mlp", width=8, steps=6, batch_size=64, test_samples=40, fit_samples=40)


def test_they_learn_what_a_training_run_does(tmp_path):
    settings = replace(settings_of("kfac", TASK), evaluate_every=2, schedule="polynomial")
    train(settings, tmp_path)
    tests = [line for line in read(tmp_path) if line["kind"] == "test"]
    found = course(settings, {2, 4})
    assert found["steps"] == [line["step"] for line in tests] == [2, 4, 6]
    assert found["test_loss"] == pytest.approx([line["loss"] for line in tests], abs=1e-6)
    assert found["ended"]


def test_seconds_are_of_the_steps_alone(monkeypatch):
    """A clock that a step moves on by a second, and a test by a hundred."""
    now = [0.0]
    monkeypatch.setattr(courses, "process_time", lambda: now[0])
    step, tested = courses.Training.step, courses.Training.evaluate

    def moved(seconds, call):
        def slow(*args):
            now[0] += seconds
            return call(*args)

        return slow

    monkeypatch.setattr(courses.Training, "step", moved(1.0, step))
    monkeypatch.setattr(courses.Training, "evaluate", moved(100.0, tested))
    assert course(settings_of("sgd", TASK), {1, 3})["seconds"] == [1.0, 3.0, 6.0]
    assert courses.process_time is not time.process_time


def test_a_run_stops_where_it_was_told_or_fails():
    settings = settings_of("sgd", TASK)
    stopped = course(settings, range(7), stop=("test_loss", 10.0))
    assert stopped["steps"] == [1]
    assert not stopped["ended"]
    failed = course(replace(settings, lr=1e30), range(7))
    assert not failed["ended"]
    assert last(failed, "test_loss") == inf
    assert last(failed, "test_accuracy") == -inf
    assert steps_to(failed, "fit_accuracy", 1.1) == inf


def test_decompositions_are_counted():
    settings = settings_of("kfac", TASK, refresh_every="every(steps=4)")  # at steps 0 and 4
    layers = 3
    assert course(settings, set())["decompositions"] == 2 * 2 * layers


def test_the_best_of_equal_trials():
    """Steps to a target that lie lowest at a rate of 0.4."""
    asked = []

    def run(lr):
        asked.append(lr)
        steps = 10 + 100 * abs(lr - 0.4)
        return {"lr": lr, "steps": [steps], "seconds": [steps / 2], "test_loss": [0.5]}

    best = best_course(run, 0.1, 5, lambda found: (steps_to(found, "test_loss", 0.5),))
    assert len(asked) == len(best["tried"]) == 5
    assert best["lr"] == 0.4
    assert not best["edge"]
    assert seconds_to(best, "test_loss", 0.5) == 5
    assert steps_to(best, "test_loss", 0.4) == inf
    assert best_course(run, 0.1, 2, lambda found: (found["steps"][0],))["edge"]


def test_what_was_not_reached():
    assert share_less(30, 40) == 0.25
    assert share_less(inf, 40) == share_less(inf, inf) == -inf
    assert share_less(40, inf) == 1
    assert spread_text([inf, 1200.0, 3.0], count_text) == "1,200 (3–not reached)"
    assert spread_text([3.0], count_text) == "3"
