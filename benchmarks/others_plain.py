"""Loops of others that are plain PyTorch, at their own settings, for `benchmarks.others`.

What was left out or made smaller is said where it is; the rest is what these repositories do.
"""

import math
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adadelta, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from benchmarks.others import Line, Loop
from natgrad.lab.data.cifar10 import cifar10
from natgrad.lab.data.images import Images
from natgrad.lab.data.mnist import mnist
from natgrad.lab.data.text import tinyshakespeare
from natgrad.lab.models.gpt import GPT
from natgrad.structures import Kronecker

HELD_OUT = 2000  # images that losses are measured on


def batches(samples: int, size: int, steps: int) -> list[Tensor]:
    """Rows of each batch, epoch after epoch, in another order each; the last of an epoch whole."""
    found: list[Tensor] = []
    while len(found) < steps:
        order = torch.randperm(samples)
        found += [rows for rows in order.split(size) if len(rows) == size]
    return found[:steps]


# -- pytorch/examples: mnist -------------------------------------------------------------------


class Digits(nn.Module):
    """Two convolutions, a wide and a narrow layer: ``[n, 1, 28, 28] -> [n, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.few, self.many = nn.Dropout(0.25), nn.Dropout(0.5)
        self.wide, self.last = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        x = self.few(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.last(self.many(F.relu(self.wide(x)))), dim=1)


def train_mnist(line: Line, steps: int) -> float:
    """One epoch of the first 9,600 images, batches of 64, in the order of the data."""
    data = mnist()
    model = Digits()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    optimizer = line(model, optimizer, 1e-3)  # Adadelta's rate is no length
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for step in range(steps):
        x, y = data.train.take(range(64 * step, 64 * step + 64), None)
        optimizer.zero_grad()
        F.nll_loss(model(x), y).backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    x, y = data.test.take(range(HELD_OUT), None)
    with torch.no_grad():
        return float(F.nll_loss(model(x), y))


# -- pytorch/examples: vae ---------------------------------------------------------------------


class VAE(nn.Module):
    """Probabilities of pixels, mean and logarithmic variance of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.variance = (
            nn.Linear(784, 400),
            nn.Linear(400, 20),
            nn.Linear(400, 20),
        )
        self.back, self.last = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.first(x))
        mean, logarithm = self.mean(h), self.variance(h)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * logarithm)
        return torch.sigmoid(self.last(F.relu(self.back(code)))), mean, logarithm


def negative_elbo(model: nn.Module, x: Tensor) -> Tensor:
    """Summed over the batch."""
    found, mean, logarithm = model(x)
    divergence = -0.5 * (1 + logarithm - mean.square() - logarithm.exp()).sum()
    return F.binary_cross_entropy(found, x, reduction="sum") + divergence


def train_vae(line: Line, steps: int) -> float:
    """One epoch, batches of 128."""
    data = mnist()
    images = data.train.images.flatten(1)
    model = VAE()
    optimizer = line(model, Adam(model.parameters(), lr=1e-3), 1e-3)
    for rows in batches(len(images), 128, steps):
        optimizer.zero_grad()
        negative_elbo(model, images[rows] / 255).backward()
        optimizer.step()
    held_out = data.test.images.flatten(1) / 255
    model.eval()
    with torch.no_grad():
        return float(negative_elbo(model, held_out)) / len(held_out)


# -- karpathy/nanoGPT: shakespeare_char on a CPU -----------------------------------------------

BLOCK, BATCH = 64, 12


