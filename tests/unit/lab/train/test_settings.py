"""Settings are checked when made, and a file of them reads back as the same."""

from dataclasses import fields

import pytest

from natgrad.errors import SettingError
from natgrad.lab.train import PRESETS, Settings, toml
from natgrad.lab.train.contradictions import metrics_of
from natgrad.lab.train.settings import FREE
from unit.lab.train import digit_runs as runs


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_file_reads_back(name, tmp_path):
    settings = PRESETS[name].settings
    file = tmp_path / "settings.toml"
    file.write_text(toml.written(settings), encoding="utf-8")
    assert Settings(**toml.read(file)) == settings


def test_every_value_survives(tmp_path):
    settings = runs.settings(
        folder='a "b" \\ c\n\x7fä',
        lr=0.1 + 0.2,
        damping=1e-300,
        schedule="steps",
        decay_at=(1.5, 2.0),
        include=("a.*", "b'c"),
        augment=False,
        seed=2**40,
    )
    file = tmp_path / "settings.toml"
    file.write_text(toml.written(settings), encoding="utf-8")
    found = Settings(**toml.read(file))
    for one in fields(Settings):
        assert getattr(found, one.name) == getattr(settings, one.name), one.name


def test_a_file_may_leave_things_out(tmp_path):
    file = tmp_path / "some.toml"
    file.write_text("[training]\nsteps = 3\n[optimizer]\nlr = 1\n", encoding="utf-8")
    assert Settings(**toml.read(file)) == Settings(steps=3, lr=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 3", "steps in the settings {} stands outside of a section: "),
        ("[training]\nsteps = ", "The settings {} are no TOML ("),
        ("[training]\nstep = 3", "step in the settings {} is no setting: "),
        ("[kfac]\nsteps = 3", "steps in the settings {} belongs to [training], not to [kfac]: "),
    ],
)
def test_bad_files(text, message, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError) as error:
        toml.read(file)
    assert str(error.value).startswith(message.format(file))


def test_a_missing_file(tmp_path):
    with pytest.raises(SettingError) as error:
        toml.read(tmp_path / "none.toml")
    assert str(error.value) == (
        f"The settings {tmp_path / 'none.toml'} cannot be read (No such file or directory): name a "
        "file that is there."
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"optimizer": "adan"},
            "There is no optimizer 'adan': name one of sgd, adamw, adam, amsgrad, radam, adabound, "
            "amsbound, lookahead, lookahead-adam, lars, lamb, schedulefree, muon, muon-hidden, "
            "torch-muon, soap, soap-1, naturalmuon, shampoo, or an optimizer class, "
            "or a function (params, lr) that returns one, as module:function.",
        ),
        (
            {"optimizer": "naturalmuon"},
            "optimizer naturalmuon preconditions gradients itself but kfac is on: turn kfac off, "
            "or pass another optimizer.",
        ),
        ({"lr": -1.0}, "lr is -1.0 but must be finite and above 0: pass such a number."),
        ({"lr": "0.1"}, "lr is '0.1' but must be a number: write one."),
        ({"batch_size": 0}, "batch_size is 0 but must be finite and above 0: pass such a number."),
        ({"batch_size": 1.5}, "batch_size is 1.5 but must be a whole number: write one."),
        ({"kfac": 1}, "kfac is 1 but must be true or false: write one."),
        ({"seed": True}, "seed is True but must be a whole number: write one."),
        ({"data": 3}, "data is 3 but must be text: write one."),
        ({"lr": float("nan")}, "lr is nan but must be finite: pass such a number."),
        ({"decay_at": 3.0}, "decay_at is 3.0 but must be a list of a number: write one."),
        (
            {"steps": 0},
            "A run lasts for epochs or for steps but neither is given: pass one of the two.",
        ),
        (
            {"epochs": 1.0},
            "A run lasts for epochs or for steps but both are given: pass one of the two.",
        ),
        (
            {"micro_batch": 65},
            "micro_batch is 65 but a step has only 64 samples: pass a smaller one, or a larger "
            "batch_size.",
        ),
        (
            {"loss": "pixels", "erasing": 0.0},
            "mixup mixes the targets of classes but the loss is pixels: leave it out, or pass loss "
            "cross-entropy.",
        ),
        (
            {"schedule": "steps"},
            "schedule steps needs the epochs at which it falls: pass decay_at, such as 35,75,90.",
        ),
        (
            {"decay_at": (3.0,)},
            "decay_at belongs to schedule steps but the schedule is constant: leave one of the two "
            "out.",
        ),
        (
            {"schedule": "steps", "decay_at": (3.0, 2.0)},
            "decay_at is [3.0, 2.0] but must be positive and rise: sort the epochs.",
        ),
        (
            {"decay_begin": 3.0, "decay_end": 2.0},
            "decay_end is 2 but must be above decay_begin, 3: pass the epoch at which the rate "
            "reaches 0.",
        ),
        (
            {"damping_target": 1e-4},
            "damping_target and damping_steps belong together but one of them is 0: pass both, or "
            "none for a damping that stays.",
        ),
        (
            {"coupled": True, "optimizer": "lamb"},
            "displacement and coupled belong to optimizer sgd but it is lamb: leave them out, or "
            "pass optimizer sgd.",
        ),
        (
            {"coupled": True, "warmup": 1.0},
            "coupled keeps the ratio of momentum and learning rate at the first step, where warmup "
            "makes the rate low, so that the momentum would rise above 1: leave one of the two "
            "out.",
        ),
        (
            {"coupled": True, "warmup_share": 0.1},
            "coupled keeps the ratio of momentum and learning rate at the first step, where warmup "
            "makes the rate low, so that the momentum would rise above 1: leave one of the two "
            "out.",
        ),
        (
            {"warmup": 1.0, "warmup_share": 0.1},
            "warmup and warmup_share both say how long the rate rises: leave one of the two out.",
        ),
        (
            {"start_from": "run", "he_normal": True},
            "start_from and he_normal both say which weights are first: leave one of the two out.",
        ),
        (
            {"network": "autoencoder", "loss": "reconstruction", "mixup": 0.0, "width": 3},
            "width is 3 but the third layer of an autoencoder has a fourth of it: pass at least 4.",
        ),
        (
            {"seed": 2**63},
            "seed is 9223372036854775808 but must be below 2**63: pass a smaller one.",
        ),
        (
            {"target": 0.5, "metric": "dice"},
            "metric is dice but loss cross-entropy has loss, accuracy: name one of these.",
        ),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(SettingError) as error:
        runs.settings(**values)
    assert str(error.value) == message


def test_a_whole_number_is_a_number():
    assert type(Settings(steps=1, lr=1).lr) is float


def test_free_settings_exist():
    assert {one.name for one in fields(Settings)} > FREE


def test_metrics_of_losses():
    assert metrics_of("pixels") == ("loss", "accuracy", "dice")
    assert metrics_of("nowhere:loss") == ("loss",)  # which is not imported for that
