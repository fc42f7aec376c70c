"""The curvature of a small network on real digits: before and after a short training.

Prints trace, spectrum and largest eigenvalues of the Hessian H, the Gauss-Newton matrix G and the
empirical Fisher C, how good their approximations are, the noise scale and TIC. With --out FOLDER
it draws them.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import natgrad
from natgrad import Operator, measures
from natgrad.lab.models import convnet
from natgrad.lab.report import curvature_plots as pictures
from natgrad.lab.report.dense_cache import written
from natgrad.lab.report.quality import Quality, quality
from natgrad.lab.report.quality import table as quality_table
from natgrad.lab.report.sizes import sizes
from natgrad.operators import Problem
from natgrad.tables import Column, Table

STRUCTURES = (
    natgrad.Full(),
    natgrad.EKFAC(),
    natgrad.Kronecker(),
    natgrad.UnitWise(),
    natgrad.Diagonal(),
)


def digits(samples: int) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 8, 8] in [0, 1], and labels [n]."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float64).unsqueeze(1) / 16
    return images[:samples], torch.tensor(data.target)[:samples]


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """K-FAC before SGD, on all data at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = natgrad.KFAC(model, optimizer, update_every=1, refresh_every=5)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    kfac.detach()


def matrices(problem: Problem) -> dict[str, Operator]:
    """They know the model and the data, and hold no matrix."""
    return {
        "H": natgrad.hessian(problem),
        "G": natgrad.ggn(problem),
        "C": natgrad.fisher(problem, curvature=natgrad.EmpiricalFisher()),
    }


def summary(found: dict[str, Operator], title: str) -> Table:
    rows = []
    for name, matrix in found.items():
        top = matrix.eigenvalues(3)
        above = matrix.spectrum(steps=32).trace(lambda values: (values > 0.1).to(values))
        rows.append(
            (
                name,
                str(matrix.trace(natgrad.operators.HutchPP(99))),
                ", ".join(f"{value:.4g}" for value in top.values.tolist()),
                f"{float(top.residuals.max()):.0e}",
                f"{float(above):.0f} ± {above.standard_error:.0f} of {matrix.size}",
            )
        )
    names = ("trace", "largest eigenvalues", "residual", "above 0.1")
    return Table(title, (Column("matrix"), *(Column(n, "right") for n in names)), tuple(rows))


def structures(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Against the full G: relative error, and the angle of the natural gradient."""
    full, gradient = natgrad.ggn(problem), problem.gradient()
    for structure in STRUCTURES:
        kept = natgrad.ggn(problem, structure=structure)
        error, angle = (
            natgrad.operators.compare(kept, full),
            natgrad.operators.cosine(kept, full, gradient, 1e-2),
        )
        yield repr(structure), f"{float(error):.3f}", f"{angle:.3f}"


def read(problem: Problem) -> None:
    """What the matrices say about training and generalisation."""
    print(measures.noise_scale(problem, matrix=natgrad.ggn))
    print(measures.tic(problem, matrix=natgrad.ggn, damping=1e-3))
    print(measures.sharpness(problem))


def draw(found: dict[str, Operator], states: list[Quality], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    spectra, layers, blocks = [], [], []
    for name, operator in found.items():
        matrix = written(operator)  # it is small, and read often
        top = matrix.eigenvalues(10).values
        spectra.append(pictures.NamedSpectrum(name, matrix.spectrum(), top))
        each = {layer: part.eigenvalues(20).values for layer, part in matrix.layers().items()}
        layers.append(pictures.LayerSpectra(name, each))
        blocks.append(pictures.BlockNorms(name, *natgrad.operators.block_norms(matrix)))
    pictures.spectra(spectra, folder / "spectra.png")
    pictures.layer_spectra(layers, folder / "layers.png")
    pictures.block_norms(blocks, folder / "blocks.png")
    pictures.approximation(states, folder / "quality.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of training")
    parser.add_argument("--samples", type=int, default=300, help="of the digits")
    parser.add_argument("--out", type=Path, help="folder for pictures")
    options = parser.parse_args()

    torch.manual_seed(0)
    x, y = digits(options.samples)
    model = convnet((1, 8, 8), channels=(4, 8)).double()
    problem = Problem(model, F.cross_entropy, (x, y))
    print(sizes(problem).table())
    states = []
    for steps in (0, options.steps):
        train(model, x, y, steps)
        share = float((model(x).argmax(1) == y).double().mean())
        found = matrices(problem)
        print(summary(found, f"After {steps} steps, accuracy {share:.2f}"))
        if options.out is not None:
            states.append(quality(problem, f"accuracy {share:.2f}", damping=1e-2))
            print(quality_table(states[-1]))
    columns = (Column("structure of G"), Column("error", "right"), Column("cosine", "right"))
    print(Table("Approximations, trained", columns, tuple(structures(problem))))
    read(problem)
    if options.out is not None:
        draw(found, states, options.out)
        print(f"The pictures are in {options.out}.")


if __name__ == "__main__":
    main()
