"""The applications train, draw, and go on where they were."""

import math
import os
import re
import runpy
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import forked
from application_helpers import (
    EXAMPLES,
    command,
    here,
    same,
    saved,
    says_what_kfac_did,
    series,
    write_cells,
    write_cifar,
    write_pictures,
)
from natgrad.lab import data, schemes

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _helper(monkeypatch):
    here(monkeypatch)


@pytest.fixture
def run(capsys):
    """Calls the main function of an example; gives what it returns and prints."""

    def call(name, *options):
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        capsys.readouterr()
        found = main([str(option) for option in options])
        return found, capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    return made(write_cifar, tmp_path_factory)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return made(write_pictures, tmp_path_factory)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    return made(write_cells, tmp_path_factory)


def made(write, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder)
    return folder


# CIFAR-10.

TINY = ("--depth", 8, "--samples", 96, "--judged", 60, "--batch", 16, "--epochs", 4)


@pytest.fixture(scope="module")
def trained(cifar, tmp_path_factory):
    """A run of 24 steps that nothing disturbs: its printed lines and its folder."""
    out = tmp_path_factory.mktemp("trained") / "run"
    options = [*map(str, TINY), "--data", cifar, "--out", out]
    done = forked.run(forked.script, EXAMPLES / "cifar_resnet.py", *options)
    assert done.code == 0, done.err
    return done.out, out


def test_cifar_resnet_learns(trained):
    printed, out = trained
    losses, accuracies = series(printed, "loss"), series(printed, "test accuracy")
    assert len(losses) == len(accuracies) == 4
    assert losses[-1] < losses[0] / 2
    assert accuracies[-1] > 90
    assert re.search(r"^step 24 of 24: .* after 4 of 4 epochs, .* a step$", printed, re.MULTILINE)
    assert says_what_kfac_did(printed)
    assert saved(out)["step"] == saved(out)["kfac"]["steps"] == 24


def test_cifar_resnet_goes_on(run, cifar, trained, tmp_path):
    """Eleven steps, within the second epoch, and the rest of them are all of them."""
    options = (*TINY, "--data", cifar, "--out", tmp_path)
    run("cifar_resnet", *options, "--steps", 11)
    assert saved(tmp_path)["step"] == 11
    net, printed = run("cifar_resnet", *options, "--resume")
    assert printed.startswith("step 12 of 24: ")
    whole = saved(trained[1])
    assert same(net.state_dict(), whole["model"])
    assert same(saved(tmp_path)["model"], whole["model"])
    momenta = (state["optimizer"]["state"] for state in (saved(tmp_path), whole))
    assert all(same(*pair) for pair in zip(*(one.values() for one in momenta), strict=True))
    _, printed = run("cifar_resnet", *options, "--resume")
    assert printed == "step 24 of 24: there is nothing left to do.\n"


def test_cifar_resnet_by_sgd(run, cifar, tmp_path):
    """Another length and other decays, and nothing of K-FAC."""
    options = ("--sgd", "--steps", 2, "--data", cifar, "--out", tmp_path)
    _, printed = run("cifar_resnet", *TINY[:-2], *options)
    assert re.search(r"^step 2 of 2: .* after 0 of 200 epochs", printed)
    assert "K-FAC" not in printed
    assert saved(tmp_path)["kfac"] is None


def test_the_rate_of_p19():
    rate = runpy.run_path(str(EXAMPLES / "cifar_resnet.py"))["rate"]
    kfac, sgd = rate(0.4, 100, 98, sgd=False), rate(0.4, 200, 98, sgd=True)
    assert kfac(0) == pytest.approx(0.4 / (2 * 490), rel=1e-2)
    assert kfac(245) == pytest.approx(0.2, rel=1e-2)
    assert [kfac(98 * epoch) for epoch in (5, 34, 35, 74, 75, 89, 90)] == pytest.approx(
        [0.4, 0.4, 0.04, 0.04, 0.004, 0.004, 0.0004]
    )
    assert [sgd(98 * epoch) for epoch in (5, 99, 100, 149, 150)] == pytest.approx(
        [0.4, 0.4, 0.04, 0.04, 0.004]
    )


def one_rank(out, options):
    sys.path.insert(0, str(EXAMPLES))
    net = runpy.run_path(str(EXAMPLES / "cifar_resnet.py"))["main"](options)
    torch.save(net.state_dict(), out / f"{os.environ['RANK']}.pt")


