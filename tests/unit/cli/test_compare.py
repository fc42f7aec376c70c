"""`natgrad compare`: what flags ask for, what is printed, and one sentence for what is wrong."""

import os
import signal
import sys
import tomllib
from dataclasses import fields
from importlib import import_module

import pytest

from natgrad.lab.compare import CONTENDERS, Comparison, trial
from natgrad.lab.compare.setup import read
from natgrad.lab.schemes import optimizers_by_name
from natgrad.lab.train import Settings
from natgrad.lab.train.training import Training
from unit.lab.train import digit_runs as runs

TASK = ("--preset", "digits-cnn", "--width", "2", "--steps", "4", "--batch-size", "32")
FEW = ("--trials", "1", "--seeds", "1", "--checkpoint-every", "4")
TINY = (*TASK, *FEW, "--optimizers", "sgd,kfac")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    import_module("natgrad.cli.main")  # what is imported with made-up digits is forgotten again
    monkeypatch.setattr(trial.gc, "collect", lambda: 0)
    with runs.made_up_digits():
        yield


def test_help(natgrad, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = natgrad("compare", "--help")
    assert said.code == 0
    assert len(said.out.splitlines()) <= 40
    assert "natgrad compare --preset digits-cnn --optimizers sgd,kfac --out compared" in said.out
    for flag in ("--trials", "--seeds", "--rates", "--target", "--threads", "--resume", "--steps"):
        assert flag in said.out
    assert "--damping" not in said.out


def test_optimizers_are_listed(natgrad, monkeypatch):
    monkeypatch.setattr(optimizers_by_name, "find_spec", lambda name: None)
    said = natgrad("compare", "--list", "--preset", "gpt-shakespeare")
    assert said.code == 0
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.startswith("  ")}
    assert {*CONTENDERS, "preset"} <= rows.keys()
    assert "Muon comes with pytorch_optimizer, which is not installed" in rows["muon"]
    assert "K-FAC, AdamW (preset)" in rows["preset"]


