"""The settings of the papers, by name, as their clusters ran them."""

from dataclasses import dataclass, replace
from typing import Any

from natgrad.lab.models import MASK_RCNN_HEADS
from natgrad.lab.schemes import LARGE_BATCH, LargeBatch
from natgrad.lab.train.settings import Settings


@dataclass(frozen=True)
class Preset:
    about: str
    settings: Settings


_RESNET50: dict[str, Any] = {
    "data": "imagenet",
    "network": "resnet50",
    "micro_batch": 32,
    "ramp": False,
    "workers": 4,
}


def _cifar10(depth: int, processes: int = 1) -> Preset:
    """Pauloski 2022, sec. 6.3.1, with the batch and the learning rate of so many processes."""
    where = f" for {processes} processes" if processes > 1 else ""
    return Preset(
        f"ResNet-{depth} on CIFAR-10{where}, 100 epochs (Pauloski 2022, sec. 6.3.1)",
        Settings(
            data="cifar10",
            augment=True,
            network=f"resnet{depth}",
            batch_size=128 * processes,
            epochs=100,
            lr=0.1 * processes,
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


def _of_32768(about: str, **others: Any) -> Preset:
    """The row of 32,768 with another interval (Osawa 2019, sec. 5.4)."""
    (row,) = (row for row in LARGE_BATCH if row.batch == 32_768)
    whole = f"the same by batches of 32,768, {row.epochs} epochs, {about} (Osawa 2019, sec. 5.4)"
    return Preset(whole, replace(_imagenet(row).settings, **others))


# Every step is one of all 50,000 images: K-FAC is off, as the paper trains by gradients alone.
_FULL_BATCH = Preset(
    "ResNet-20 on all of CIFAR-10 at once, with the gradient penalty of Geiping et al. 2022",
    Settings(
        data="cifar10",
        augment=True,
        network="resnet20",
        batch_size=50_000,
        micro_batch=250,
        steps=3000,
        lr=0.4,
        weight_decay=5e-4,
        schedule="cosine",
        warmup_share=0.13,
        second_pass="gradient-norm(tau=0.5)",
        kfac=False,
        evaluate_every=50,
        checkpoint_every=50,
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

PAPERS = {
    **{f"cifar10-resnet{depth}": _cifar10(depth) for depth in (20, 32)},
    **{f"cifar10-resnet32-{n}-processes": _cifar10(32, n) for n in (2, 4, 8)},
    "cifar10-full-batch": _FULL_BATCH,
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
    "imagenet-resnet50-ten-minutes": _of_32768(
        "new factors ever more rarely", update_every="growing", refresh_every="growing"
    ),
    "imagenet-resnet50-diagonal-norms": _of_32768(
        "a diagonal for norm layers and stale factors",
        norm_structure="diagonal",
        update_every="two-phase",
        refresh_every="two-phase",
    ),
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
