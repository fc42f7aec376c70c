"""What the applications say when something is missing, their help, and the helper they share."""

import math
import runpy
import sys

import pytest
import torch

import natgrad
from application_helpers import EXAMPLES, NAMES, command, here
from natgrad.comm import Alone


@pytest.fixture(autouse=True)
def _helper(monkeypatch):
    here(monkeypatch)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("cifar_resnet", (), "CIFAR-10 was not found: there is no data_batch_1.bin in "),
        ("cifar_resnet", ("--data", "."), "CIFAR-10 is not in ., which has no data_batch_1.bin: "),
        ("imagenet_folder", ("images",), "The folder 'images' of images was not found, "),
        ("unet_membrane", (), "The membrane set was not found: there is no image in "),
        ("gpt_shakespeare", (), "tinyshakespeare was not found: there is no tinyshakespeare.txt"),
    ],
    ids=["cifar", "cifar in a folder", "images", "membranes", "text"],
)
def test_missing_data(name, options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable in ("NATGRAD_DATA", "NATGRAD_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    assert command(name, *options, monkeypatch=monkeypatch).startswith(f"{name}.py: {said}")
    assert not list(tmp_path.iterdir())


def test_missing_pillow(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL", None)
    for name in ("digits_autoencoder", "unet_membrane"):
        out = tmp_path / "picture.png"
        assert command(name, "--out", out, monkeypatch=monkeypatch) == (
            f"{name}.py: {out} is drawn by Pillow, which is not installed: pip install "
            "'natgrad[data]'."
        )


def test_missing_scikit_learn(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code = command("digits_autoencoder", "--out", tmp_path / "x.png", monkeypatch=monkeypatch)
    assert code.startswith("digits_autoencoder.py: The digits come with scikit-learn, which is not")


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_a_screen(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert command(name, "--help", monkeypatch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith(f"usage: {name}.py")


@pytest.mark.parametrize("name", NAMES)
def test_short_enough_to_read(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 150


# The helper.


@pytest.fixture
def helper():
    return runpy.run_path(str(EXAMPLES / "application.py"))


def test_a_loss_that_is_not_finite(helper):
    progress = helper["Progress"](3, 10)
    progress.step(torch.tensor(math.nan))
    with pytest.raises(SystemExit) as ended:
        progress.tested("accuracy 10%")
    assert ended.value.code == "The loss is nan at step 4: pass a smaller --lr."


def test_lines_between_tests(helper, capsys, monkeypatch):
    """One when half a minute is over, for the mean since the last test; a test does not count as
    time of training. Other ranks are silent."""
    clock = [0.0]
    monkeypatch.setitem(helper["Progress"].step.__globals__, "perf_counter", lambda: clock[0])
    for rank in (0, 1):
        progress = helper["Progress"](0, 1000, rank)
        for seconds, loss in ((31, 2.0), (2, 4.0)):
            clock[0] += seconds
            progress.step(torch.tensor(loss))
        clock[0] += 7  # the test
        progress.tested("accuracy 10%")
        clock[0] += 1
        progress.step(torch.tensor(1.0))
        progress.tested("accuracy 20%")
        assert progress.seconds == 34
        assert capsys.readouterr().out.splitlines() == [
            "step 1 of 1,000: loss 2, 31.0 s a step",
            "step 2 of 1,000: loss 3, accuracy 10%, 16.5 s a step",
            "step 3 of 1,000: loss 1, accuracy 20%, 1.00 s a step",
        ] * (rank == 0)


def test_a_folder_that_has_a_run_or_has_none(helper, tmp_path):
    save, load = helper["save"], helper["load"]
    assert load(tmp_path, Alone(), resume=False) is None
    with pytest.raises(natgrad.errors.CheckpointError) as error:
        load(tmp_path, Alone(), resume=True)
    assert str(error.value) == (
        f"{tmp_path} has no run to go on with: leave out --resume, or pass another --out."
    )
    save(tmp_path, Alone(), 3, {"x": 1}, own=[2])
    assert load(tmp_path, Alone(), resume=True) == ({"step": 3, "x": 1}, [2])
    with pytest.raises(natgrad.errors.CheckpointError) as error:
        load(tmp_path, Alone(), resume=False)
    assert str(error.value) == (
        f"{tmp_path} has a run already: go on with it by --resume, or pass another --out."
    )


def test_another_number_of_processes(helper, tmp_path):
    helper["save"](tmp_path, Alone(), 3, {}, own=[2])
    (folder,) = tmp_path.iterdir()
    (folder / "rank-1.pt").write_bytes((folder / "rank-0.pt").read_bytes())
    with pytest.raises(natgrad.errors.CheckpointError) as error:
        helper["load"](tmp_path, Alone(), resume=True)
    assert str(error.value) == (
        f"The run in {tmp_path} has 2 processes but there are 1: start as many."
    )


def test_a_save_that_is_killed_leaves_the_one_before(helper, tmp_path, monkeypatch):
    save, load = helper["save"], helper["load"]
    save(tmp_path, Alone(), 1, {"x": 1}, own=[1])
    with pytest.raises(AttributeError):  # torch cannot write it, and has begun to
        save(tmp_path, Alone(), 2, {"x": lambda: 0}, own=[2])
    assert load(tmp_path, Alone(), resume=True) == ({"step": 1, "x": 1}, [1])
    save(tmp_path, Alone(), 2, {"x": 2})
    assert load(tmp_path, Alone(), resume=True) == ({"step": 2, "x": 2}, None)
    assert len(list(tmp_path.iterdir())) == 1
