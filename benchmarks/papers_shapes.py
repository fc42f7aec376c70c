"""Shapes that the papers measured on hundreds of GPUs, beside those that the planner predicts.

    python -m benchmarks.papers_shapes --markdown      the tables of docs/planning.md

Nothing is fitted to the papers: clusters are `natgrad.placement.CLUSTERS`, networks are counted on
the meta device.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from natgrad import KFAC, Cholesky, Eigen
from natgrad.cli.options import Layout
from natgrad.cli.placements import spread
from natgrad.inverses import Inverse
from natgrad.lab.models.planned import PLANNED
from natgrad.lab.models.workload import passes
from natgrad.lab.names import NETWORKS
from natgrad.placement import (
    CLUSTERS,
    Cluster,
    CommOpt,
    Kind,
    MemOpt,
    Placement,
    ReduceScatter,
    StepModel,
    simulate,
)
from natgrad.specs import BlockSpec

BATCH = 32
OSAWA = CLUSTERS["v100-1088x4"]
PAULOSKI = CLUSTERS["v100-112x4"]
KAISA = CLUSTERS["a100-24x8"]
# Decompositions are as often in an epoch on any number of GPUs (Pauloski 2022, sec. 6.4.1), and
# factors are updated ten times as often.
# Minutes of training with fresh and with stale statistics (Osawa 2020).
STALE = {128: (38.6, 21.5), 256: (19.8, 9.4), 512: (10.5, 5.5)}
INTERVALS = {16: 2000, 32: 1000, 64: 500, 128: 250, 256: 125}


class Counted:
    """A network that is counted once, and placed on any number of ranks."""

    def __init__(self, name: str, inverse: Inverse, batch: int = BATCH) -> None:
        network = PLANNED[name] if name in PLANNED else NETWORKS[name]
        model = network.without_weights()
        counted = passes(model, network.sample or ())
        self.kfac = KFAC(model, kl_clip=None, inverse=inverse)
        self.workload = counted.workload(self.kfac.blocks, self.kfac.plan.blocks, batch=batch)

    def placed(
        self, strategy: Placement, ranks: int, layout: Layout, every: tuple[int, int], on: Cluster
    ) -> StepModel:
        blocks, world = spread(self.kfac, ranks, layout)
        world = replace(world, update_every=every[0], refresh_every=every[1])
        plan = strategy(blocks, world)
        return StepModel(plan, simulate(plan, on), self.workload, on)


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


def iterations(network: Counted) -> list[tuple[int, float]]:
    """Seconds of an iteration that updates and refreshes everything (Osawa 2019, fig. 2)."""
    strategy = ReduceScatter(cluster=OSAWA)
    found = []
    for ranks in (1, 4, 16, 64, 256, 1024):
        model = network.placed(strategy, ranks, Layout.PLAIN, (1, 1), OSAWA)
        found.append((ranks, model.step(Kind.REFRESH).seconds))
    return found


def staleness(network: Counted) -> list[tuple[int, float, float, float]]:
    """Seconds of a step that updates and refreshes everything, of an average one that does so at
    every 20th step, and of one that does neither (Osawa 2020, table 2)."""
    found = []
    for ranks in STALE:
        model = network.placed(ReduceScatter(cluster=OSAWA), ranks, Layout.PLAIN, (1, 1), OSAWA)
        seconds = model.step(Kind.REFRESH).seconds, model.average(20, 20)
        found.append((ranks, *seconds, model.step(Kind.STALE).seconds))
    return found


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


def scaling(network: Counted) -> dict[str, list[float]]:
    """Seconds of an average step of K-FAC-opt, K-FAC-lw and SGD (Pauloski 2022, fig. 8)."""
    found: dict[str, list[float]] = {"K-FAC-opt": [], "K-FAC-lw": [], "SGD": []}
    for ranks, every in INTERVALS.items():
        intervals = max(1, every // 10), every
        for name, strategy in _methods().items():
            model = network.placed(strategy(), ranks, Layout.DDP, intervals, PAULOSKI)
            found[name].append(model.average(*intervals))
        found["SGD"].append(model.step(Kind.WITHOUT).seconds)
    return found


def _methods() -> dict[str, Callable[[], Placement]]:
    return {
        "K-FAC-opt": lambda: CommOpt(cluster=PAULOSKI),
        "K-FAC-lw": lambda: MemOpt(cluster=PAULOSKI),
    }


def one_by_one(blocks: Sequence[BlockSpec]) -> tuple[float, float]:
    """The same where every tensor is a broadcast of its own, as in the paper's program:
    eigenvectors and eigenvalues of each factor, and gradients, of layers with two factors."""
    eigen = gradients = 0.0
    for block in blocks:
        if [name for name, _ in block.factors] != ["A", "G"]:
            continue
        for _, spec in block.factors:
            eigen += sum(PAULOSKI.broadcast(4 * n, 64) for n in (spec.dim**2, spec.dim))
        gradients += PAULOSKI.broadcast(4 * block.numel, 64)
    return eigen, gradients


def broadcasts(network: Counted) -> tuple[float, float]:
    """Seconds of all eigendecompositions of K-FAC-opt on their way, and of all gradients of
    K-FAC-lw, on 64 GPUs (Pauloski 2022, fig. 7)."""
    opt, lw = (
        network.placed(one(), 64, Layout.DDP, (50, 500), PAULOSKI).times.stages
        for one in _methods().values()
    )
    assert opt is not None
    assert lw is not None
    return opt.share, lw.give_back


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