@pytest.mark.distributed
def test_cifar_resnet_on_two_ranks(cifar, tmp_path):
    """They end with the same weights, and have learnt."""
    options = [*map(str, TINY), "--data", str(cifar), "--out", str(tmp_path / "run")]
    done, silent = forked.ranks(2, one_rank, tmp_path, options, timeout=240)
    assert (done.code, silent.code) == (0, 0), done.err + silent.err
    assert not silent.out
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert same(one, other)
    assert same(one, saved(tmp_path / "run")["model"])
    losses = series(done.out, "loss")
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    assert "step 12 of 12: " in done.out  # half as many steps, of twice the batch
    assert says_what_kfac_did(done.out)


# A folder of images.


FEW = ("--depth", 8, "--image", 32, "--batch", 16, "--micro", 8, "--epochs", 6, "--workers", 0)


def test_imagenet_folder(run, pictures, tmp_path):
    """It learns, by the recipe, and seven steps and the rest of them are all of them."""
    whole, printed = run("imagenet_folder", pictures, *FEW, "--out", tmp_path / "whole")
    accuracies = series(printed, "test accuracy")
    assert len(accuracies) == 6
    assert accuracies[-1] > 90
    assert "after 6.0 of 6 epochs" in printed
    assert says_what_kfac_did(printed)

    row = schemes.large_batch(4096)
    layers = schemes.normalized_layers(whole, torch.zeros(1, 3, 32, 32)).values()
    for layer in layers:  # rescaled (Osawa 2019, eq. 18)
        norm = float(layer.weight.detach().norm())
        assert norm == pytest.approx(math.sqrt(2 * layer.out_channels), rel=1e-5)
    state = saved(tmp_path / "whole")
    (group,) = state["optimizer"]["param_groups"]
    rate = schemes.PolynomialDecay(row.lr, row.begin, row.end, row.power, 48 / 16)
    assert group["lr"] == pytest.approx(rate(17))  # of the last of 18 steps
    assert group["displacement_momentum"] == pytest.approx(row.momentum * rate(17) / row.lr)

    parts = ("imagenet_folder", pictures, *FEW, "--out", tmp_path / "parts")
    run(*parts, "--steps", 7)
    net, printed = run(*parts, "--resume")
    assert printed.startswith("step 9 of 18: ")
    assert same(net.state_dict(), whole.state_dict())


def test_imagenet_folder_with_stale_curvature(run, pictures, tmp_path):
    """By the rule of Osawa 2019, eq. 20, the first 500 steps are those without it."""
    short = ("imagenet_folder", pictures, *FEW, "--steps", 2)
    one, _ = run(*short, "--out", tmp_path / "one")
    other, _ = run(*short, "--stale", "--out", tmp_path / "other")
    assert same(one.state_dict(), other.state_dict())


def test_imagenet_folder_subtracts_the_mean_image(run, pictures, tmp_path):
    """Then all images of the first batch are 0 on average, and so is the mean in batch norm."""
    short = ("imagenet_folder", pictures, *FEW[:4], "--batch", 48, "--micro", 48, "--workers", 0)
    means = []
    for name, options in (("without", ()), ("with", ("--mean-image",))):
        net, _ = run(*short, *options, "--steps", 1, "--out", tmp_path / name)
        means.append(float(net[1].running_mean.abs().mean()))
    assert means[1] < means[0] / 3


def test_a_batch_that_does_not_come_out_even(pictures, tmp_path, monkeypatch):
    code = command(
        "imagenet_folder", pictures, "--micro", 48, "--out", tmp_path, monkeypatch=monkeypatch
    )
    assert code == (
        "imagenet_folder.py: The batch is 4096 but 1 processes of 48 images at once must divide "
        "it: pass another --micro or --batch."
    )


# U-Net.


