"""Losses whose scale is not known, with and without K-FAC: `python -m benchmarks.squares`.

Squared errors, before SGD with momentum 0.9, at learning rates a factor of 10 apart: without K-FAC,
with it as it is, with a damping relative to the curvature, and with the Fisher of a Gaussian, whose
mean is what the network predicts. 150 steps of 128 samples; median over seeds of the mean of the
last 20 losses, and the greatest loss of any step and seed.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import quality
from benchmarks.networks import digits_autoencoder
from natgrad import KFAC, MonteCarloFisher, Relative
from natgrad.curvature import Gaussian

RATES = (0.001, 0.01, 0.1)
SETTINGS: Mapping[str, Mapping[str, Any] | None] = {
    "SGD": None,
    "K-FAC": {},
    "K-FAC, Relative(0.1)": {"damping": Relative(0.1)},
    "K-FAC, Gaussian": {"curvature": MonteCarloFisher(likelihood=Gaussian())},
}
STEPS, BATCH, LAST = 150, 128, 20


@dataclass(frozen=True)
class Fit:
    """A network, and all its inputs and targets."""

    network: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]


def mlp(inputs: int, activation: type[nn.Module], outputs: int) -> nn.Module:
    layers = (nn.Linear(inputs, 64), activation(), nn.Linear(64, 64), activation())
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def deep_linear() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def pixels() -> tuple[Tensor, Tensor]:
    images, _ = quality.digits()
    return images, images


def one_hot() -> tuple[Tensor, Tensor]:
    images, classes = quality.digits()
    return images, F.one_hot(classes, 10).float()


def diabetes() -> tuple[Tensor, Tensor]:
    """Standardised; scikit-learn carries it."""
    from sklearn.datasets import load_diabetes

    x, y = (torch.from_numpy(each).float() for each in load_diabetes(return_X_y=True))
    return (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)


def wave() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-3, 3, 512).unsqueeze(1)
    return x, x * torch.sin(3 * x)


def nothing() -> tuple[Tensor, Tensor]:
    """Small residuals from the beginning, which become smaller."""
    return torch.randn(512, 64), torch.zeros(512, 64)


FITS: Mapping[str, Fit] = {
    "digits, autoencoder": Fit(digits_autoencoder, pixels),
    "digits, classes": Fit(lambda: mlp(64, nn.ReLU, 10), one_hot),
    "diabetes": Fit(lambda: mlp(10, nn.ReLU, 1), diabetes),
    "x sin 3x": Fit(lambda: mlp(1, nn.Tanh, 1), wave),
    "zeros": Fit(deep_linear, nothing),
}


def train(fit: Fit, rate: float, settings: Mapping[str, Any] | None, seed: int) -> list[float]:
    """The loss of each step; infinite from where it is no number."""
    torch.manual_seed(seed)
    model, (x, y) = fit.network(), fit.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    kfac = None if settings is None else KFAC(model, optimizer, **settings)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for _ in range(STEPS):
        some = torch.randint(len(x), (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[some]), y[some])
        if not bool(loss.isfinite()):
            return losses + [math.inf] * (STEPS - len(losses))
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        losses.append(loss.item())
    return losses


def cell(runs: list[list[float]]) -> str:
    last = statistics.median(statistics.fmean(losses[-LAST:]) for losses in runs)
    return f"{last:.3g} ({max(map(max, runs)):.3g})"


def table(fits: list[str], rates: list[float], seeds: int) -> str:
    """Markdown, a row for each fit and rate."""
    lines = ["| fit | rate | " + " | ".join(SETTINGS) + " |"]
    lines.append("|---|---:|" + "---:|" * len(SETTINGS))
    for name in fits:
        for rate in rates:
            found = [
                cell([train(FITS[name], rate, settings, seed) for seed in range(seeds)])
                for settings in SETTINGS.values()
            ]
            lines.append(f"| {name} | {rate:g} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fits", nargs="+", choices=FITS, default=list(FITS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(table(arguments.fits, arguments.rates, arguments.seeds))


if __name__ == "__main__":
    main()
