"""Curvature matrices, time and error by library: `python -m benchmarks.curvature`.

Each task starts at the model and ends at its result. All libraries take turns in one process, the
least of several times counts, and beside it stands the relative error against float64 (in the
Frobenius norm; of eigenvalues and traces, of the numbers). A dash: the library does not offer it.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import plain
from benchmarks.contenders import CONTENDERS, TOP, Backpack, Contender, Natgrad, Operands
from benchmarks.page import add_output, report
from benchmarks.timing import Row, Table, interleave, render

NOT_INSTALLED, NOT_OFFERED = "not installed", "-"
RIGHT = 1e-2  # a result that is further off than this does not count as one


def mlp(*widths: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        modules: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            modules += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*modules[:-1])

    return build


def conv_net(side: int = 14, channels: tuple[int, int] = (8, 16), classes: int = 10):
    def build() -> nn.Module:
        first, second = channels
        return nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(second * ((side + 1) // 2) ** 2, classes),
        )

    return build


@dataclass(frozen=True)
class Network:
    """Random inputs `[batch, *shape]` and classes; `tasks` by name."""

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    tasks: tuple[str, ...]
    classes: int = 10
    columns: int = 100

    def operands(self) -> Operands:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.batch, *self.shape, generator=generator)
        y = torch.randint(self.classes, (self.batch,), generator=generator)
        return Operands(self.build, x, y, self.columns)


class Truth:
    """The exact results, in float64, each computed when it is first asked for."""

    def __init__(self, operands: Operands) -> None:
        self.model = operands.model().double()
        self.x, self.y = operands.inputs.double(), operands.targets
        self.v = operands.vectors.double()

    @cached_property
    def fisher(self) -> Tensor:
        return plain.fisher(self.model, self.x)

    @cached_property
    def diagonal(self) -> Tensor:
        return plain.diagonal(self.model, self.x)

    @cached_property
    def trace(self) -> float:
        return float(self.diagonal.sum())

    @cached_property
    def kfac(self) -> plain.Factors:
        return plain.kfac(self.model, self.x)

    @cached_property
    def products(self) -> Tensor:
        return plain.products(self.model, self.x, self.v)

    @cached_property
    def top_eigenvalues(self) -> Tensor:
        return plain.top_eigenvalues(self.model, self.x, self.y, TOP, steps=200)

    @cached_property
    def gram_eigenvalues(self) -> Tensor:
        return plain.gram_eigenvalues(self.model, self.x)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact).norm() / exact.norm())


def spectral_error(found: Tensor, exact: Tensor) -> float:
    """Whichever way they are sorted, and however many zeros are among them."""
    size = min(len(found), len(exact))
    largest = [values.double().sort(descending=True).values[:size] for values in (found, exact)]
    return error(*largest)


def kfac_error(contender: Contender, found: Any, truth: Truth) -> float:
    """By products: libraries differ in where they put a factor and a bias."""
    v = truth.v[:, :4]
    apart = isinstance(contender, Backpack)
    exact = plain.kfac_product(truth.model, truth.kfac, v, apart=apart)
    return error(contender.kfac_product(found, v.float()), exact)


@dataclass(frozen=True)
class Task:
    """What a method of the contenders computes, and how far its result is off."""

    title: str
    method: str
    error: Callable[[Contender, Any, Truth], float]


TASKS = {
    "fisher": Task("full F", "fisher", lambda _, found, t: error(found, t.fisher)),
    "diagonal": Task("diagonal of G", "diagonal", lambda _, found, t: error(found, t.diagonal)),
    "kfac": Task("K-FAC factors", "kfac", kfac_error),
    "products": Task(
        "{columns} products with G", "products", lambda _, found, t: error(found, t.products)
    ),
    "product": Task(
        "{columns} as one matrix", "product", lambda _, found, t: error(found, t.products)
    ),
    "eigenvalues": Task(
        f"{TOP} largest eigenvalues of H",
        "top_eigenvalues",
        lambda _, found, t: error(found, t.top_eigenvalues),
    ),
    "trace": Task("trace of G", "trace", lambda _, found, t: abs(found / t.trace - 1)),
    "spectrum": Task(
        "spectrum of G",
        "gram_eigenvalues",
        lambda _, found, t: spectral_error(found, t.gram_eigenvalues),
    ),
}
SMALL, LARGE = ("fisher",), tuple(name for name in TASKS if name != "fisher")

NETWORKS = {
    "small": Network("MLP 196-32-16-10", mlp(196, 32, 16, 10), (196,), 128, SMALL),
    "mlp": Network("MLP 784-128-64-10", mlp(784, 128, 64, 10), (784,), 128, LARGE),
    "cnn": Network("CNN, 8 and 16 channels", conv_net(), (1, 14, 14), 64, LARGE),
}


@dataclass(frozen=True)
class Result(Row):
    """One task; `figure` is the time of the fastest other library with a right result over ours."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)  # and why

    def cells(self) -> tuple[str, ...]:  # type: ignore[override]
        ratio = "" if math.isnan(self.figure) else f"{self.figure:.3g}x"
        return self.name, ratio, *(self.cell(contender.name) for contender in CONTENDERS)

    def cell(self, contender: str) -> str:
        if contender in self.absent:
            return self.absent[contender]
        return f"{1e3 * self.seconds[contender]:.3g} ({self.errors[contender]:.0e})"


