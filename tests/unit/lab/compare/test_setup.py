"""What is asked: what is allowed, what is the same for all, and as a file."""

from dataclasses import replace

import pytest

from natgrad.errors import SettingError
from natgrad.lab.compare import CONTENDERS, ComparisonSetup, Contender
from natgrad.lab.compare.contender import neutral, preset_contender
from natgrad.lab.compare.setup import Measure, check_same, fair, read, written
from natgrad.lab.train import PRESETS, Settings
from unit.lab.compare import sample_setups as made


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_reads_back_as_the_same(name, tmp_path):
    task = PRESETS[name].settings
    mine = Contender("mine", 'My "own"', "ü\n", {"optimizer": "adamw", "weight_decay": 0.3}, 1e-4)
    asked = ComparisonSetup(
        neutral(task),
        (CONTENDERS["sgd"], preset_contender(task), mine),
        trials=2,
        seeds=7,
        target=0.25,
        threads=3,
        name='a "name"',
    )
    for one in (asked, replace(asked, target=None, threads=None)):
        file = tmp_path / "comparison.toml"
        file.write_text(written(one), encoding="utf-8")
        assert read(file) == one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[task]\n", "does not say what was compared: begin anew in another folder."),
        ("[comparison]\n[contenders.x]\nlr = 1\n[training]\nsteps = 1", "does not say what was"),
        ("[comparison]\ncolour = 1\n[contenders]\n[training]\nsteps = 1", "does not say what was"),
        ("[compar", "are no TOML"),
    ],
)
def test_files_that_say_something_else(text, message, tmp_path):
    file = tmp_path / "comparison.toml"
    file.write_text(text)
    with pytest.raises(SettingError, match=message):
        read(file)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"trials": 0},
            "trials is 0 but must be a whole number of at least 1: pass such an int.",
        ),
        (
            {"seeds": 0},
            "seeds is 0 but must be a whole number of at least 1: pass such an int.",
        ),
        (
            {"threads": 0},
            "threads is 0 but must be a whole number of at least 1: pass such an int.",
        ),
        (
            {"target": float("nan")},
            "target is nan but must be finite: pass such a number.",
        ),
        (
            {"on": "training"},
            "on is 'training' but must be one of fit, test: name one of them.",
        ),
        (
            {"metric": "dice"},
            "metric is 'dice' but must be one of loss, accuracy: name one of them.",
        ),
        ({"contenders": ()}, "A comparison has no optimizers: name at least one."),
        (
            {"contenders": (CONTENDERS["sgd"], CONTENDERS["sgd"])},
            "The optimizer sgd is named twice: leave one of them out.",
        ),
        (
            {"contenders": (Contender("x", "X", "", {"optimizer": "adan"}, 0.1),)},
            "x: There is no optimizer 'adan': name one of ",
        ),
    ],
)
def test_questions_that_cannot_be(values, message):
    with pytest.raises(SettingError) as error:
        ComparisonSetup(made.task(), **values)
    assert str(error.value).startswith(message)


def test_seeds_are_others_than_the_one_that_was_tuned_on():
    asked = made.setup(task=made.task(seed=5), seeds=3)
    assert (asked.tuning_seed, asked.test_seeds) == (5, (6, 7, 8))


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ({}, "schedule constant would leave 100% of them."),
        (
            {"schedule": "steps", "decay_at": (5.0, 100.0), "decay_factor": 0.5},
            "schedule steps would leave 50% of them.",
        ),
        ({"schedule": "polynomial", "decay_end": 20.0}, "schedule polynomial would leave 50%"),
        ({"schedule": "steps", "decay_at": (5.0, 9.0)}, None),
        ({"schedule": "steps", "decay_at": (5.0,)}, None),
        ({"schedule": "polynomial", "decay_power": 2.0}, None),
        ({"schedule": "cosine", "warmup": 1.0}, None),
    ],
    ids=["constant", "not enough", "too long", "twice", "once", "polynomial", "cosine"],
)
def test_learning_rates_fall_to_the_end(values, left):
    task = Settings(epochs=10.0, batch_size=10, **values)
    shared, said = fair(task, 100)
    if left is None:
        assert not said
        assert (shared.schedule, shared.decay_at) == (task.schedule, task.decay_at)
    else:
        (note,) = said
        assert note.startswith("Learning rates fall linearly to 0 by the last step: ")
        assert left in note
        assert (shared.schedule, shared.decay_at) == ("polynomial", ())
        assert (shared.decay_begin, shared.decay_end, shared.decay_power) == (0.0, 0.0, 1.0)


