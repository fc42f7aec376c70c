"""Settings by name: small ones that run anywhere, and those of the papers."""

from dataclasses import dataclass, replace
from typing import Any

from natgrad.errors import SettingError
from natgrad.schemes import LARGE_BATCH, LargeBatch
from natgrad.train.settings import Settings


@dataclass(frozen=True)
class Preset:
    about: str
    settings: Settings


_POLYNOMIAL: dict[str, Any] = {"schedule": "polynomial"}  # linear down to 0 unless more is said

_SMALL = {
    "digits-cnn": Preset(
        "a convnet on scikit-learn's digits: seconds",
        Settings(steps=200, lr=0.03, evaluate_every=20, checkpoint_every=50, **_POLYNOMIAL),
    ),
    "digits-autoencoder": Preset(
        "an autoencoder on the same",
        Settings(
            network="autoencoder",
            loss="reconstruction",
            steps=300,
            lr=0.03,
            metric="loss",
            evaluate_every=20,
            checkpoint_every=50,
            **_POLYNOMIAL,
        ),
    ),
    "mnist-cnn": Preset(
        "a convnet on MNIST",
        Settings(data="mnist", epochs=5, lr=0.03, **_POLYNOMIAL),
    ),
    "fashion-mnist-cnn": Preset(
        "a convnet on Fashion-MNIST",
        Settings(data="fashion-mnist", width=32, epochs=10, lr=0.03, **_POLYNOMIAL),
    ),
    "mnist-autoencoder": Preset(
        "an autoencoder on MNIST",
        Settings(
            data="mnist",
            network="autoencoder",
            width=1000,
            loss="reconstruction",
            epochs=20,
            batch_size=1000,
            lr=0.03,
            metric="loss",
            **_POLYNOMIAL,
        ),
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
            kl_clip=0.0,
            damping=0.1,
        ),
    ),
    "unet-membrane": Preset(
        "a small U-Net on the membranes of ISBI 2012 (K10)",
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
            # Both are of a sample's loss, the sum over its pixels.
            damping=10.0,
            kl_clip=50.0,
            evaluate_every=50,
            checkpoint_every=50,
            **_POLYNOMIAL,
        ),
    ),
}


def _cifar10(depth: int) -> Preset:
    """P19, with the batch and the learning rate of one process."""
    return Preset(
        f"ResNet-{depth} on CIFAR-10, 100 epochs (P19)",
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
            refresh_every=10,
            update_every=1,
            ramp=False,
        ),
    )


def _imagenet(row: LargeBatch) -> Preset:
    """A row of Table 3 (O23)."""
    return Preset(
        f"ResNet-50 on ImageNet by batches of {row.batch:,}, {row.epochs} epochs (O23)",
        Settings(
            data="imagenet",
            network="resnet50",
            he_normal=True,
            mixup=row.mixup_alpha,
            erasing=0.5,
            batch_size=row.batch,
            micro_batch=32,
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
            decay=0.0,
            inverse="cholesky",
            kl_clip=0.0,
            update_every=1,
            refresh_every=1,
            ramp=False,
            workers=4,
        ),
    )


_PAPERS = {
    **{f"cifar10-resnet{depth}": _cifar10(depth) for depth in (20, 32)},
    "imagenet-resnet50": Preset(
        "ResNet-50 on ImageNet by batches of 512, 55 epochs (P20)",
        Settings(
            data="imagenet",
            network="resnet50",
            label_smoothing=0.1,
            batch_size=512,
            micro_batch=32,
            epochs=55,
            lr=0.2,
            weight_decay=5e-5,
            schedule="steps",
            warmup=5,
            decay_at=(25, 35, 40, 45, 50),
            damping=1e-3,
            update_every=10,
            refresh_every=10,
            ramp=False,
            workers=4,
        ),
    ),
    **{f"imagenet-resnet50-bs{row.batch}": _imagenet(row) for row in LARGE_BATCH},
    "bert-phase2": Preset(
        "BERT-Large, windows of 512, with LAMB: 1,000 steps instead of 1,563 (P24)",
        Settings(
            data="wikitext2",
            context=512,
            network="bert",
            dropout=0.1,
            loss="masked-tokens",
            metric="loss",
            batch_size=32768,
            micro_batch=8,
            steps=1000,
            optimizer="lamb",
            lr=4e-3,
            weight_decay=0.01,
            schedule="polynomial",
            decay_power=0.5,
            precision="bfloat16",
            update_every=5,
            refresh_every=50,
            exclude=("*embeddings*", "*decoder*"),
        ),
    ),
}

PRESETS: dict[str, Preset] = {**_SMALL, **_PAPERS}


def preset(name: str, **others: Any) -> Settings:
    """The settings of that name, some of them replaced."""
    if name not in PRESETS:
        raise SettingError(f"There is no preset {name!r}: name one of {', '.join(PRESETS)}.")
    return replace(PRESETS[name].settings, **others)