@dataclass
class Results(Table):
    """A column for each library."""

    def render(self, markdown: bool = False) -> str:
        header = ("task: ms (error)", "others/natgrad", *(c.name for c in CONTENDERS))
        return render(self.title, header, [row.cells() for row in self.rows], markdown)


def figure(seconds: Mapping[str, float], errors: Mapping[str, float]) -> float:
    others = [s for name, s in seconds.items() if name != Natgrad.name and errors[name] < RIGHT]
    return min(others, default=math.nan) / seconds[Natgrad.name]


def compare(task: Task, operands: Operands, truth: Truth, repeats: int) -> Result:
    """All installed libraries in turn; the error is that of the last result."""
    contenders: dict[str, Contender] = {}
    found: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for kind in CONTENDERS:
        if not hasattr(kind, task.method):
            absent[kind.name] = NOT_OFFERED
        elif kind.installed() is None:
            absent[kind.name] = NOT_INSTALLED
        else:
            contenders[kind.name] = kind(operands)

    def call(name: str) -> None:
        found[name] = getattr(contenders[name], task.method)()

    calls = {name: partial(call, name) for name in contenders}
    torch.manual_seed(0)  # of what is estimated
    times = interleave(calls, repeats, warmup=1)
    seconds = {name: times[name].minimum for name in calls}
    errors = {name: task.error(contenders[name], found[name], truth) for name in calls}
    title = task.title.format(columns=operands.columns)
    return Result(
        title,
        figure(seconds, errors),
        "x",
        seconds=seconds,
        errors=errors,
        absent=absent,
    )


def table(network: Network, repeats: int, tasks: Sequence[str] = tuple(TASKS)) -> Results:
    operands = network.operands()
    truth = Truth(operands)
    size = sum(p.numel() for p in truth.model.parameters())
    title = f"{network.title}: {size:,} parameters, batch {network.batch}"
    results = Results(title)
    for name in network.tasks:
        if name in tasks:
            print(f"{network.title}: {name}", file=sys.stderr, flush=True)
            results.rows.append(compare(TASKS[name], operands, truth, repeats))
    return results


def libraries() -> str:
    """Which ones take part, with versions."""
    texts = []
    for kind in CONTENDERS:
        version = kind.installed()
        texts.append(f"{kind.name} {NOT_INSTALLED if version is None else version}".rstrip())
    return "libraries: " + ", ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="rounds, of which the least counts")
    add_output(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tables = [
        table(NETWORKS[name], arguments.repeats, arguments.tasks) for name in arguments.networks
    ]
    print(libraries())
    report([t for t in tables if t.rows], arguments)


if __name__ == "__main__":
    main()
