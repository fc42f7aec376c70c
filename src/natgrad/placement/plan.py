"""What every rank does, as frozen data on three clocks: update factors, refresh their inverses,
apply them. The executor runs it, the simulator prices it, a reader prints or draws it.

Keepers have a factor's running average, decomposers decompose it, holders have the parts; workers
precondition a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from natgrad.placement import memory, picture, table
from natgrad.placement.amounts import Memory, Work
from natgrad.placement.cluster import Cluster
from natgrad.placement.collectives import Collective
from natgrad.placement.cost import CostModel, Flops, Folding
from natgrad.placement.ops import (
    ApplyOp,
    Decompose,
    FactorId,
    Op,
    Precondition,
    Reduce,
    RefreshOp,
    Rows,
    Share,
)
from natgrad.placement.rank_arrays import Costs, Numbers, add
from natgrad.placement.routes import ALL_DIRECT, Route, Routes
from natgrad.placement.sending import Sending
from natgrad.placement.world import World
from natgrad.specs import BlockSpec, Ranks, as_ranks
from natgrad.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plan(Sending):
    """What every rank does. All ranks have the same plan, with the ops in the same order.

    Arguments:
        strategy: name of the placement, for print.
        world: number of ranks, bytes of a number, and how gradients lie on the ranks.
        blocks: sizes of all blocks, in the order of the model.
        update: ops on steps that update factors, last layers first, as a backward pass meets them.
        refresh: ops on steps that decompose factors.
        apply: ops on every step.
        routes: how each kind of op travels.
    """

    strategy: str
    world: World
    blocks: tuple[BlockSpec, ...]
    update: tuple[Reduce, ...]
    refresh: tuple[RefreshOp, ...]
    apply: tuple[ApplyOp, ...]
    routes: Routes = ALL_DIRECT

    # Who has what.

    @cached_property
    def workers(self) -> Mapping[str, Ranks]:
        """Who preconditions a block."""
        return {op.block: op.ranks for op in self.apply if isinstance(op, Precondition)}

    @cached_property
    def decomposers(self) -> Mapping[FactorId, Ranks]:
        """Who decomposes a factor: one rank, or some that share it out by rows."""
        ranks: dict[FactorId, list[int]] = {}
        for op in self.refresh:
            if isinstance(op, Decompose):
                ranks.setdefault(op.factor, []).append(op.rank)
        return {factor: as_ranks(some) for factor, some in ranks.items()}

    @cached_property
    def rows(self) -> Mapping[tuple[FactorId, int], Rows]:
        """Which rows of an inverse a rank makes, of factors that several decompose together."""
        ops = (op for op in self.refresh if isinstance(op, Decompose))
        return {(op.factor, op.rank): op.rows for op in ops if op.rows is not None}

    @cached_property
    def keepers(self) -> Mapping[FactorId, Ranks]:
        """Where a factor's running average lives: where it is summed, or else used."""
        kept = {op.factor: op.to for op in self.update}
        for block in self.blocks:
            for name, _ in block.factors:
                used = block.decomposed[0] if name in block.merged else name
                if name in block.in_basis:
                    kept.setdefault((block.name, name), self.workers[block.name])
                else:
                    kept.setdefault((block.name, name), self.decomposers[block.name, used])
        return kept

    @cached_property
    def holders(self) -> Mapping[FactorId, Ranks]:
        """Where the parts of a decomposition live. Those of a factor in the basis of others are its
        own numbers, at hand where it is kept."""
        held = dict(self.decomposers)
        held.update((op.factor, op.to) for op in self.refresh if isinstance(op, Share))
        for block in self.blocks:
            for name in block.in_basis:
                held[block.name, name] = self.keepers[block.name, name]
        return held

    @cached_property
    def priced(self) -> list[Any]:
        """What `simulate` has found before: clusters and costs, each with its `Timeline`."""
        return []

    # Of what travels, counted together with its seconds, as both ask for the same collectives.

    @cached_property
    def update_room(self) -> Numbers:
        return memory.update_room(self)

    @cached_property
    def share_room(self) -> tuple[Numbers, Numbers]:
        return memory.share_room(self)

    @cached_property
    def gather_room(self) -> Numbers:
        return memory.gather_room(self)

    @cached_property
    def return_room(self) -> Numbers:
        return memory.return_room(self)

    @cached_property
    def _memory(self) -> dict[str, Numbers]:
        return memory.by_rank(self)

    def memory(self, rank: int, other_numbers: int = 0) -> Memory:
        """Bytes that K-FAC takes on a rank, by kind.

        Arguments:
            rank: from 0 to ``world_size - 1``.
            other_numbers: how many numbers are in the gradients of parameters without a block,
                which are summed as well where gradients are local.
        """
        found = Memory(**{kind: int(sizes[rank]) for kind, sizes in self._memory.items()})
        if not other_numbers:
            return found
        return replace(found, apply=max(found.apply, memory.all_reduced(self, other_numbers)))

    @cached_property
    def _totals(self) -> Numbers:
        return memory.totals(self._memory)

    @property
    def most_memory(self) -> int:
        """Bytes that K-FAC takes at the busiest moment of a step, on the rank with most."""
        return int(self._totals.max())

    def fullest(self, other_numbers: int = 0) -> Memory:
        """What K-FAC takes on the rank with most.

        Arguments:
            other_numbers: as for `memory`.
        """
        return self.memory(int(self._totals.argmax()), other_numbers)

    @property
    def mean_memory(self) -> float:
        """Bytes that K-FAC takes at the busiest moment of a step, on an average rank."""
        return float(self._totals.mean())

    def work(self, rank: int, cost: CostModel | None = None) -> Work:
        """What a rank computes at a refresh of all factors, and at every step.

        Arguments:
            rank: from 0 to ``world_size - 1``.
            cost: what decompositions and preconditioning cost; ``None`` is ``Flops()``.
        """
        decompose, precondition = self.work_of_all(cost)
        return Work(float(decompose[rank]), float(precondition[rank]))

    def work_of_all(self, cost: CostModel | None = None) -> tuple[Costs, Costs]:
        """What rank 0, 1, … computes at a refresh of all factors, and at every step.

        Arguments:
            cost: what decompositions and preconditioning cost; ``None`` is ``Flops()``.
        """
        cost = cost or Flops()
        decompose, precondition = (np.zeros(self.world_size) for _ in range(2))
        for factor, ranks in self.decomposers.items():
            each = self.factors[factor].split(len(ranks))
            add(decompose, ranks, cost.decompose(each))
        for name, ranks in self.workers.items():
            add(precondition, ranks, cost.precondition(self.block[name]))
        return decompose, precondition

    def decomposing_seconds(self, cluster: Cluster, cost: CostModel | None = None) -> Costs:
        """How long rank 0, 1, … decomposes at a refresh of all factors.

        Arguments:
            cluster: how fast a rank is.
            cost: what decompositions cost; ``None`` is ``Flops()``.
        """
        cost = cost or Flops()
        found = np.zeros(self.world_size)
        for factor, ranks in self.decomposers.items():
            spec = self.factors[factor].split(len(ranks))
            add(found, ranks, cost.decompose(spec) / cluster.rate(spec.work.by))
        return found

    def folding_seconds(self, cluster: Cluster, cost: CostModel) -> Costs:
        """How long rank 0, 1, … folds sums into the running averages that it keeps, at an update;
        nothing by a cost model that does not say.

        Arguments:
            cluster: how fast a rank is.
            cost: what folding costs, if it is `Folding`.
        """
        found = np.zeros(self.world_size)
        if isinstance(cost, Folding):
            for factor, ranks in self.keepers.items():
                add(found, ranks, cost.fold(self.factors[factor]) / cluster.flops)
        return found

    def routed(self, route: Route) -> Plan:
        """The same plan with one route for all.

        Arguments:
            route: by which all ops go that can.
        """
        return self.along(Routes(route, route, route, route))

    def along(
        self, routes: Routes, counted: Sequence[tuple[Sequence[Op], list[Collective]]] = ()
    ) -> Plan:
        """The same plan by other routes, with what was counted and does not depend on them.

        Arguments:
            routes: how each kind of op travels.
            counted: ops with their collectives by these routes, as `calls` gives them.
        """
        found = replace(self, routes=routes)
        for name in ("block", "factors", "clipped", "_copy_bytes"):
            if name in self.__dict__:
                found.__dict__[name] = self.__dict__[name]
        found.__dict__["_counted"] = {tuple(ops): calls for ops, calls in counted}
        return found

    def renamed(self, strategy: str) -> Plan:
        """The same plan under another name, with all that was counted for it.

        Arguments:
            strategy: name of the placement, for print.
        """
        found = replace(self, strategy=strategy)
        for name, counted in self.__dict__.items():
            found.__dict__.setdefault(name, counted)
        return found

    # Other readers.

    def fingerprint(self) -> int:
        """Equal plans, equal numbers; fits an int64."""
        digest = hashlib.sha256(repr(self).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def table(self) -> Table:
        """Which ranks keep, decompose, hold and apply every factor."""
        return table.by_factor(self)

    def by_rank(self) -> Table:
        """What every rank keeps, sends and computes."""
        return table.by_rank(self)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.by_rank()}"

    def draw(self, path: str | PathLike[str] | None = None) -> Figure:
        """A ``matplotlib`` figure: which rank does what for every block, and what it keeps.

        Arguments:
            path: file to write, whose ending says the format, such as ``plan.png``; ``None`` writes
                none.
        """
        return picture.draw(self, path)
