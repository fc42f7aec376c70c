"""The tasks of `benchmarks.comparison`, and who takes part in each.

Six tasks by small and by large batches, and four that run to their end. No weight decay anywhere:
it acts times the learning rate, so that it would differ between optimizers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from natgrad.lab.compare import CONTENDERS, ComparisonSetup, Contender
from natgrad.lab.compare.contender import MORE
from natgrad.lab.train import preset
from natgrad.lab.train.settings import Settings

OURS = ("naturalmuon", "naturalmuon-mc", "naturalmuon-untuned")
RIVALS = (
    *("adamw", "schedulefree", "muon", "muon-hidden", "torch-muon"),
    *("soap", "soap-1", "shampoo"),
)
SEEDS, TRIALS, MOST_TRIALS = 3, 5, 9
_TIED = "the head is the embedding, so it is the same as Muon"
_NO_EMBEDDINGS = "without embeddings it takes the same steps as Muon"
_ROOTS = "roots of wide matrices at every step take minutes a hundred steps"


@dataclass(frozen=True)
class BenchmarkTask:
    """``settings`` of a ``preset``, how it is called, which rivals are ``left_out`` and why, and
    the length of its trials if they are shorter than the runs."""

    title: str
    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    tuning_steps: int | None = None
    most_trials: int = MOST_TRIALS

    def task(self) -> Settings:
        own = {"weight_decay": 0.0, **self.settings}
        length: dict[str, Any] = {"epochs": 0.0} if "steps" in own else {}
        return preset(self.preset, **length, **own)

    def setup(
        self, threads: int = 1, seeds: int = SEEDS, *, rivals_alone: bool = False
    ) -> ComparisonSetup:
        """``rivals_alone``: without natgrad's own, who may come to it later."""
        asked = [one for one in self.contenders() if not (rivals_alone and one.is_natgrads)]
        return ComparisonSetup(
            self.task(),
            tuple(asked),
            trials=TRIALS,
            most_trials=self.most_trials,
            tuning_steps=self.tuning_steps,
            seeds=seeds,
            threads=threads,
            name=self.title,
        )

    def contenders(self) -> tuple[Contender, ...]:
        known = {**CONTENDERS, **MORE}
        return tuple(known[key] for key in (*RIVALS, *OURS) if key not in self.left_out)


# About 30 tests in a run, whatever presets say.
_TESTS = {"evaluate_every": 0, "checkpoint_every": 0, "fit_samples": 0}
_FASHION = {"width": 16, "test_samples": 2000, **_TESTS}
_RESNET = {
    "warmup": 0.0,
    "warmup_share": 0.05,
    "train_samples": 10_000,
    "test_samples": 500,
    "schedule": "polynomial",
    "decay_at": (),
    **_TESTS,
    "fit_samples": 500,
}
_GPT = {
    "context": 64,
    "width": 64,
    "layers": 2,
    "heads": 4,
    "train_samples": 8000,
    "test_samples": 500,
    "warmup": 0.0,
    "warmup_share": 0.05,
    **_TESTS,
    "fit_samples": 300,
}
_UNET = {"image": 64, "width": 8, **_TESTS}
_GPT_OUT = {"muon-hidden": _TIED}
_LONG = "not run, for time"

TASKS: dict[str, BenchmarkTask] = {
    "autoencoder-128": BenchmarkTask(
        "Autoencoder of digits, 300 steps of 128",
        "digits-autoencoder",
        {"batch_size": 128, **_TESTS},
    ),
    "autoencoder-1024": BenchmarkTask(
        "Autoencoder of digits, 150 steps of 1,024",
        "digits-autoencoder",
        {"batch_size": 1024, "steps": 150, **_TESTS},
    ),
    "digits-128": BenchmarkTask(
        "Digits, convnet, 200 steps of 128", "digits-cnn", {"batch_size": 128, **_TESTS}
    ),
    "digits-1024": BenchmarkTask(
        "Digits, convnet, 100 steps of 1,024",
        "digits-cnn",
        {"batch_size": 1024, "steps": 100, **_TESTS},
    ),
    "fashion-256": BenchmarkTask(
        "Fashion-MNIST, convnet, 234 steps of 256",
        "fashion-mnist-cnn",
        {"batch_size": 256, "steps": 234, **_FASHION},
    ),
    "fashion-2048": BenchmarkTask(
        "Fashion-MNIST, convnet, 58 steps of 2,048",
        "fashion-mnist-cnn",
        {"batch_size": 2048, "micro_batch": 512, "steps": 58, **_FASHION},
    ),
    "resnet20-128": BenchmarkTask(
        "ResNet-20, 10,000 images of CIFAR-10, 100 steps of 128",
        "cifar10-resnet20",
        {"steps": 100, **_RESNET},
    ),
    "resnet20-512": BenchmarkTask(
        "ResNet-20, 10,000 images of CIFAR-10, 40 steps of 512",
        "cifar10-resnet20",
        {"batch_size": 512, "micro_batch": 128, "steps": 40, **_RESNET},
    ),
    "gpt-32": BenchmarkTask(
        "GPT of two layers on tinyshakespeare, 150 steps of 32 windows",
        "gpt-shakespeare",
        {"batch_size": 32, "steps": 150, **_GPT},
        _GPT_OUT,
    ),
    "gpt-256": BenchmarkTask(
        "GPT of two layers on tinyshakespeare, 60 steps of 256 windows",
        "gpt-shakespeare",
        {"batch_size": 256, "steps": 60, **_GPT},
        _GPT_OUT,
    ),
    "unet-4": BenchmarkTask(
        "U-Net of width 8 on membranes, 150 steps of 4",
        "unet",
        {"batch_size": 4, "steps": 150, **_UNET},
    ),
    "unet-24": BenchmarkTask(
        "U-Net of width 8 on membranes, 50 steps of 24",
        "unet",
        {"batch_size": 24, "steps": 50, **_UNET},
    ),
    "gpt-2000-steps": BenchmarkTask(
        "GPT of three layers on tinyshakespeare, 2,000 steps of 32 windows",
        "gpt-2000-steps",
        left_out={**_GPT_OUT, "shampoo": _ROOTS},
        tuning_steps=400,
        most_trials=7,
    ),
    "mnist-deep-autoencoder": BenchmarkTask(
        "Autoencoder 784-1000-500-250-30 on MNIST, 300 steps of 500",
        "mnist-deep-autoencoder",
        left_out={"shampoo": _ROOTS},
        tuning_steps=100,
        most_trials=7,
    ),
    "bert-wikitext2": BenchmarkTask(
        "Masked-LM BERT of two layers on WikiText-2, 1,000 steps of 32 windows",
        "bert-wikitext2",
        left_out={**_GPT_OUT, "shampoo": _ROOTS},
        tuning_steps=250,
        most_trials=7,
    ),
    "resnet20-1000-steps": BenchmarkTask(
        "ResNet-20 on all of CIFAR-10, 1,000 steps of 128",
        "resnet20-1000-steps",
        left_out={"torch-muon": _NO_EMBEDDINGS, "soap-1": _LONG, "shampoo": _LONG},
        tuning_steps=200,
        most_trials=7,
    ),
}
