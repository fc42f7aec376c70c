"""Shapes that the papers measured on hundreds of GPUs, beside those that the planner predicts.

    python -m benchmarks.papers_shapes --markdown      the tables of docs/planning.md

Nothing is fitted to the papers: clusters are `natgrad.placement.CLUSTERS`, networks are counted on
the meta device.
"""

import argparse
from collections.abc import Iterator, Sequence

from natgrad import Cholesky, Eigen
from natgrad.lab.models.spreading import Layout
from natgrad.lab.report.cluster_shapes import (
    INTERVALS,
    KAISA,
    STALE,
    Counted,
    broadcasts,
    iterations,
    one_by_one,
    scaling,
    staleness,
)
from natgrad.placement import CommOpt
from natgrad.specs import BlockSpec


def sizes(blocks: Sequence[BlockSpec]) -> list[tuple[str, float, str]]:
    """MiB of ResNet-50's Fisher blocks: as squares with full blocks for norm layers, with diagonal
    ones, and with a triangle of each square."""
    squares = norms = diagonals = triangles = 0
    for block in blocks:
        for name, spec in block.factors:
            if name in ("A", "G"):
                squares += spec.dim**2
                triangles += spec.dim * (spec.dim + 1) // 2
            else:  # of C channels, each with a scale and a shift
                norms += (2 * spec.batch) ** 2
                diagonals += 2 * spec.batch
    mib = 4 / 2**20
    return [
        ("full blocks of norm layers", (squares + norms) * mib, "1,017"),
        ("diagonal blocks of norm layers", (squares + diagonals) * mib, "587"),
        ("and one triangle of each matrix", (triangles + diagonals) * mib, "294"),
    ]


def bert() -> list[tuple[int, float, float, float]]:
    """Seconds of an average step of BERT-Large, K-FAC-opt on 64 GPUs, for some samples a GPU: with
    factors every 5 steps and decompositions every 50 (Pauloski 2022, sec. 6.5), with these every
    100, and with both half as often."""
    found = []
    for batch in (8, 32, 128):
        network = Counted("bert-large", Eigen(), batch)
        model = network.placed(CommOpt(cluster=KAISA), 64, Layout.DDP, (5, 50), KAISA)
        found.append(
            (batch, *(model.average(*intervals) for intervals in ((5, 50), (5, 100), (10, 100))))
        )
    return found


def markdown() -> Iterator[str]:
    eigen, cholesky = (Counted("resnet50", inverse) for inverse in (Eigen(), Cholesky()))
    blocks = eigen.kfac.plan.blocks
    yield f"ResNet-50 has {len(blocks)} layers with curvature (107 in the paper)."
    yield ""
    yield "| ResNet-50's Fisher blocks | predicted | Osawa 2019 |"
    yield "|---|---:|---:|"
    for what, mib, paper in sizes(blocks):
        yield f"| {what} | {mib:,.0f} MiB | {paper} MiB |"
    yield ""
    points = iterations(cholesky)
    yield "| GPUs | " + " | ".join(f"{ranks:,}" for ranks, _ in points) + " |"
    yield "|---|" + "---:|" * len(points)
    yield "| ms of an iteration | " + " | ".join(f"{1e3 * s:.0f}" for _, s in points) + " |"
    first = points[0][1]
    yield (
        "| speed of a GPU against one alone | "
        + " | ".join(f"{first / s:.0%}" for _, s in points)
        + " |"
    )
    yield ""
    found = scaling(eigen)
    yield "| ms of an average step, GPUs | " + " | ".join(map(str, INTERVALS)) + " |"
    yield "|---|" + "---:|" * len(INTERVALS)
    for name, seconds in found.items():
        yield f"| {name} | " + " | ".join(f"{1e3 * s:.1f}" for s in seconds) + " |"
    for name, seconds in found.items():
        shares = (seconds[0] / s for s in seconds)
        yield f"| efficiency of {name} | " + " | ".join(f"{s:.1%}" for s in shares) + " |"
    yield ""
    share, gradients = broadcasts(eigen)
    yield "| on 64 GPUs | predicted | Pauloski 2022 |"
    yield "|---|---:|---:|"
    yield f"| eigendecompositions on their way, K-FAC-opt | {1e3 * share:.1f} ms | |"
    yield f"| gradients on their way, K-FAC-lw | {1e3 * gradients:.1f} ms | |"
    yield f"| ratio | {share / gradients:.1f} | |"
    share, gradients = one_by_one(blocks)
    yield f"| eigendecompositions, a broadcast for each tensor | {1e3 * share:.1f} ms | |"
    yield f"| gradients, a broadcast for each layer | {1e3 * gradients:.1f} ms | |"
    yield f"| ratio | {share / gradients:.1f} | 3.4 |"
    yield ""
    yield "| GPUs | fresh | every 20th step | neither | fresh to 20th | Osawa 2020 |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for ranks, fresh, stale, neither in staleness(cholesky):
        before, after = STALE[ranks]
        cells = (f"{1e3 * s:.0f} ms" for s in (fresh, stale, neither))
        yield f"| {ranks} | {' | '.join(cells)} | {fresh / stale:.2f} | {before / after:.2f} |"
    yield ""
    yield "| BERT-Large, samples of a GPU | 5 / 50 | 5 / 100 | 10 / 100 | 50 to 100 | and 5 to 10 |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for batch, often, seldom, both in bert():
        cells = [f"{1e3 * s:.1f} ms" for s in (often, seldom, both)]
        cells += [f"{1 - s / often:.2%}" for s in (seldom, both)]
        yield f"| {batch} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the tables")
    if parser.parse_args().markdown:
        print("\n".join(markdown()))
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