@pytest.mark.parametrize("options", [(), ("--adam",)], ids=["K-FAC", "Adam"])
def test_unet_membrane(run, cells, tmp_path, options):
    """The picture has image, truth and guess, and the overlap of the two is the one it prints."""
    image = pytest.importorskip("PIL.Image")
    small = ("--image", 32, "--width", 4, "--batch", 4, "--steps", 30, "--judged", 3)
    out = tmp_path / "new" / "cells.png"
    model, printed = run("unet_membrane", *small, *options, "--data", cells, "--out", out)
    (found,) = series(printed, "test dice of membranes")
    assert found > 0.7  # a guess of membranes everywhere has less than 0.6
    assert says_what_kfac_did(printed) == (not options)

    with image.open(out) as opened:
        assert (opened.format, opened.mode) == ("PNG", "L")
        sheet = np.array(opened)
    assert sheet.shape == (3 * 68, 64 + 3 * 68)
    for row in range(3):  # a name stands before each
        assert (sheet[row * 68 : row * 68 + 68, :64] < 128).any()
    rows = sheet.reshape(3, 68, -1)[:, :64, 64:].reshape(3, 64, 3, 68)[..., :64]
    pixels, truth, guess = rows.transpose(0, 2, 1, 3)
    for i, number in enumerate((12, 13, 14)):
        assert np.array_equal(truth[i], np.array(image.open(cells / f"label/{number}.png")))
        gray = np.array(image.open(cells / f"image/{number}.png")).ravel()
        assert np.corrcoef(gray, pixels[i].ravel())[0, 1] > 0.999
    walls, guessed = truth == 0, guess == 0
    overlap = 2 * (walls & guessed).sum() / (walls.sum() + guessed.sum())
    assert found == pytest.approx(overlap, abs=1e-4)
    assert model(torch.zeros(1, 1, 32, 32)).shape == (1, 1, 32, 32)


# GPT.


def test_gpt_shakespeare(run, tmp_path):
    """On a text in which each of 8 letters is followed by one of two, with known chances, nothing
    is better than the perplexity of these chances."""
    draw = np.random.default_rng(0)
    letters, now = "abcdefgh", 0
    text = []
    for usual in draw.random(30_000) < 0.75:
        text.append(letters[now])
        now = (now + 1 if usual else 3 * now + 2) % 8
    (tmp_path / "tinyshakespeare.txt").write_text("".join(text) + "\n")
    small = ("--context", 16, "--width", 32, "--layers", 1, "--heads", 2, "--letters", 50)
    model, printed = run("gpt_shakespeare", *small, "--steps", 110, "--data", tmp_path)

    best = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    first, last = series(printed, "test perplexity")
    assert best < last < first
    assert last < 1.15 * best
    _, judged = data.characters("".join(text) + "\n", 16)
    windows = torch.stack([judged[i][0] for i in range(len(judged))])
    targets = torch.stack([judged[i][1] for i in range(len(judged))])
    with torch.no_grad():
        loss = F.cross_entropy(model(windows).transpose(1, 2), targets)
    assert last == pytest.approx(math.exp(loss), rel=1e-3)
    assert says_what_kfac_did(printed)

    written = printed.splitlines(keepends=True)[-1].strip("\n")
    assert len(written) <= 50
    assert set(written) <= set(letters)
    follows = pairwise(map(letters.index, written))
    allowed = [b in ((a + 1) % 8, (3 * a + 2) % 8) for a, b in follows]
    assert sum(allowed) > 0.8 * len(allowed)


# Digits.


def test_digits_autoencoder(run, tmp_path):
    """K-FAC is far ahead of SGD, and the picture has the digits and what both make of them."""
    pytest.importorskip("sklearn")
    image = pytest.importorskip("PIL.Image")
    out = tmp_path / "digits.png"
    rows, printed = run("digits_autoencoder", "--steps", 40, "--width", 64, "--out", out)
    sgd, kfac = (series(part, "test loss") for part in printed.split("K-FAC:"))
    assert len(sgd) == len(kfac) == 5
    assert sgd[-1] < sgd[0]
    assert kfac[-1] < kfac[0]
    assert kfac[-1] < sgd[-1] - 2
    assert says_what_kfac_did(printed)
    # The loss of what is in the picture is what was printed.
    unseen, guess = (rows[name].flatten(1).double() for name in ("digits", "K-FAC"))
    loss = -(unseen * guess.log() + (1 - unseen) * (1 - guess).log()).sum(1).mean()
    assert kfac[-1] == pytest.approx(float(loss), rel=1e-3)

    with image.open(out) as opened:
        assert (opened.format, opened.mode) == ("PNG", "L")
        sheet = np.array(opened)
    assert sheet.shape == (3 * 68, 64 + 12 * 68)
    drawn = sheet.reshape(3, 68, -1)[:, 4:64:8, 64:].reshape(3, 8, 12, 68)[..., 4:64:8]
    for found, name in zip(drawn.transpose(0, 2, 1, 3), ("digits", "SGD", "K-FAC"), strict=True):
        assert np.allclose(found, 255 * rows[name][:12].numpy(), atol=0.51)
    digits, _ = data.digits().test.unit().tensors()
    assert torch.equal(rows["digits"], digits[:, 0])