def test_the_list_of_a_file_without_steps(natgrad, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(
        "[training]\nepochs = 2.0\n[optimizer]\noptimizer = 'lamb'\n[kfac]\nkfac = false"
    )
    said = natgrad("compare", "--list", "--settings", str(file))
    assert said.code == 0, said.err
    assert "LAMB (preset)" in said.out
    assert natgrad("compare", "--list").code == 0


def test_flags_are_listed_and_are_those_of_train(natgrad):
    said = natgrad("compare", "--flags")
    for one in fields(Settings):
        assert (f"--{one.name.replace('_', '-')} " in said.out) == (
            one.name not in ("target", "metric")
        )


def test_a_comparison_that_is_gone_on_with(natgrad, tmp_path):
    out = tmp_path / "compared"
    said = natgrad("compare", *TINY, "--out", str(out))
    assert said.code == 0, said.err
    assert said.out.startswith(
        "digits-cnn: 4 steps of 32 samples, 1 learning rate tried by each, then 1 seed\n"
    )
    for words in ("SGD", "K-FAC, SGD", "training loss", "test accuracy", "First at the target"):
        assert words in said.out
    assert said.out.endswith(f"All of it is in {out}; natgrad report {out} draws it.\n")
    lines = said.err.splitlines()
    assert lines[0] == "[1/4] SGD: trial 1 of 1, learning rate 0.1"
    assert len(lines) == 4
    again = natgrad("compare", "--resume", "--out", str(out))
    assert (again.code, again.out, again.err) == (0, said.out, "")
    more = natgrad("compare", "--resume", "--out", str(out), "--seeds", "2")
    assert [line.partition(" ")[0] for line in more.err.splitlines()] == ["[5/6]", "[6/6]"]
    whole = natgrad("compare", *TINY, "--resume", "--out", str(out), "--seeds", "2")
    assert (whole.code, whole.out) == (0, more.out)


def asked(natgrad, monkeypatch, tmp_path, *arguments):
    """What a command asks for; nothing is run."""
    found = []

    def noted(question, folder, telling, *, resume):
        found.append(question)
        raise SystemExit(0)

    monkeypatch.setattr("natgrad.cli.compare.run", noted)
    said = natgrad("compare", "--out", str(tmp_path), *arguments)
    assert said.code == 0, said.err
    return found[0]


def test_defaults(natgrad, monkeypatch, tmp_path):
    found = asked(natgrad, monkeypatch, tmp_path, "--preset", "digits-cnn")
    assert found.contenders == tuple(CONTENDERS.values())
    assert (found.trials, found.seeds, found.metric, found.on) == (5, 3, "loss", "fit")
    assert (found.target, found.threads, found.name) == (None, None, "digits-cnn")
    # Of presets only flags say how often there is a test.
    assert (found.task.evaluate_every, found.task.checkpoint_every) == (0, 0)


def test_flags_and_rates(natgrad, monkeypatch, tmp_path):
    options = ("--metric", "accuracy", "--on", "test", "--target", "0.9", "--threads", "2")
    others = ("--trials", "7", "--seeds", "4", "--optimizers", "kfac, sgd", "--name", "mine")
    task = ("--epochs", "3", "--evaluate-every", "9", "--rates", "kfac=0.5", "--seed", "10")
    found = asked(natgrad, monkeypatch, tmp_path, *TASK[:2], *options, *others, *task)
    assert (found.metric, found.on, found.target, found.threads) == ("accuracy", "test", 0.9, 2)
    assert (found.trials, found.seeds, found.name) == (7, 4, "mine")
    assert [(one.key, one.lr) for one in found.contenders] == [("kfac", 0.5), ("sgd", 0.1)]
    assert (found.task.epochs, found.task.steps, found.task.evaluate_every) == (3, 0, 9)
    assert found.test_seeds == (11, 12, 13, 14)


def test_the_one_of_the_preset_takes_flags_for_itself(natgrad, monkeypatch, tmp_path):
    flags = ("--damping", "0.5", "--lr", "0.7", "--optimizers", "kfac,preset")
    found = asked(natgrad, monkeypatch, tmp_path, "--preset", "gpt-shakespeare", *flags)
    kfac, preset = found.contenders
    assert kfac == CONTENDERS["kfac"]
    assert (preset.settings["damping"], preset.lr) == (0.5, 0.7)


def test_a_file(natgrad, monkeypatch, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("[training]\nsteps = 9\n[output]\nevaluate_every = 3\n")
    found = asked(natgrad, monkeypatch, tmp_path, "--settings", str(file))
    assert (found.name, found.task.steps, found.task.evaluate_every) == ("my", 9, 3)


def test_a_schedule_of_steps_gives_way_to_another(natgrad, monkeypatch, tmp_path):
    flags = ("--preset", "cifar10-resnet32", "--schedule", "cosine", "--epochs", "5")
    found = asked(natgrad, monkeypatch, tmp_path, *flags)
    assert (found.task.schedule, found.task.decay_at) == ("cosine", ())
    said = natgrad("train", *flags, "--show")
    assert said.code == 0
    assert tomllib.loads(said.out)["optimizer"]["decay_at"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (TASK, "A comparison needs a folder for runs and results: pass --out FOLDER."),
        (
            ("--resume", "--out", "nothing"),
            "There is no comparison in nothing to go on with: name its folder with --out.",
        ),
        (
            (*TASK, "--out", "x", "--optimizers", "sgd,adan"),
            "There is no optimizer 'adan': name some of sgd, adamw, schedulefree, muon, "
            "muon-hidden, torch-muon, soap, soap-1, shampoo, lamb, kfac, kfac-adamw, naturalmuon, "
            "preset, naturalmuon-mc, naturalmuon-untuned, with commas, or your own as "
            "module:function; kfac- before the name of an optimizer puts K-FAC in front of it.",
        ),
        (
            (*TASK, "--out", "x", "--optimizers", ","),
            "A comparison has no optimizers: name at least one.",
        ),
        (
            (*TASK, "--out", "x", "--rates", "kfac"),
            "--rates has 'kfac', which is no optimizer with its learning rate: write some such as "
            "kfac=0.1,sgd=1.",
        ),
        (
            (*TASK, "--out", "x", "--optimizers", "sgd,adamw", "--rates", "kfac=1"),
            "--rates names 'kfac', which does not take part: name some of sgd, adamw.",
        ),
        (
            (*TASK, "--out", "x", "--rates", "kfac=0"),
            "The learning rate of kfac is 0.0 but must be finite and above 0: pass such a number.",
        ),
        (
            (*TASK, "--out", "x", "--damping", "1"),
            "--damping is for one optimizer alone, that of the preset, which does not take part: "
            "leave it out, or use preset among --optimizers.",
        ),
        (
            (*TASK, "--out", "x", "--lr", "1"),
            "--lr is for one optimizer alone, that of the preset, which does not take part: leave "
            "it out, or use --rates.",
        ),
        (
            (*TASK, "--out", "x", "--metric", "dice"),
            "metric is 'dice' but must be one of loss, accuracy: name one of them.",
        ),
        (
            (*TASK, "--out", "x", "--trials", "0"),
            "trials is 0 but must be a whole number of at least 1: pass such an int.",
        ),
        (("--preset", "digits", "--out", "x"), "There is no preset 'digits': name one of digits-"),
        (
            ("--preset", "digits-cnn", "--network", "resnet20", "--out", "x"),
            "network resnet20 takes images of 3 channels but those of the data have 1: name ",
        ),
    ],
)
def test_errors_are_one_sentence(natgrad, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = natgrad("compare", *arguments)
    assert said.code == 2
    assert said.err.startswith(f"natgrad: {message}")
    assert said.err.count("\n") == 1
    assert not said.out


def test_another_comparison_is_not_gone_on_with(natgrad, tmp_path):
    out = str(tmp_path)
    assert natgrad("compare", *TINY, "--out", out).code == 0
    for flags, message in (
        (
            ("--trials", "2"),
            f"trials is 2 but the comparison in {out} has 1, and would be another: leave it out to "
            "go on, or name another folder with --out.",
        ),
        (
            ("--damping", "1"),
            "--damping is given but what optimizers are told stays as it began: leave it out to go "
            "on, or name another folder with --out.",
        ),
    ):
        said = natgrad("compare", "--resume", "--out", out, *flags)
        assert (said.code, said.err) == (2, f"natgrad: {message}\n")
    said = natgrad("compare", *TINY, "--out", out)
    assert said.err.startswith(f"natgrad: The folder {out} has a comparison already: pass --resume")


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_signal_ends_it_and_says_how_to_go_on(natgrad, tmp_path, monkeypatch, number, name):
    step, left = Training.step, iter(range(100))

    def interrupted(self, *args):
        if next(left) == 10:  # in the second run
            os.kill(os.getpid(), number)
        return step(self, *args)

    with monkeypatch.context() as context:
        context.setattr(Training, "step", interrupted)
        said = natgrad("compare", *TINY, "--out", str(tmp_path))
    assert said.code == 128 + number
    assert said.out == (
        f"Stopped by {name} after 1 of 4 runs; natgrad compare --resume --out {tmp_path} goes on.\n"
    )
    assert Comparison.read(tmp_path).entries[1].trials[0].status == "running"
    again = natgrad("compare", "--resume", "--out", str(tmp_path))
    assert again.code == 0
    assert again.err.startswith("[2/4] K-FAC, SGD: trial 1 of 1, learning rate 0.03\n")


def test_what_was_asked_is_in_the_folder(natgrad, tmp_path):
    assert natgrad("compare", *TINY, "--out", str(tmp_path), "--rates", "sgd=0.5").code == 0
    found = read(tmp_path / "comparison.toml")
    assert [(one.key, one.lr) for one in found.contenders] == [("sgd", 0.5), ("kfac", 0.03)]
    assert (found.trials, found.seeds, found.name) == (1, 1, "digits-cnn")
    assert (found.task.width, found.task.fit_samples, found.task.evaluate_every) == (2, 300, 1)


def test_a_narrow_terminal(natgrad, tmp_path, monkeypatch):
    natgrad("compare", *TINY, "--out", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    said = natgrad("compare", "--resume", "--out", str(tmp_path))
    tables = said.out[: said.out.index("Target:")]
    assert max(map(len, tables.splitlines())) <= 80
    assert tables.count("optimizer") == 2


def test_other_ranks_are_silent(natgrad, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    said = natgrad("compare", "--preset", "nothing", "--out", str(tmp_path))
    assert (said.code, said.out, said.err) == (2, "", "")


def test_the_command_is_kept(natgrad, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/natgrad", "compare", "--out", "a b"])
    natgrad("compare", *TINY, "--out", str(tmp_path))
    assert Comparison.read(tmp_path).facts["command"] == "natgrad compare --out 'a b'"
