"""Data, network and loss fit together, or a sentence says why not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from natgrad.comm import Alone
from natgrad.errors import SettingError
from natgrad.lab import data
from natgrad.lab.train import preset, tasks
from natgrad.lab.train.training import Training
from unit.lab.train import digit_runs as runs

TEXT = "To be, or not to be, that is the question. " * 40


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Texts and images of the size of a test, in place of those that must be fetched."""
    image = pytest.importorskip("PIL.Image")
    for name, shade in (("image", 99), ("label", 255)):
        (tmp_path / name).mkdir()
        for number in range(5):
            picture = image.new("L", (24, 24), shade)
            picture.putpixel((number, number), 0)
            picture.save(tmp_path / name / f"{number}.png")
    monkeypatch.setattr(data, "tinyshakespeare", lambda folder: TEXT)
    monkeypatch.setattr(data, "wikitext2", lambda folder: data.Split(TEXT, TEXT[:200]))
    words = data.build_vocabulary(TEXT, 60)
    whole = data.masked_words
    monkeypatch.setattr(data, "masked_words", lambda text, length: whole(text, words, length))
    return SimpleNamespace(folder=str(tmp_path))


def trained(settings):
    """Two steps; losses are finite, and metrics those of the loss."""
    training = Training(settings, Alone(), torch.device("cpu"))
    losses = [float(training.step(step, batches)) for step, batches in training.batches(0)]
    assert all(0 < loss < 1000 for loss in losses)
    return training.evaluate(training.task.test)


def test_a_gpt_on_characters(small):
    sizes = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 8}
    found = trained(preset("gpt-shakespeare", epochs=0.0, steps=2, **sizes))
    assert found.keys() == {"loss", "accuracy", "perplexity"}


def test_a_unet_on_masks(small):
    sizes = {"image": 16, "width": 2, "batch_size": 2, "folder": small.folder}
    found = trained(preset("unet", steps=2, fisher="monte-carlo", **sizes))
    assert found.keys() == {"loss", "accuracy", "dice"}


def test_masked_words(small):
    settings = preset("bert-phase2", context=12, batch_size=4, micro_batch=2, steps=2)
    found = tasks.task(settings)
    inputs, targets = found.prepared(
        found.train.take(
            [0, 1],
            found.train.chances and torch.rand(2, found.train.chances, dtype=torch.float64).numpy(),
        ),
        torch.device("cpu"),
    )
    assert inputs.shape == targets.shape == (2, 12)
    assert found.objective.terms == found.train.guessed == int((targets[0] >= 0).sum())


def test_an_autoencoder_sees_what_it_should_show():
    settings = runs.settings(network="autoencoder", loss="reconstruction", mixup=0.0)
    found = tasks.task(settings)
    inputs, targets = found.prepared(found.test.take([0, 1], None), torch.device("cpu"))
    assert torch.equal(inputs.flatten(1), targets)
    assert (targets.min(), targets.max()) == (0, 1)


def test_weights_are_those_of_the_seed():
    def first(seed):
        return next(tasks.task(runs.settings(seed=seed)).network().parameters())

    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))


def test_he_normal_weights():
    model = tasks.task(runs.settings(he_normal=True, width=64)).network()
    assert abs(model[3].weight.std() / (2 / (9 * 64)) ** 0.5 - 1) < 0.05
    assert not model[3].bias.any()


def test_weights_before_norms_keep_their_norm(monkeypatch):
    """Osawa 2019, eq. 18, by the network that is there for it."""
    settings = preset("cifar10-resnet20", network="resnet8", epochs=0.0, steps=2, batch_size=8)
    images = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)
    some = data.Images(
        images, torch.arange(16) % 10, tuple("0123456789"), data.Normalise((0.5,) * 3, (0.25,) * 3)
    )
    monkeypatch.setattr(data, "cifar10", lambda folder: data.Split(some, some))
    training = Training(replace(settings, rescaling=True), Alone(), torch.device("cpu"))
    for step, batches in training.batches(0):
        training.evaluate(training.task.test)  # which leaves the averages of batch norm alone
        training.step(step, batches)
    assert training.network[1].num_batches_tracked == 2
    assert training.network[0].weight.norm().item() == pytest.approx((2 * 16) ** 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"data": "shakespeare", "loss": "cross-entropy"},
            "The data shakespeare go with loss tokens but the loss is cross-entropy: name that, or "
            "other data.",
        ),
        (
            {"data": "membrane", "loss": "reconstruction", "network": "autoencoder", "mixup": 0.0},
            "The data membrane go with loss pixels but the loss is reconstruction: name that, or "
            "other data.",
        ),
        (
            {"data": "imagenet", "loss": "reconstruction", "network": "autoencoder", "mixup": 0.0},
            "The data imagenet go with loss cross-entropy but the loss is reconstruction: name "
            "that, or other data.",
        ),
        (
            {"data": "membrane", "loss": "pixels", "network": "unet", "mixup": 0.0, "image": 100},
            "image is 100 but a unet needs sides that 16 divides: pass 96, or another network.",
        ),
        (
            {"data": "shakespeare", "loss": "tokens", "mixup": 0.0},
            "erasing is for images but the data shakespeare are text: leave it out, or name other "
            "data.",
        ),
        (
            {"augment": True},
            "augment is for the data mnist, fashion-mnist, cifar10, coco but they are digits: "
            "leave it out (imagenet and membrane are always cut at random).",
        ),
        (
            {"vocabulary": 100},
            "vocabulary is for the data wikitext2, whose text is cut into pieces, but they are "
            "digits: leave it out.",
        ),
        (
            {"image": 32},
            "image sets the size of images of imagenet, membrane and coco but the data are digits: "
            "leave it out.",
        ),
        (
            {"folder": "somewhere"},
            "folder is where data are, but digits come with scikit-learn: leave it out.",
        ),
    ],
)
def test_what_does_not_fit(values, message):
    with pytest.raises(SettingError) as error:
        tasks.task(runs.settings(**values))
    assert str(error.value) == message
