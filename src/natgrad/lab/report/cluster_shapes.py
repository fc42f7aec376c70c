"""What the planner says of the papers' machines, in the shapes that the papers measured there.

Nothing is fitted to the papers: clusters are `natgrad.placement.CLUSTERS`, networks are counted on
the meta device. `natgrad reproduce` and `benchmarks.papers_shapes` lay the numbers beside what was
printed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from natgrad import KFAC
from natgrad.inverses import Inverse
from natgrad.lab.models.planned import PLANNED
from natgrad.lab.models.spreading import Layout, spread
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

BATCH = 32  # of a GPU, where nothing else is said
OSAWA = CLUSTERS["v100-1088x4"]
PAULOSKI = CLUSTERS["v100-112x4"]
KAISA = CLUSTERS["a100-24x8"]
ITERATIONS = (1, 4, 16, 64, 256, 1024)
# Minutes of training with fresh and with stale statistics (Osawa 2020).
STALE = {128: (38.6, 21.5), 256: (19.8, 9.4), 512: (10.5, 5.5)}
# Decompositions are as often in an epoch on any number of GPUs (Pauloski 2022, sec. 6.4.1), and
# factors are updated ten times as often.
INTERVALS = {16: 2000, 32: 1000, 64: 500, 128: 250, 256: 125}


class Counted:
    """A network that is counted once, and placed on any number of ranks.

    Arguments:
        name: of the network.
        inverse: how its factors are inverted.
        batch: samples of a rank.
    """

    def __init__(self, name: str, inverse: Inverse, batch: int = BATCH) -> None:
        network = PLANNED[name] if name in PLANNED else NETWORKS[name]
        model = network.without_weights()
        counted = passes(model, network.sample or ())
        self.kfac = KFAC(model, kl_clip=None, inverse=inverse)
        self.workload = counted.workload(self.kfac.blocks, self.kfac.plan.blocks, batch=batch)

    def placed(
        self, strategy: Placement, ranks: int, layout: Layout, every: tuple[int, int], on: Cluster
    ) -> StepModel:
        """Its training steps on a cluster.

        Arguments:
            strategy: who does what.
            ranks: how many GPUs.
            layout: how gradients lie on them.
            every: steps from one update to the next, and from one refresh to the next.
            on: speed of the GPUs and of the links between them.
        """
        blocks, world = spread(self.kfac, ranks, layout)
        world = replace(world, update_every=every[0], refresh_every=every[1])
        plan = strategy(blocks, world)
        return StepModel(plan, simulate(plan, on), self.workload, on)


def iterations(network: Counted, counts: Iterable[int] = ITERATIONS) -> list[tuple[int, float]]:
    """Seconds of an iteration that updates and refreshes everything (Osawa 2019, fig. 2).

    Arguments:
        network: with the inverse of the paper, Cholesky.
        counts: numbers of GPUs.
    """
    strategy = ReduceScatter(cluster=OSAWA)
    found = []
    for ranks in counts:
        model = network.placed(strategy, ranks, Layout.PLAIN, (1, 1), OSAWA)
        found.append((ranks, model.step(Kind.REFRESH).seconds))
    return found


def staleness(network: Counted) -> list[tuple[int, float, float, float]]:
    """Seconds of a step that updates and refreshes everything, of an average one that does so at
    every 20th step, and of one that does neither (Osawa 2020, table 2).

    Arguments:
        network: with the inverse of the paper, Cholesky.
    """
    found = []
    for ranks in STALE:
        model = network.placed(ReduceScatter(cluster=OSAWA), ranks, Layout.PLAIN, (1, 1), OSAWA)
        seconds = model.step(Kind.REFRESH).seconds, model.average(20, 20)
        found.append((ranks, *seconds, model.step(Kind.STALE).seconds))
    return found


def scaling(network: Counted, counts: Iterable[int] = tuple(INTERVALS)) -> dict[str, list[float]]:
    """Seconds of an average step of K-FAC-opt, K-FAC-lw and SGD (Pauloski 2022, fig. 8).

    Arguments:
        network: with the inverse of the paper, eigendecompositions.
        counts: numbers of GPUs, of those in `INTERVALS`.
    """
    found: dict[str, list[float]] = {"K-FAC-opt": [], "K-FAC-lw": [], "SGD": []}
    for ranks in counts:
        every = INTERVALS[ranks]
        intervals = max(1, every // 10), every
        for name, strategy in methods().items():
            model = network.placed(strategy(), ranks, Layout.DDP, intervals, PAULOSKI)
            found[name].append(model.average(*intervals))
        found["SGD"].append(model.step(Kind.WITHOUT).seconds)
    return found


def methods() -> dict[str, Callable[[], Placement]]:
    """The two placements that Pauloski 2022 compares, planned for its machine."""
    return {
        "K-FAC-opt": lambda: CommOpt(cluster=PAULOSKI),
        "K-FAC-lw": lambda: MemOpt(cluster=PAULOSKI),
    }


def one_by_one(blocks: Sequence[BlockSpec]) -> tuple[float, float]:
    """As `broadcasts`, where every tensor is a broadcast of its own, as in the paper's program:
    eigenvectors and eigenvalues of each factor, and gradients, of layers with two factors.

    Arguments:
        blocks: sizes of all blocks of the network.
    """
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
    K-FAC-lw, on 64 GPUs (Pauloski 2022, fig. 7).

    Arguments:
        network: with the inverse of the paper, eigendecompositions.
    """
    opt, lw = (
        network.placed(one(), 64, Layout.DDP, (50, 500), PAULOSKI).times.stages
        for one in methods().values()
    )
    assert opt is not None
    assert lw is not None
    return opt.share, lw.give_back
