"""Each preset builds its network, optimizer and schedule; large ones without weights."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from natgrad import Diagonal, UnitWise
from natgrad.errors import SettingError
from natgrad.lab.models.by_name import TaskShapes
from natgrad.lab.names import SECOND_PASSES
from natgrad.lab.schemes import LAMB, LARGE_BATCH, DisplacementMomentum, GradientNorm
from natgrad.lab.train import PRESETS, networks, optimizers, preset
from natgrad.lab.train.task_losses import Classes
from natgrad.schedules import GrowingInterval, TwoPhaseInterval

SHAPES = {
    "digits": TaskShapes((1, 8, 8), 10),
    "mnist": TaskShapes((1, 28, 28), 10),
    "fashion-mnist": TaskShapes((1, 28, 28), 10),
    "cifar10": TaskShapes((3, 32, 32), 10),
    "imagenet": TaskShapes((3, 224, 224), 1000),
    "membrane": TaskShapes((1, 256, 256), 2),
    "shakespeare": TaskShapes(vocabulary=65),
    "wikitext2": TaskShapes(vocabulary=8192),
    "unlabelled": TaskShapes(inputs=(4,)),
}
SIZES = {
    "mnist-deep-autoencoder": 2 * (784 * 1000 + 1000 * 500 + 500 * 250 + 250 * 30)
    + 2 * (1000 + 500 + 250)
    + 30
    + 784,
    "gpt-2000-steps": (65 + 64) * 96 + 3 * (12 * 96**2 + 13 * 96) + 2 * 96,
    "cifar10-resnet32": 464_154,
    "imagenet-resnet50": 25_557_032,
    "gpt-shakespeare": (65 + 128) * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128,
    "bert-phase2": (8192 + 512 + 2 + 2) * 1024
    + 24 * (12 * 1024**2 + 13 * 1024)
    + (1024**2 + 3 * 1024 + 8192),
    "digits-autoencoder": 2 * (64 * 128 + 128 * 64 + 64 * 32 + 32 * 12)
    + (128 + 64 + 32 + 12 + 32 + 64 + 128 + 64),
}


# Mask R-CNN has tests of its own, with torchvision.
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "mask-rcnn"])
def test_it_builds(name):
    settings = PRESETS[name].settings
    if settings.network == "bert":
        pytest.importorskip("transformers")
    about = SHAPES[settings.data]
    with torch.device("meta"):
        model = networks.build(settings, about)
        if about.vocabulary:
            inputs = torch.zeros(2, settings.context, dtype=torch.int64)
        else:
            inputs = torch.zeros(2, *about.image)
        output = model(inputs)
    expected = {
        "cross-entropy": (2, about.classes),
        "reconstruction": (2, math.prod(about.image or ())),
        "pixels": (2, 1, *(about.image or ())[1:]),
    }.get(settings.loss, (2, settings.context, about.vocabulary))
    assert output.shape == expected
    if name in SIZES:
        assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    lr = optimizers.rate(settings, 100.0, 10_000)
    made = optimizers.optimizer(settings, model, lr)
    optimizers.set_rate(settings, made, lr, 0)
    assert 0 < lr(0) <= settings.lr
    found = optimizers.preconditioner(settings, model, made, Classes(10))
    without = name in ("bert-phase1", "cifar10-full-batch")
    assert (found is not None) == settings.kfac == (not without)


@pytest.mark.parametrize("row", LARGE_BATCH, ids=lambda row: str(row.batch))
def test_large_batches_are_those_of_the_table(row, monkeypatch):
    """The schedules are the objects that the table's own methods make (Osawa 2019, table 3)."""
    settings = preset(f"imagenet-resnet50-bs{row.batch}")
    rate = optimizers.rate(settings, row.steps_per_epoch(), row.steps())
    assert [rate(t) for t in range(0, row.steps(), 50)] == pytest.approx(
        [row.lr_schedule()(t) for t in range(0, row.steps(), 50)]
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    made = optimizers.optimizer(settings, model, rate)
    assert isinstance(made, DisplacementMomentum)
    optimizers.set_rate(settings, made, rate, 200)
    model(torch.zeros(1, 2)).sum().backward()
    made.step()
    assert made.param_groups[0]["displacement_momentum"] == pytest.approx(
        row.momentum_schedule()(200)
    )
    given = {}
    monkeypatch.setattr(optimizers, "KFAC", lambda *args, **others: given.update(others))
    optimizers.preconditioner(settings, model, made, Classes(2))
    assert row.kfac() == {name: given[name] for name in row.kfac()}
    monkeypatch.undo()
    kfac = optimizers.preconditioner(settings, model, made, Classes(2))
    for step in (0, 7, 100):
        now = kfac.settings.at(step)
        assert now.damping == pytest.approx(row.damping_schedule()(step))
        assert (now.norm_damping, now.kl_clip) == (row.norm_damping, None)
    assert (settings.mixup, settings.epochs) == (row.mixup_alpha, row.epochs)


def test_images_are_prepared_as_in_the_papers():
    """Osawa 2019 with its mean image; Pauloski 2022 as is usual for ResNet-50."""
    for row in LARGE_BATCH:
        settings = preset(f"imagenet-resnet50-bs{row.batch}")
        assert (settings.crop, settings.mean_image) == ("squeeze", True)
    settings = preset("imagenet-resnet50")
    assert (settings.crop, settings.mean_image) == ("zoom", False)


def test_values_are_replaced():
    settings = preset("digits-cnn", steps=7, optimizer="lamb", lr=1e-3)
    assert (settings.steps, settings.data) == (7, "digits")
    model = torch.nn.Linear(2, 2)
    assert isinstance(optimizers.optimizer(settings, model, lambda step: 1e-3), LAMB)


def test_an_unknown_one():
    with pytest.raises(SettingError, match="There is no preset 'mnst': name one of digits-cnn, "):
        preset("mnst")


def test_phases_of_bert():
    """Only long windows, refresh every 50, factors every 5 (Pauloski 2022, sec. 6.3.3)."""
    first, second = preset("bert-phase1"), preset("bert-phase2")
    assert (first.kfac, first.context, first.steps, first.batch_size) == (False, 128, 7038, 65536)
    assert (second.kfac, second.context, second.steps, second.batch_size) == (
        True,
        512,
        1000,
        32768,
    )
    assert (second.update_every, second.refresh_every) == (5, 50)
    for settings, warm in ((first, 2001), (second, 128)):
        rate = optimizers.rate(settings, 0.3, settings.steps)
        rates = [rate(step) for step in range(settings.steps)]
        assert rates.index(max(rates)) == warm
        assert rates[0] == pytest.approx(settings.lr / warm)
        left = 1 - warm / settings.steps
        assert rates[warm] == pytest.approx(settings.lr * left**0.5)


def test_bert_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SettingError) as error:
        networks.build(preset("bert-phase2"), TaskShapes(vocabulary=10))
    assert str(error.value) == (
        "BERT needs transformers, which is not installed: pip install 'natgrad[train]'."
    )


