"""K-FAC in loops that were tuned without it: `python -m benchmarks.loops`.

Four loops as people write them, each with its own optimizer, learning rate, schedule and clip: a
small GPT on characters with AdamW and with SGD, and a VAE on handwritten digits with Adam and with
SGD. Nothing of them is changed. Then `natgrad.KFAC(model, optimizer)` is added, at its defaults,
with `length=natgrad.lengths.Graft()`, and with the root of the curvature, as Adam divides by one,
`geometry=natgrad.geometry.Euclidean(0.5)`, and beside the optimizer's own update, with
`length=natgrad.lengths.Dogleg()`. In the place of Adam, whose update has a root mean square of
about its learning rate, `NaturalMuon` steps as far at the same rate. What is printed is the last
loss (mean over the last twentieth of the steps), for each of some seeds and on average.

SGD's rates are the best of 0.01, 0.03, 0.1, 0.3, 1.0 without K-FAC (`--tune` finds them again).
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import natgrad
from natgrad.lab.data.text import tinyshakespeare
from natgrad.lab.models.gpt import GPT

CONTEXT, BATCH = 64, 16
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
Settings = dict[str, Any]
METHODS: dict[str, Settings | None] = {
    "as it is": None,
    "`KFAC(model, optimizer)`": {},
    "`KFAC(model, optimizer, length=Graft())`": {"length": natgrad.lengths.Graft()},
    "`KFAC(model, optimizer, geometry=Euclidean(0.5))`": {
        "geometry": natgrad.geometry.Euclidean(0.5)
    },
    "`KFAC(model, optimizer, length=Dogleg()).attach()`": {"length": natgrad.lengths.Dogleg()},
}
INSTEAD: dict[str, Settings] = {
    "`NaturalMuon(model, lr)`": {},
    "`NaturalMuon(model, lr, geometry=Euclidean())`": {"geometry": natgrad.geometry.Euclidean()},
}


class VAE(nn.Module):
    """Probabilities of pixels, mean and logarithmic variance of the code: `[n, 64] -> ...`."""

    def __init__(self, pixels: int = 64, hidden: int = 64, code: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(pixels, hidden)
        self.mean, self.variance = nn.Linear(hidden, code), nn.Linear(hidden, code)
        self.back, self.last = nn.Linear(code, hidden), nn.Linear(hidden, pixels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.first(x))
        mean, log_variance = self.mean(h), self.variance(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return torch.sigmoid(self.last(F.relu(self.back(z)))), mean, log_variance


Batches = Iterator[Any]


@dataclass(frozen=True)
class Loop:
    """One training loop. ``loss`` of a model and a batch; ``unit`` divides it where it is shown."""

    model: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], Batches]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module, float], Optimizer]
    rate: float
    steps: int
    clip: float | None = None
    warmup: int = 0
    unit: float = 1.0


def windows(generator: torch.Generator) -> Batches:
    """Characters `[16, 64]` and the ones after them, from the first 200,000."""
    text = tinyshakespeare()[:200_000]
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[c] for c in text])
    while True:
        start = torch.randint(len(tokens) - CONTEXT - 1, (BATCH, 1), generator=generator)
        rows = tokens[start + torch.arange(CONTEXT + 1)]
        yield rows[:, :-1], rows[:, 1:]


def digit_batches(generator: torch.Generator) -> Batches:
    """Pixels from 0 to 1, `[128, 64]`."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    pixels = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    while True:
        yield pixels[torch.randint(len(pixels), (128,), generator=generator)]


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, after = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), after.flatten())


def elbo(model: nn.Module, x: Any) -> Tensor:
    """Summed over the batch, as in pytorch/examples."""
    found, mean, log_variance = model(x)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return F.binary_cross_entropy(found, x, reduction="sum") + divergence


def mean_elbo(model: nn.Module, x: Any) -> Tensor:
    return elbo(model, x) / len(x)


def gpt() -> nn.Module:
    return GPT(len(set(tinyshakespeare()[:200_000])), CONTEXT, layers=2, heads=4, width=64)


def adamw(model: nn.Module, rate: float) -> Optimizer:
    return AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.1)


def adam(model: nn.Module, rate: float) -> Optimizer:
    return Adam(model.parameters(), lr=rate)


def sgd(model: nn.Module, rate: float) -> Optimizer:
    return SGD(model.parameters(), lr=rate, momentum=0.9)


LOOPS = {
    "GPT, AdamW": Loop(gpt, windows, token_loss, adamw, 1e-3, 400, clip=1.0, warmup=40),
    "GPT, SGD": Loop(gpt, windows, token_loss, sgd, 0.3, 400, clip=1.0, warmup=40),
    "VAE, Adam": Loop(VAE, digit_batches, elbo, adam, 1e-3, 600, unit=128),
    "VAE, SGD": Loop(VAE, digit_batches, mean_elbo, sgd, 0.03, 600),
}


def train(
    loop: Loop, settings: Settings | None, seed: int, rate: float, *, instead: bool = False
) -> float:
    """The last loss; infinite if training has failed. ``instead``: of the loop's optimizer."""
    torch.manual_seed(seed)
    model = loop.model()
    optimizer = loop.optimizer(model, rate)
    kfac = None
    if instead:
        decay = optimizer.param_groups[0]["weight_decay"] if loop.optimizer is adamw else 0.0
        optimizer = natgrad.NaturalMuon(model, rate, weight_decay=decay, **(settings or {}))
    elif settings is not None:
        kfac = natgrad.KFAC(model, optimizer, **settings)
        if isinstance(settings.get("length"), natgrad.lengths.Dogleg):
            kfac.attach()
    batches = loop.batches(torch.Generator().manual_seed(seed))
    seen = []
    for step in range(loop.steps):
        if loop.warmup:  # then a cosine to a tenth
            share = (step - loop.warmup) / (loop.steps - loop.warmup)
            down = 0.1 + 0.45 * (1 + math.cos(math.pi * max(0.0, share)))
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / loop.warmup) * down
        optimizer.zero_grad()
        loss = loop.loss(model, next(batches))
        loss.backward()
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        if kfac is not None and kfac.attachment is None:
            kfac.step()
        optimizer.step()
        seen.append(float(loss.detach()) / loop.unit)
    last = statistics.fmean(seen[-loop.steps // 20 :])
    return last if math.isfinite(last) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--loop", action="append", choices=list(LOOPS))
    parser.add_argument("--method", action="append", help="of the table, in its words; else all")
    parser.add_argument("--tune", action="store_true", help="SGD's rates, without K-FAC")
    args = parser.parse_args()
    print("| loop | method | rate | last loss of each seed | mean |\n|---|---|---:|---|---:|")
    for name in args.loop or LOOPS:
        loop = LOOPS[name]
        methods = METHODS if loop.optimizer is sgd else {**METHODS, **INSTEAD}
        methods = {k: v for k, v in methods.items() if k in (args.method or methods)}
        if args.tune:
            methods = {"as it is": None}
        for rate in RATES if args.tune else (loop.rate,):
            for method, settings in methods.items():
                found = [
                    train(loop, settings, seed, rate, instead=method in INSTEAD)
                    for seed in range(args.seeds)
                ]
                each = ", ".join(f"{loss:.3f}" for loss in found)
                mean = statistics.fmean(found)
                print(f"| {name} | {method} | {rate:g} | {each} | {mean:.3f} |", flush=True)


if __name__ == "__main__":
    main()