def test_runs_are_tested_often_and_go_to_their_end():
    shared, said = fair(Settings(steps=300, schedule="cosine", target=0.9), 5000)
    assert (shared.evaluate_every, shared.checkpoint_every, shared.fit_samples) == (10, 75, 2048)
    assert shared.target == 0
    assert said == ("All runs go to their end: the target 0.9 of the settings stops none.",)
    shared, _ = fair(Settings(epochs=2.0, batch_size=10, schedule="cosine"), 100)
    assert (shared.evaluate_every, shared.checkpoint_every, shared.fit_samples) == (1, 5, 100)
    chosen = Settings(
        steps=300, schedule="cosine", evaluate_every=7, checkpoint_every=8, fit_samples=9
    )
    shared, _ = fair(chosen, 5000)
    assert (shared.evaluate_every, shared.checkpoint_every, shared.fit_samples) == (7, 8, 9)


@pytest.mark.parametrize("steps", [1, 5, 29, 44, 45, 200, 999, 12345])
def test_the_number_of_tests(steps):
    shared, _ = fair(Settings(steps=steps, schedule="cosine"), 5000)
    tests = steps / shared.evaluate_every
    assert tests == steps if steps < 30 else 20 <= tests <= 45


def test_what_is_fair_stays_so():
    """As for a comparison that goes on."""
    once, _ = fair(Settings(steps=300), 5000)
    assert fair(once, 5000) == (once, ())


def test_measures():
    assert Measure("accuracy", "test").higher
    assert not Measure("perplexity", "fit").higher
    assert (Measure("dice", "test").key, Measure("loss", "fit").name) == (
        "test_dice",
        "training loss",
    )
    high, low = Measure("accuracy", "test"), Measure("loss", "fit")
    assert (high.met(0.9, 0.9), high.met(0.8, 0.9)) == (True, False)
    assert (low.met(0.9, 0.9), low.met(0.8, 0.9), low.met(1.0, 0.9)) == (True, True, False)
    assert (high.low(0.9), low.low(0.9)) == (-0.9, 0.9)


BEFORE = made.setup("sgd", "adamw", trials=2, seeds=2)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (replace(BEFORE, trials=3), "trials is 3 but the comparison in here has 2, and would be"),
        (replace(BEFORE, on="test"), "on is 'test' but the comparison in here has 'fit', and"),
        (replace(BEFORE, target=1.0), "target is 1.0 but the comparison in here has None, and"),
        (
            replace(BEFORE, task=made.task(batch_size=64)),
            "batch_size is 64 but the comparison in here has 32, and would be another: leave it "
            "out to go on, or name another folder with --out.",
        ),
        (
            replace(BEFORE, contenders=(replace(CONTENDERS["sgd"], lr=1.0), CONTENDERS["adamw"])),
            "lr of sgd is 1.0 but the comparison in here has 0.1, and would be another",
        ),
        (
            replace(BEFORE, contenders=(CONTENDERS["kfac"],)),
            "The comparison in here has adamw, sgd as well: name all of its optimizers and others, "
            "or none to go on with the same.",
        ),
        (
            replace(BEFORE, seeds=1),
            "seeds is 1 but the comparison in here has 2: pass at least as many to go on.",
        ),
    ],
    ids=["trials", "on", "target", "task", "rate", "fewer", "seeds"],
)
def test_what_may_not_change(now, message):
    with pytest.raises(SettingError) as error:
        check_same(BEFORE, now, "here")
    assert str(error.value).startswith(message)


def test_what_may_change():
    more = (CONTENDERS["kfac"], *BEFORE.contenders)
    check_same(BEFORE, replace(BEFORE, seeds=5, name="other", contenders=more), "here")
    check_same(BEFORE, replace(BEFORE, task=made.task(workers=2)), "here")


def test_other_defaults_of_kfac_are_nothing_to_those_without_it():
    without, now = made.setup("sgd", "adamw"), made.task(kl_clip=0.5)
    check_same(without, replace(without, task=now), "here")
    both = made.setup("sgd", "kfac")
    with pytest.raises(SettingError, match=r"kl_clip is 0\.5 but the comparison in here has"):
        check_same(both, replace(both, task=now), "here")
