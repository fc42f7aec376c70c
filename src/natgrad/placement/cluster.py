"""How fast machines are: what prices a plan.

A cluster is nodes with some ranks each, links inside a node and one out of it that its ranks share.
With a latency α until the first byte, an overhead o for every further message, and β bytes a second
(Culler 1993; Thakur 2005)::

    all-to-all         α + o (messages - 1) + the more of bytes that leave a node / β between,
                           and of a rank's bytes that stay / β inside
    even slices of n   α log2 W + n (W - 1) / W / the lesser β on the way

The first is as slow as its busiest rank, the others cost every rank the same.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, log2

import numpy as np

from natgrad.checks import check_positive_fields, check_whole_fields
from natgrad.errors import SettingError
from natgrad.placement.flows import Costs, Flows


@dataclass(frozen=True, slots=True)
class Link:
    """What connects ranks.

    Arguments:
        latency: ``> 0``, seconds until the first byte of a message arrives.
        bandwidth: ``> 0``, bytes a second, in each direction.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_positive_fields(self, "latency", "bandwidth")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The speed of ranks and of their links. The defaults are those of a data-centre GPU behind a
    100 Gbit/s link of its own; only their ratios decide which placement is the cheapest.

    Arguments:
        flops: ``> 0``, operations a second of one rank, in products of matrices.
        bandwidth: ``> 0``, bytes a second of the link from a node to the others, in each direction,
            which all its ranks share.
        latency: ``> 0``, seconds until the first byte of a message to another node arrives.
        memory: bytes of a rank for all of K-FAC, which only `Auto` looks at; ``None`` sets
            no limit.
        node: how many ranks are in a node.
        inside: the links inside a node, of each rank its own; ``None`` for one rank in a node.
        overhead: ``> 0``, seconds of a rank for each further message of an all-to-all; ``None`` is
            a tenth of the latency.
        decomposing: ``> 0``, share of ``flops`` that a rank reaches in decompositions, at most 1.
        capacity: bytes of all memory of a rank; ``None`` sets no limit.
        nodes: how many there are; ``None`` is as many as it takes.
        name: by which it is known; empty of one that is given by numbers.
    """

    flops: float = 1e13
    bandwidth: float = 1e10
    latency: float = 2e-5
    memory: float | None = None
    node: int = 1
    inside: Link | None = None
    overhead: float | None = None
    decomposing: float = 1.0
    capacity: float | None = None
    nodes: int | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_positive_fields(self, "flops", "bandwidth", "latency")
        check_positive_fields(self, "decomposing", high=1)
        check_whole_fields(self, "node")
        for name in ("memory", "overhead", "capacity"):
            if getattr(self, name) is not None:
                check_positive_fields(self, name)
        if self.nodes is not None:
            check_whole_fields(self, "nodes")

    @property
    def decompositions(self) -> float:
        """Operations a second in decompositions."""
        return self.flops * self.decomposing

    def check_ranks(self, ranks: int) -> None:
        """Raise if there are fewer.

        Arguments:
            ranks: how many are wanted.
        """
        if self.nodes is not None and ranks > self.nodes * self.node:
            raise SettingError(
                f"{ranks} ranks are asked for but cluster {self.name!r} has {self.nodes} nodes of "
                f"{self.node}: ask for at most {self.nodes * self.node}, or describe a larger one "
                "by its numbers."
            )

    @property
    def between(self) -> Link:
        return Link(self.latency, self.bandwidth)

    def slowest(self, ranks: int) -> Link:
        """The link that a ring of ranks, those of a node one behind the other, waits for.

        Arguments:
            ranks: how many there are.
        """
        return _slowest(self, ranks)

    def ring(self, sent: int, ranks: int) -> float:
        """Seconds of a reduce-scatter or an all-gather of even slices.

        Arguments:
            sent: bytes that every rank sends in it.
            ranks: how many there are.
        """
        if ranks == 1:
            return 0.0
        link = self.slowest(ranks)
        return ceil(log2(ranks)) * link.latency + sent / link.bandwidth

    def all_reduce(self, nbytes: int, ranks: int) -> float:
        """Seconds of a sum over all ranks, as a reduce-scatter and an all-gather.

        Arguments:
            nbytes: of the buffer that is summed.
            ranks: how many there are.
        """
        return 2 * self.ring((ranks - 1) * nbytes // ranks, ranks)

    def wait(self, ranks: int, *, in_flight: bool = False) -> float:
        """Seconds of an all-to-all of several ranks that do not depend on its bytes.

        Arguments:
            ranks: how many there are.
            in_flight: whether another one is under way already, so that only the latency counts.
        """
        if in_flight:
            return self.latency
        overhead = self.latency / 10 if self.overhead is None else self.overhead
        return self.slowest(ranks).latency + overhead * (ranks - 2)

    def exchange(self, flows: Flows) -> Costs:
        """Seconds of an all-to-all, by rank; the messages of a rank are taken to go to all others
        alike, so that of those of a rank in a node of d, ``(W - d) / (W - 1)`` leave it.

        Arguments:
            flows: bytes by rank.
        """
        ranks = len(flows.sent)
        busy: Costs = np.maximum(flows.sent, flows.received).astype(np.float64)
        if ranks == 1 or not busy.any():
            return np.zeros(ranks)
        start = self.wait(ranks)
        if self.inside is None:
            alone: Costs = start + busy / self.bandwidth
            return alone
        node = min(self.node, ranks)
        leaving = (ranks - node) / (ranks - 1)
        # Ranks of a node share its link.
        of_node = np.add.reduceat(busy, np.arange(0, ranks, node)).repeat(node)[:ranks]
        stay = (1 - leaving) * busy / self.inside.bandwidth
        slower: Costs = start + np.maximum(leaving * of_node / self.bandwidth, stay)
        return slower


@lru_cache(maxsize=256)  # asked for with every collective
def _slowest(cluster: Cluster, ranks: int) -> Link:
    if cluster.inside is None:
        return cluster.between
    if ranks <= cluster.node:
        return cluster.inside
    narrow = min(cluster.inside.bandwidth, cluster.bandwidth)
    return Link(max(cluster.inside.latency, cluster.latency), narrow)