def windows(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve at random, and the characters after each."""
    starts = torch.randint(len(tokens) - BLOCK, (BATCH, 1))
    rows = tokens[starts + torch.arange(BLOCK + 1).clamp(max=len(tokens) - 1)]
    return rows[:, :-1], rows[:, 1:]


def without_biases(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.bias = None
    return model


def train_nanogpt(line: Line, steps: int) -> float:
    """As its README has it for a processor, whose 2,000 steps are as many as there are here."""
    text = tinyshakespeare()
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[c] for c in text])
    cut = int(0.9 * len(tokens))
    model = without_biases(GPT(len(number), BLOCK, layers=4, heads=4, width=128))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer: Optimizer = AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    optimizer = line(model, optimizer, 1e-3, 0.1)
    for step in range(steps):
        share = min(1.0, max(0.0, (step - 100) / max(1, steps - 100)))
        rate = 1e-3 * (step + 1) / 101
        if step >= 100:
            rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * (1e-3 - 1e-4)
        for group in optimizer.param_groups:
            group["lr"] = rate
        x, y = windows(tokens[:cut])
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    torch.manual_seed(0)  # all are judged by the same windows
    with torch.no_grad():
        return sum(_language_loss(model, *windows(tokens[cut:])) for _ in range(40)) / 40


def _language_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))


# -- pytorch/examples: dcgan -------------------------------------------------------------------

NOISE, FEATURES = 100, 8  # --ngf 8 --ndf 8, of 64


def generator() -> nn.Sequential:
    """``[n, 100, 1, 1] -> [n, 1, 64, 64]``, from -1 to 1."""
    widths = [NOISE, *(FEATURES * k for k in (8, 4, 2, 1)), 1]
    parts: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        parts.append(nn.ConvTranspose2d(a, b, 4, 2 if i else 1, 1 if i else 0, bias=False))
        parts += [nn.BatchNorm2d(b), nn.ReLU(True)] if i < 4 else [nn.Tanh()]
    return nn.Sequential(*parts)


def discriminator() -> nn.Sequential:
    """``[n, 1, 64, 64] -> [n]``, the probability that an image is real."""
    widths = [1, *(FEATURES * k for k in (1, 2, 4, 8))]
    parts: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        parts.append(nn.Conv2d(a, b, 4, 2, 1, bias=False))
        parts += [nn.BatchNorm2d(b)] if i else []
        parts.append(nn.LeakyReLU(0.2, inplace=True))
    last = nn.Conv2d(widths[-1], 1, 4, 1, 0, bias=False)
    return nn.Sequential(*parts, last, nn.Sigmoid(), nn.Flatten(0))


def initialised(model: nn.Sequential) -> nn.Sequential:
    for module in model:
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
            nn.init.zeros_(module.bias)
    return model


def train_dcgan(line: Line, steps: int) -> float:
    """Two networks, two optimizers, two lines; one batch of real and one of false images."""
    images = mnist().train.images
    makes, judges = initialised(generator()), initialised(discriminator())
    rate, betas = 2e-4, (0.5, 0.999)
    for_judge = line(judges, Adam(judges.parameters(), lr=rate, betas=betas), rate)
    for_maker = line(makes, Adam(makes.parameters(), lr=rate, betas=betas), rate)
    for rows in batches(len(images), 64, steps):
        judges.zero_grad()
        real = F.interpolate(images[rows] / 127.5 - 1, size=64, mode="bilinear")
        true, false = torch.ones(len(real)), torch.zeros(len(real))
        F.binary_cross_entropy(judges(real), true).backward()
        made = makes(torch.randn(len(real), NOISE, 1, 1))
        F.binary_cross_entropy(judges(made.detach()), false).backward()
        for_judge.step()
        makes.zero_grad()
        F.binary_cross_entropy(judges(made), true).backward()
        for_maker.step()
    with torch.no_grad():
        made = torch.cat([makes(torch.randn(100, NOISE, 1, 1)) for _ in range(HELD_OUT // 100)])
        return frechet_distance(features(made), features_of_real())


@cache
def reader() -> nn.Module:
    """A classifier of digits whose hidden units say what is on an image; always the same."""
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU())
        whole = nn.Sequential(model, nn.Linear(32, 10))
        optimizer = Adam(whole.parameters(), lr=1e-3)
        data: Images = mnist().train
        for rows in batches(len(data), 128, 1000):
            optimizer.zero_grad()
            x = _small(data.images[rows] / 127.5 - 1)
            F.cross_entropy(whole(x), data.labels[rows]).backward()
            optimizer.step()
    return model.requires_grad_(False)


def _small(images: Tensor) -> Tensor:
    return F.interpolate(images, size=16, mode="bilinear", antialias=True).flatten(1)


def features(images: Tensor) -> Tensor:
    """``[n, 1, h, w] -> [n, 32]``"""
    return reader()(_small(images)).double()


@cache
def features_of_real() -> Tensor:
    images = mnist().test.images[:HELD_OUT] / 127.5 - 1
    return features(F.interpolate(images, size=64, mode="bilinear"))


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Between two samples ``[n, d]`` as if they were Gaussian: ``|m_a - m_b|^2 + tr(A + B - 2
    (A B)^1/2)``, whose last trace is the sum of the roots of the eigenvalues of ``A B``."""
    means = (a.mean(0) - b.mean(0)).square().sum()
    first, second = torch.cov(a.T), torch.cov(b.T)
    roots = torch.linalg.eigvals(first @ second).real.clamp(min=0).sqrt().sum()
    return float(means + first.trace() + second.trace() - 2 * roots)


# -- timm: train.py ----------------------------------------------------------------------------


def train_convnext(line: Line, steps: int) -> float:
    """`--model convnext_atto --opt adamw --lr-base 4e-3 --lr-base-size 4096 --lr-base-scale sqrt
    -b 64 --weight-decay 0.05 --smoothing 0.1 --mixup 0.8 --cutmix 1.0 --drop-path 0.1` on CIFAR-10
    at 32 x 32; a twentieth of the steps of warm-up, then a cosine."""
    from natgrad.lab.models.vision import torchvision

    torchvision()
    import timm  # type: ignore[import-not-found, unused-ignore]
    from timm.data import Mixup  # type: ignore[import-not-found, unused-ignore]
    from timm.loss import SoftTargetCrossEntropy  # type: ignore[import-not-found, unused-ignore]
    from timm.optim import create_optimizer_v2  # type: ignore[import-not-found, unused-ignore]

    data = cifar10()
    model = timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.1)
    rate = 4e-3 * math.sqrt(64 / 4096)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=0.05)
    optimizer = line(model, optimizer, rate, 0.05)
    mixed, loss = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=10), SoftTargetCrossEntropy()
    warm = max(1, steps // 20)
    for step, rows in enumerate(batches(len(data.train), 64, steps)):
        share = max(0, step - warm) / max(1, steps - warm)
        now = rate * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = now
        x, y = data.train.take(rows.tolist(), None)
        x, y = mixed(x, y)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    x, y = data.test.take(range(HELD_OUT // 2), None)
    with torch.no_grad():
        parts = zip(x.split(250), y.split(250), strict=True)
        return sum(float(F.cross_entropy(model(a), b)) * len(b) for a, b in parts) / len(y)


# -- a physics-informed network ----------------------------------------------------------------


def train_pinn(line: Line, steps: int) -> float:
    """Poisson's equation on the unit square, as most tutorials have it: Adam at 1e-3, tanh, points
    drawn once, the mean squares of the residuals added up. Returns the relative L2 error."""
    rate = 1e-3
    inside = torch.rand(500, 2, requires_grad=True)
    sides = torch.rand(100, 2)
    sides[torch.arange(100), torch.arange(100) % 2] = torch.randint(2, (100,)).float()
    model = nn.Sequential()
    for a, b in ((2, 32), (32, 32), (32, 32)):
        model.extend([nn.Linear(a, b), nn.Tanh()])
    model.append(nn.Linear(32, 1))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.zeros_(module.bias)
    optimizer = line(model, Adam(model.parameters(), lr=rate), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        u = model(inside)
        (du,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
        second = [
            torch.autograd.grad(du[:, i].sum(), inside, create_graph=True)[0][:, i] for i in (0, 1)
        ]
        right = 2 * math.pi**2 * (math.pi * inside).sin().prod(1)
        loss = (second[0] + second[1] + right).square().mean() + model(sides).square().mean()
        loss.backward()
        optimizer.step()
    grid = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 50)])
    exact = (math.pi * grid).sin().prod(1)
    with torch.no_grad():
        return float((model(grid)[:, 0] - exact).norm() / exact.norm())


VISION = ("timm", "torchvision")
# A loss of derivatives is refused without it, in a sentence that names it.
TRACES = {"structure": Kronecker(sharing="traces")}
LOOPS = {
    "mnist": Loop(
        "pytorch/examples MNIST: negative log-likelihood", "Adadelta, 1.0", 150, train_mnist
    ),
    "vae": Loop("pytorch/examples VAE: negative ELBO of an image", "Adam, 0.001", 469, train_vae),
    "dcgan": Loop(
        "pytorch/examples DCGAN on MNIST: Fréchet distance of a classifier's features",
        "two Adams, 0.0002, beta1 0.5",
        150,
        train_dcgan,
        before=reader,
    ),
    "nanogpt": Loop(
        "nanoGPT on Shakespeare's characters: cross-entropy",
        "AdamW, 0.001, warm-up, cosine, clip",
        300,
        train_nanogpt,
    ),
    "convnext": Loop(
        "timm ConvNeXt on CIFAR-10, mixup: cross-entropy",
        "AdamW, 0.0005, decay 0.05, warm-up, cosine",
        30,
        train_convnext,
        VISION,
    ),
    "pinn": Loop("PINN, Poisson: relative L2 error", "Adam, 0.001", 300, train_pinn, extra=TRACES),
}
