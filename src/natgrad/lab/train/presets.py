"""Settings by name: small ones that run anywhere, and those of the papers."""

from dataclasses import replace
from typing import Any

from natgrad.errors import SettingError
from natgrad.lab.train.paper_presets import PAPERS, Preset
from natgrad.lab.train.settings import Settings

# What several of them have in common.
_LINEAR: dict[str, Any] = {"lr": 0.03, "schedule": "polynomial"}  # down to 0
_DIGITS: dict[str, Any] = {"evaluate_every": 20, "checkpoint_every": 50, **_LINEAR}
_AUTOENCODER: dict[str, Any] = {
    "network": "autoencoder",
    "loss": "reconstruction",
    "metric": "loss",
}

_SMALL = {
    "digits-cnn": Preset(
        "a convnet on scikit-learn's digits: seconds", Settings(steps=200, **_DIGITS)
    ),
    "digits-autoencoder": Preset(
        "an autoencoder on the same", Settings(steps=300, **_AUTOENCODER, **_DIGITS)
    ),
    "mnist-cnn": Preset("a convnet on MNIST", Settings(data="mnist", epochs=5, **_LINEAR)),
    "fashion-mnist-cnn": Preset(
        "a convnet on Fashion-MNIST",
        Settings(data="fashion-mnist", width=32, epochs=10, **_LINEAR),
    ),
    "mnist-autoencoder": Preset(
        "an autoencoder on MNIST",
        Settings(data="mnist", width=1000, epochs=20, batch_size=1000, **_AUTOENCODER, **_LINEAR),
    ),
    "gpt-shakespeare": Preset(
        "a GPT of 0.8 million parameters on the characters of tinyshakespeare",
        Settings(
            data="shakespeare",
            network="gpt",
            loss="tokens",
            metric="perplexity",
            batch_size=64,
            epochs=5,
            optimizer="adamw",
            lr=3e-3,
            weight_decay=0.1,
            schedule="cosine",
            warmup=0.05,
        ),
    ),
    "unet": Preset(
        "a small U-Net on the membranes of ISBI 2012 (as in KAISA, Pauloski 2021)",
        Settings(
            data="membrane",
            image=128,
            network="unet",
            width=16,
            loss="pixels",
            metric="dice",
            batch_size=4,
            steps=300,
            lr=0.1,
            schedule="polynomial",
            evaluate_every=50,
            checkpoint_every=50,
        ),
    ),
}


# Runs to their end of a few minutes on one core (ResNet-20: a quarter of an hour), for comparisons:
# without weight decay, which acts times the learning rate and so differs between optimizers.
_TO_THE_END = {
    "resnet20-1000-steps": Preset(
        "ResNet-20 on CIFAR-10, 1,000 steps of 128",
        Settings(
            data="cifar10",
            augment=True,
            network="resnet20",
            batch_size=128,
            steps=1000,
            warmup_share=0.05,
            test_samples=2000,
            fit_samples=1000,
            evaluate_every=40,
            checkpoint_every=100,
            **_LINEAR,
        ),
    ),
    "gpt-2000-steps": Preset(
        "a GPT of 0.4 million parameters on tinyshakespeare, 2,000 steps of 32 windows",
        Settings(
            data="shakespeare",
            context=64,
            network="gpt",
            width=96,
            layers=3,
            heads=4,
            loss="tokens",
            metric="perplexity",
            batch_size=32,
            steps=2000,
            optimizer="adamw",
            lr=3e-3,
            schedule="cosine",
            warmup_share=0.05,
            test_samples=500,
            fit_samples=500,
            evaluate_every=50,
            checkpoint_every=250,
        ),
    ),
    "mnist-deep-autoencoder": Preset(
        "784-1000-500-250-30 and back on MNIST, 300 steps of 500",
        Settings(
            data="mnist",
            network="deep-autoencoder",
            loss="reconstruction",
            metric="loss",
            batch_size=500,
            steps=300,
            test_samples=2000,
            fit_samples=2000,
            evaluate_every=10,
            checkpoint_every=50,
            **_LINEAR,
        ),
    ),
    "bert-wikitext2": Preset(
        "a masked-LM BERT of 0.7 million parameters on WikiText-2, 1,000 steps of 32 windows",
        Settings(
            data="wikitext2",
            context=64,
            vocabulary=1024,
            network="bert",
            width=128,
            layers=2,
            heads=4,
            loss="masked-tokens",
            metric="loss",
            batch_size=32,
            steps=1000,
            optimizer="adamw",
            lr=3e-3,
            schedule="cosine",
            warmup_share=0.05,
            test_samples=500,
            fit_samples=500,
            evaluate_every=40,
            checkpoint_every=100,
        ),
    ),
}


PRESETS: dict[str, Preset] = {**_SMALL, **_TO_THE_END, **PAPERS}


def preset(name: str, **others: Any) -> Settings:
    """The settings of that name, some of them replaced.

    Arguments:
        name: one of ``PRESETS``; others raise.
        others: fields of `Settings` that are replaced.
    """
    if name not in PRESETS:
        raise SettingError(f"There is no preset {name!r}: name one of {', '.join(PRESETS)}.")
    return replace(PRESETS[name].settings, **others)