@pytest.mark.parametrize(
    ("values", "data", "message"),
    [
        (
            {"network": "gpt"},
            "digits",
            "network gpt goes with loss tokens but the loss is cross-entropy, which goes with "
            "convnet, convnet-norm, mlp, ",
        ),
        (
            {"network": "resnet20"},
            "digits",
            "network resnet20 takes images of 3 channels but those of the data have 1: name "
            "another network, or other data.",
        ),
        (
            {"network": "autoencoder"},
            "digits",
            "network autoencoder goes with loss reconstruction but the loss is cross-entropy, "
            "which goes with convnet, ",
        ),
        (
            {"network": "gpt", "data": "wikitext2", "loss": "masked-tokens"},
            "wikitext2",
            "network gpt goes with loss tokens but the loss is masked-tokens, which goes with "
            "bert: name another network, or another loss.",
        ),
        (
            {"network": "transformer"},
            "digits",
            "network transformer takes sequences of vectors, which no data set has: name another "
            "one.",
        ),
        (
            {"network": "convnet"},
            "wikitext2",
            "network convnet takes images [channels, height, width] but the data are tokens: name "
            "another network, or other data.",
        ),
        (
            {"network": "mlp"},
            "unlabelled",
            "network mlp has an output for each class but the data do not say how many there are: "
            "give the training data an attribute classes, a number or their names, or name a "
            "network of your own.",
        ),
        (
            {"network": "gpt", "loss": "tokens"},
            "unlabelled",
            "network gpt takes tokens but the data do not say how many different ones there are: "
            "give the training data an attribute vocabulary, a number or the tokens, or name "
            "another network.",
        ),
    ],
)
def test_networks_that_do_not_fit(values, data, message):
    with pytest.raises(SettingError) as error:
        networks.build(preset("digits-cnn", **values), SHAPES[data])
    assert str(error.value).startswith(message)


def test_intervals_and_norm_layers_of_stale_runs():
    """Osawa 2019, eq. 20 and 21, with the batch of 32,768, and 39.1 steps an epoch."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    row = next(row for row in LARGE_BATCH if row.batch == 32_768)
    for name, interval, structure in (
        ("ten-minutes", GrowingInterval(39.1), UnitWise),
        ("diagonal-norms", TwoPhaseInterval(39.1), Diagonal),
    ):
        settings = preset(f"imagenet-resnet50-{name}")
        assert (settings.batch_size, settings.lr) == (row.batch, row.lr)
        made = optimizers.optimizer(settings, model, lambda step: 0.1)
        kfac = optimizers.preconditioner(settings, model, made, Classes(3), 39.1)
        for clocks in (kfac.update_clocks, kfac.refresh_clocks):
            assert {clock.interval for clock in clocks.clocks.values()} == {interval}
        assert type(kfac.blocks[1].structure) is structure


def test_more_processes_have_larger_batches_and_rates():
    """Pauloski 2022, sec. 6.3.1: 128 samples and a rate of 0.1 for each."""
    one = preset("cifar10-resnet32")
    for processes in (2, 4, 8):
        several = preset(f"cifar10-resnet32-{processes}-processes")
        assert (several.batch_size, several.lr) == (128 * processes, 0.1 * processes)
        assert replace(several, batch_size=one.batch_size, lr=one.lr) == one


def test_full_batches():
    settings = preset("cifar10-full-batch")
    assert (settings.batch_size, settings.kfac) == (50_000, False)
    made = SECOND_PASSES[settings.second_pass]([torch.zeros(2)])
    assert (type(made), made.tau) == (GradientNorm, 0.5)
