"""How fast machines are: what prices a plan.

A cluster is nodes with some ranks each, links inside a node and one out of it that its ranks share.
With a latency α until the first byte, an overhead o for every further message, and β bytes a second
(Culler 1993; Thakur 2005)::

    all-to-all         α + o (messages - 1) + the more of bytes that leave a node / β between,
                           and of a rank's bytes that stay / β inside
    even slices of n   α log2 W + n (W - 1) / W / the lesser β on the way; with rings Σ α of all
                           hops instead of log2 W
    in two levels      of N nodes with d ranks: as much of d ranks inside, and then of N ranks
                           between, where the d links of a node are one: n (N - 1) / N / β

The first is as slow as its busiest rank, the others cost every rank the same. A rank is busy with
what it sends and what it receives, whichever is more, where its link carries both at a time
(``duplex``).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from natgrad.checks import Range, check_numbers, check_positive_fields, check_whole_fields
from natgrad.errors import SettingError
from natgrad.placement.collectives import Flows
from natgrad.placement.rank_arrays import Costs
from natgrad.specs import Routine

_SHARE = Range(low=0, high=1)


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
        decomposing: ``> 0``, share of ``flops`` that a rank reaches in eigendecompositions, at most
            1.
        inverting: ``> 0``, share of ``flops`` that it reaches in Cholesky inverses, at most 1.
        capacity: bytes of all memory of a rank; ``None`` sets no limit.
        nodes: how many there are; ``None`` is as many as it takes.
        duplex: share of the lesser of both directions of an all-to-all that travels beside the
            other, from 0 to 1. Links carry both at once. Over gloo, though, two ranks that send
            each other something mostly do so one after the other: 0.
        rings: whether reduce-scatters and all-gathers go around all ranks, one hop after the other.
            So do those of NCCL, but for groups with one rank in a node from version 2.23 (2024) on,
            which have trees; a mesh of two dimensions makes such groups.
        exchanged_sums: whether a reduce-scatter is an all-to-all of slices that ranks add up
            themselves, as over gloo, whose own one moves twice the bytes.
        two_levels: whether reduce-scatters and all-gathers of whole nodes go inside of each first
            and then between them, as in a mesh of two dimensions (`natgrad.comm.TwoLevels`).
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
    inverting: float = 1.0
    capacity: float | None = None
    nodes: int | None = None
    duplex: float = 1.0
    rings: bool = False
    exchanged_sums: bool = False
    two_levels: bool = False
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_positive_fields(self, "flops", "bandwidth", "latency")
        check_positive_fields(self, "decomposing", "inverting", high=1)
        check_whole_fields(self, "node")
        check_numbers(self, duplex=_SHARE)
        for name in ("memory", "overhead", "capacity"):
            if getattr(self, name) is not None:
                check_positive_fields(self, name)
        if self.nodes is not None:
            check_whole_fields(self, "nodes")
        for name in ("rings", "exchanged_sums", "two_levels"):
            if not isinstance(getattr(self, name), bool):
                raise SettingError(
                    f"Cluster.{name} is {getattr(self, name)!r} but must be True or False: pass "
                    "one of them."
                )
        if self.node > 1 and self.inside is None:
            raise SettingError(
                f"Cluster.node is {self.node} but Cluster.inside is None, so that nothing connects "
                "the ranks of a node: pass the Link between them, or node=1."
            )

    def rate(self, routine: Routine) -> float:
        """Operations a second in decompositions.

        Arguments:
            routine: what decomposes.
        """
        return self.flops * (self.decomposing if routine is Routine.EIGEN else self.inverting)

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
        if self.two_levels and self.inside is not None and self.node < ranks:
            nodes, spare = divmod(ranks, self.node)
            if not spare:
                whole = sent * ranks / (ranks - 1)
                return _of_level(self, whole, self.node, self.inside) + _of_level(
                    self, whole, nodes, self.between
                )
        return self._first_byte(ranks) + sent / self.slowest(ranks).bandwidth

    def reduce_scatter(self, sent: int, ranks: int) -> float:
        """Seconds of a reduce-scatter, where it may be an all-to-all.

        Arguments:
            sent: bytes that every rank sends in it.
            ranks: how many there are.
        """
        if not self.exchanged_sums or ranks == 1:
            return self.ring(sent, ranks)
        each = np.full(ranks, sent, np.int64)
        return self.longest(Flows(each, each))

    def _first_byte(self, ranks: int) -> float:
        """Seconds until a slice has come from the farthest rank."""
        if not self.rings:
            return ceil(log2(ranks)) * self.slowest(ranks).latency
        # Ranks of a node are one behind the other, so that one hop of each leaves it.
        leaving = 0 if ranks <= self.node else -(-ranks // self.node)
        inside = self.latency if self.inside is None else self.inside.latency
        return leaving * self.latency + (ranks - 1 - leaving) * inside

    def broadcast(self, nbytes: int, ranks: int) -> float:
        """Seconds of one copy for every rank, in one call of its own, as papers send layers.

        Arguments:
            nbytes: of the copy.
            ranks: how many there are.
        """
        return self.ring(nbytes, ranks)

    def all_reduce(self, nbytes: int, ranks: int) -> float:
        """Seconds of a sum over all ranks, as a reduce-scatter and an all-gather: in trees, which
        NCCL has for it since 2.4 (2019).

        Arguments:
            nbytes: of the buffer that is summed.
            ranks: how many there are.
        """
        if ranks == 1:
            return 0.0
        link, sent = self.slowest(ranks), (ranks - 1) * nbytes // ranks
        return 2 * (ceil(log2(ranks)) * link.latency + sent / link.bandwidth)

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
        busy = self._busy(flows)
        if ranks == 1 or not busy.any():
            return np.zeros(ranks)
        return self.wait(ranks) + self.carried(busy)

    def longest(self, flows: Flows) -> float:
        """Seconds of an all-to-all until its slowest rank is done: those that most bytes take, as
        more of them never take less.

        Arguments:
            flows: bytes by rank.
        """
        ranks = len(flows.sent)
        busy: NDArray[Any] = np.maximum(flows.sent, flows.received)  # whole numbers, if they can be
        if self.duplex < 1:
            busy = self._busy(flows)
        most = float(busy.max())
        if ranks == 1 or not most:
            return 0.0
        if self.inside is None:
            return self.wait(ranks) + most / self.bandwidth
        leaving, stay = self._parting(ranks)
        of_node = float(self._by_node(busy).max())
        slower = max(leaving * of_node / self.bandwidth, stay * most / self.inside.bandwidth)
        return self.wait(ranks) + slower

    def _busy(self, flows: Flows) -> Costs:
        """Bytes that count, by rank."""
        busy: Costs = np.maximum(flows.sent, flows.received).astype(np.float64)
        if self.duplex < 1:
            busy += (1 - self.duplex) * np.minimum(flows.sent, flows.received)
        return busy

    def _parting(self, ranks: int) -> tuple[float, float]:
        """Shares of the bytes of a rank that leave its node, and that stay."""
        leaving = (ranks - min(self.node, ranks)) / (ranks - 1)
        return leaving, 1 - leaving

    def _by_node(self, busy: NDArray[Any]) -> NDArray[Any]:
        """Bytes of all ranks of a node, which share its link, node by node."""
        node = min(self.node, len(busy))
        found: NDArray[Any]
        if len(busy) % node:
            found = np.add.reduceat(busy, np.arange(0, len(busy), node))
        else:
            found = busy.reshape(-1, node).sum(1)
        return found

    def carried(self, busy: Costs) -> Costs:
        """Seconds of the bytes of an all-to-all, by rank.

        Arguments:
            busy: bytes by rank.
        """
        ranks = len(busy)
        if self.inside is None:
            alone: Costs = busy / self.bandwidth
            return alone
        leaving, stay = self._parting(ranks)
        of_node = self._by_node(busy).repeat(min(self.node, ranks))[:ranks]
        slower: Costs = np.maximum(
            leaving * of_node / self.bandwidth, stay * busy / self.inside.bandwidth
        )
        return slower


def _of_level(cluster: Cluster, nbytes: float, ranks: int, link: Link) -> float:
    """Seconds of even slices of a buffer among the ranks of a node, or its like among nodes."""
    hops = ranks - 1 if cluster.rings else ceil(log2(ranks))
    return hops * link.latency + nbytes * (ranks - 1) / ranks / link.bandwidth


@lru_cache(maxsize=256)  # asked for with every collective
def _slowest(cluster: Cluster, ranks: int) -> Link:
    if cluster.inside is None:
        return cluster.between
    if ranks <= cluster.node:
        return cluster.inside
    narrow = min(cluster.inside.bandwidth, cluster.bandwidth)
    return Link(max(cluster.inside.latency, cluster.latency), narrow)
