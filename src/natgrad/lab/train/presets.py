"""Settings by name: small ones that run anywhere, and those of the papers."""

from dataclasses import dataclass, replace
from typing import Any

from natgrad.errors import SettingError
from natgrad.lab.models import MASK_RCNN_HEADS
from natgrad.lab.schemes import LARGE_BATCH, LargeBatch
from natgrad.lab.train.settings import Settings


@dataclass(frozen=True)
class Preset:
    about: str
    settings: Settings


# What several of them have in common.
_LINEAR: dict[str, Any] = {"lr": 0.03, "schedule": "polynomial"}  # down to 0
_DIGITS: dict[str, Any] = {"evaluate_every": 20, "checkpoint_every": 50, **_LINEAR}
_AUTOENCODER: dict[str, Any] = {
    "network": "autoencoder",
    "loss": "reconstruction",
    "metric": "loss",
}
_RESNET50: dict[str, Any] = {
    "data": "imagenet",
    "network": "resnet50",
    "micro_batch": 32,
    "ramp": False,
    "workers": 4,
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


def _cifar10(depth: int) -> Preset:
    """Pauloski 2022, sec. 6.3.1, with the batch and the learning rate of one process."""
    return Preset(
        f"ResNet-{depth} on CIFAR-10, 100 epochs (Pauloski 2022, sec. 6.3.1)",
        Settings(
            data="cifar10",
            augment=True,
            network=f"resnet{depth}",
            batch_size=128,
            epochs=100,
            lr=0.1,
            weight_decay=5e-4,
            schedule="steps",
            warmup=5,
            decay_at=(35, 75, 90),
            damping=3e-3,
            refresh_every=10,
            update_every=1,
            ramp=False,
        ),
    )


def _imagenet(row: LargeBatch) -> Preset:
    """A row of table 3 of Osawa 2019."""
    return Preset(
        f"ResNet-50 on ImageNet by batches of {row.batch:,}, {row.epochs} epochs (Osawa 2019)",
        Settings(
            mean_image=True,
            he_normal=True,
            mixup=row.mixup_alpha,
            erasing=0.5,
            batch_size=row.batch,
            epochs=row.epochs,
            lr=row.lr,
            momentum=row.momentum,
            displacement=True,
            coupled=True,
            rescaling=True,
            schedule="polynomial",
            decay_begin=row.begin,
            decay_end=row.end,
            decay_power=row.power,
            damping=row.damping,
            damping_target=row.target_damping,
            damping_steps=row.warm_steps,
            norm_damping=row.norm_damping,
            factor_decay=0.0,
            inverse="cholesky",
            kl_clip=0.0,
            update_every=1,
            refresh_every=1,
            **_RESNET50,
        ),
    )


_BERT: dict[str, Any] = {
    "data": "wikitext2",
    "network": "bert",
    "dropout": 0.1,
    "loss": "masked-tokens",
    "metric": "loss",
    "micro_batch": 8,
    "optimizer": "lamb",
    "weight_decay": 0.01,
    "schedule": "polynomial",
    "decay_power": 0.5,
    "precision": "bfloat16",
    "kl_clip": 0.0,  # LAMB gives every layer a length of its own
    "update_every": 5,
    "refresh_every": 50,
    "exclude": ("*embeddings*", "*decoder*"),
    "evaluate_every": 50,
    "checkpoint_every": 50,
}

_PAPERS = {
    **{f"cifar10-resnet{depth}": _cifar10(depth) for depth in (20, 32)},
    "imagenet-resnet50": Preset(
        "ResNet-50 on ImageNet by batches of 512, 55 epochs (Pauloski 2022, sec. 6.3.1)",
        Settings(
            crop="zoom",
            label_smoothing=0.1,
            batch_size=512,
            epochs=55,
            lr=0.2,
            weight_decay=5e-5,
            schedule="steps",
            warmup=5,
            decay_at=(25, 35, 40, 45, 50),
            damping=1e-3,
            update_every=10,
            refresh_every=10,
            **_RESNET50,
        ),
    ),
    **{f"imagenet-resnet50-bs{row.batch}": _imagenet(row) for row in LARGE_BATCH},
    "mask-rcnn": Preset(
        "Mask R-CNN on COCO, K-FAC on box and mask heads, to a box AP of 0.377 (Pauloski 2022)",
        Settings(
            data="coco",
            augment=True,
            network="mask-rcnn",
            loss="instances",
            metric="box_ap",
            target=0.377,
            batch_size=64,
            micro_batch=2,
            epochs=13,
            lr=0.08,
            weight_decay=1e-4,
            schedule="steps",
            warmup=0.25,
            decay_at=(8, 11),
            damping=0.3,
            update_every=50,
            refresh_every=500,
            include=tuple(MASK_RCNN_HEADS),
            workers=4,
        ),
    ),
    "bert-phase1": Preset(
        "BERT-Large, windows of 128, with LAMB alone: 7,038 steps (Pauloski 2022, sec. 6.3.3)",
        Settings(
            context=128,
            batch_size=65536,
            steps=7038,
            lr=6e-3,
            warmup_share=0.2843,
            kfac=False,
            **_BERT,
        ),
    ),
    "bert-phase2": Preset(
        "then windows of 512, K-FAC, 1,000 steps; --start-from phase 1 (Pauloski 2022, table 4)",
        Settings(
            context=512,
            batch_size=32768,
            steps=1000,
            lr=4e-3,
            warmup_share=0.128,
            damping=3e-3,
            **_BERT,
        ),
    ),
}

PRESETS: dict[str, Preset] = {**_SMALL, **_TO_THE_END, **_PAPERS}


def preset(name: str, **others: Any) -> Settings:
    """The settings of that name, some of them replaced.

    Arguments:
        name: one of ``PRESETS``; others raise.
        others: fields of `Settings` that are replaced.
    """
    if name not in PRESETS:
        raise SettingError(f"There is no preset {name!r}: name one of {', '.join(PRESETS)}.")
    return replace(PRESETS[name].settings, **others)
