"""`natgrad train`: settings from presets, files and flags, and one sentence for what is wrong."""

import re
import sys
import tomllib
from dataclasses import fields

import pytest
from torch.distributed.run import get_args_parser

from natgrad.errors import CheckpointError, CoverageError, DataError, SettingError
from natgrad.lab.train import PRESETS, Settings
from natgrad.lab.train.toml import read

TINY = ("--preset", "digits-cnn", "--width", "2", "--steps", "4", "--batch-size", "32")


@pytest.fixture(autouse=True)
def _no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def test_help_fits_a_screen_and_has_an_example(natgrad, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    said = natgrad("train", "--help")
    assert said.code == 0
    assert "natgrad train --preset digits-cnn --out run" in said.out
    assert len(said.out.splitlines()) <= 40
    assert {"--preset", "--settings", "--out", "--resume", "--lr", "--no-kfac"} <= set(
        re.findall(r"--[a-z-]+", said.out)
    )


def test_all_flags_are_listed_and_work(natgrad):
    said = natgrad("train", "--flags")
    for one in fields(Settings):
        assert f"--{one.name.replace('_', '-')} " in said.out
    shown = natgrad("train", "--preset", "digits-cnn", "--norm-damping", "3", "--no-ramp", "--show")
    values = tomllib.loads(shown.out)["kfac"]
    assert (values["norm_damping"], values["ramp"]) == (3.0, False)


def test_torchrun_leaves_all_flags_to_the_command():
    """It would take one that begins two of its own, such as --start, for them."""
    known = get_args_parser()
    for one in fields(Settings):
        command = ["natgrad", "train", f"--{one.name.replace('_', '-')}", "1"]
        found = known.parse_args(["--no-python", *command])
        assert [found.training_script, *found.training_script_args] == command


def test_presets_are_listed(natgrad):
    said = natgrad("train", "--list")
    assert said.code == 0
    assert all(name in said.out for name in PRESETS)


def test_the_file_that_is_shown_gives_the_same_settings(natgrad, tmp_path):
    flags = ("--lr", "0.05", "--schedule", "steps", "--decay-at", "1,2.5", "--exclude", "a.*,b")
    first = natgrad("train", "--preset", "digits-cnn", *flags, "--show")
    assert first.code == 0
    file = tmp_path / "my.toml"
    file.write_text(first.out, encoding="utf-8")
    again = natgrad("train", "--settings", str(file), "--show")
    assert again.out == first.out
    settings = Settings(**read(file))
    assert (settings.lr, settings.decay_at, settings.exclude) == (0.05, (1.0, 2.5), ("a.*", "b"))


def test_epochs_take_the_place_of_steps(natgrad):
    said = natgrad("train", "--preset", "digits-cnn", "--epochs", "2", "--show")
    values = tomllib.loads(said.out)["training"]
    assert (values["epochs"], values["steps"]) == (2.0, 0)


def test_a_run_that_is_gone_on_with(natgrad, tmp_path):
    out = tmp_path / "run"
    said = natgrad("train", *TINY, "--out", str(out))
    assert said.code == 0, said.err
    assert re.fullmatch(
        rf"Done after step 4 of 4: test loss [\d.]+, accuracy [\d.]+%; all of it is in {out}\.\n",
        said.out,
    )
    assert "step 4 of 4: test loss" in said.err
    assert re.search(r"loss [\d.]+, [\d.]+ m?s a step, K-FAC \d+%", said.err)
    assert Settings(**read(out / "settings.toml")).width == 2
    said = natgrad("train", "--resume", "--out", str(out), "--steps", "6")
    assert said.code == 0, said.err
    assert "Done after step 6 of 6" in said.out


def test_a_target(natgrad, tmp_path):
    options = ("--target", "0.01", "--evaluate-every", "1", "--out", str(tmp_path))
    said = natgrad("train", *TINY, *options)
    assert said.out.startswith("Reached accuracy 0.01 by step 1 of 4: test loss")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "digits"), "There is no preset 'digits': name one of digits-cnn, "),
        (
            ("--preset", "digits-cnn", "--settings", "x.toml"),
            "--preset and --settings are both given: leave one of them out.",
        ),
        (("--settings", "x.toml"), "The settings x.toml cannot be read (No such file or directory"),
        (
            ("--preset", "digits-cnn"),
            "A run needs a folder for its log and checkpoints: pass --out",
        ),
        (("--resume",), "--resume goes on with the run in a folder: pass it with --out."),
        (
            ("--resume", "--out", "nothing"),
            "There is no run in nothing to go on with: name its folder with --out.",
        ),
        (
            ("--preset", "digits-cnn", "--no-kfac", "--damping", "1"),
            "--damping is a setting of K-FAC, which is off: leave it out, or pass --kfac.",
        ),
        (
            ("--preset", "digits-cnn", "--decay-at", "1,x"),
            "--decay-at is '1,x', which is no list of numbers: write one such as 35,75,90.",
        ),
        (("--lr", "0.1"), "A run lasts for epochs or for steps but neither is given: pass one"),
        (
            ("--preset", "digits-cnn", "--optimizer", "adan"),
            "There is no optimizer 'adan': ",
        ),
        (
            ("--preset", "digits-cnn", "--network", "resnet20", "--out", "run"),
            "network resnet20 takes images of 3 channels but those of the data have 1: name ",
        ),
    ],
)
def test_errors_are_one_sentence(natgrad, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = natgrad("train", *arguments)
    assert said.code == 2
    assert said.err.startswith(f"natgrad: {message}")
    assert said.err.count("\n") == 1
    assert not said.out


def test_a_flag_of_another_kind(natgrad):
    said = natgrad("train", "--preset", "digits-cnn", "--steps", "many")
    assert said.code == 2
    assert "Invalid value for '--steps': Input should be a valid integer" in said.words


def test_another_run_is_not_gone_on_with(natgrad, tmp_path):
    out = str(tmp_path)
    natgrad("train", *TINY, "--out", out)
    said = natgrad("train", "--resume", "--out", out, "--lr", "0.5")
    assert (said.code, said.err) == (
        2,
        f"natgrad: lr is 0.5 but the run in {out} has 0.03, and would be another: leave it out to "
        "go on, or name another folder with --out.\n",
    )
    said = natgrad("train", *TINY, "--out", out)
    assert said.err.startswith(f"natgrad: The folder {out} has a run of 4 steps already: pass")


def test_an_unwritable_folder(natgrad, tmp_path):
    (tmp_path / "file").write_text("in the way")
    said = natgrad("train", *TINY, "--out", str(tmp_path / "file" / "run"))
    assert said.code == 1
    assert said.err == (
        f"natgrad: The folder {tmp_path / 'file' / 'run'} cannot be written to (Not a directory): "
        "name another one with --out.\n"
    )


def test_missing_packages(natgrad, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    said = natgrad("train", *TINY, "--out", str(tmp_path))
    assert (said.code, said.err) == (
        1,
        "natgrad: The digits come with scikit-learn, which is not installed: pip install "
        "'natgrad[demo]'.\n",
    )


def test_other_ranks_are_silent(natgrad, tmp_path, monkeypatch):
    """Where all have the same to say."""
    monkeypatch.setenv("RANK", "1")
    said = natgrad("train", "--preset", "nothing")
    assert (said.code, said.out, said.err) == (2, "", "")


def test_an_error_of_another_rank_alone(natgrad, tmp_path, monkeypatch):
    def spoilt(self, step, batches):
        raise DataError("Sample 99 is spoilt: remove it.")

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("natgrad.lab.train.loop.Training.step", spoilt)
    said = natgrad("train", *TINY, "--out", str(tmp_path))
    assert (said.code, said.out) == (1, "")
    assert said.err.splitlines()[-1] == "natgrad: rank 3: Sample 99 is spoilt: remove it."


@pytest.mark.parametrize(
    ("error", "code"),
    [(SettingError, 2), (CoverageError, 2), (DataError, 1), (CheckpointError, 1)],
)
def test_exit_codes_are_those_of_all_commands(natgrad, tmp_path, monkeypatch, error, code):
    def fails(*args, **others):
        raise error("No.")

    monkeypatch.setattr("natgrad.cli.train.run", fails)
    said = natgrad("train", *TINY, "--out", str(tmp_path))
    assert (said.code, said.err) == (code, "natgrad: No.\n")


def test_a_run_that_diverges(natgrad, tmp_path):
    options = ("--no-kfac", "--lr", "1e30", "--log-every", "1", "--steps", "50")
    said = natgrad("train", *TINY, *options, "--out", str(tmp_path))
    assert said.code == 1
    assert re.fullmatch(
        r"Diverged by step \d+ of 50, the test loss is (nan|inf): pass a smaller --lr and another "
        rf"folder; all of it is in {tmp_path}\.\n",
        said.out,
    )
