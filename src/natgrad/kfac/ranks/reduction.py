"""Sums of all ranks, brought together at the ranks that keep a factor.

    A = sum_r S_r / sum_r count_r,    G = sum_r scale_r^2 S_r / sum_r entered_r

A rank's sum ``S_r`` of G is scaled by its own number of terms of the loss (samples, unless it was
found) before it travels and divided by the number of those that entered the sums on all ranks
afterwards (all of them, unless a share of the samples was chosen); A is divided by the positions of
all ranks. So each of them counts once, however unevenly they lie on the ranks.

Buckets leave from inside the backward pass as soon as their layers are done, in the same order on
all ranks, and are waited for at the step (`summing`). One pass of a step does so, the last one.
At most a few are under way at a time (`may_leave`): what has come of one is added up before the
next leaves, and sums that cannot leave stay where they are. During a backward pass nobody waits for
that, as other ranks may be waiting for this one there.

What arrives after its bucket has left is found in a small all-reduce at the step, and sent by all
ranks once more; so is what a share lacks whose rank has seen more samples since. Only float16 waits
for the step: it has no number above 65504 and few below 1e-5, so all ranks first agree on a unit
for each factor.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import frexp, isfinite, ldexp

import torch
from torch import Tensor

from natgrad.capture.averages import NewSums
from natgrad.capture.blocks import Block
from natgrad.capture.statistics import Due
from natgrad.kfac.ranks.summing import InFlight, Summing, SumOp
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.step import Step
from natgrad.placement.ops import FactorId, Reduce
from natgrad.structures import Sums


@dataclass(frozen=True)
class StepTotals:
    """Over all ranks. ``counts``: terms in the sums of each factor, wherever they are kept."""

    samples: int
    even: bool  # all ranks saw equally many
    passes: int
    counts: dict[FactorId, float]
    gradients: dict[str, int]  # how many ranks have the gradients of a block
    late: bool = False  # there are sums that have not left
    entered: float = 0.0  # terms of the loss that the sums are over
    votes: tuple[float, ...] = ()  # for what the loss is
    rescaled: bool = False  # more samples came to a rank after its sums had left
    largest: dict[FactorId, float] = field(default_factory=dict)  # no share is above it

    def none_of(self, block: Block, names: Iterable[str]) -> bool:
        return not any(self.counts.get((block.name, name)) for name in names)


@dataclass(frozen=True)
class SentBucket:
    """A bucket in flight, with the scale and the counts that this rank's shares had."""

    in_flight: InFlight
    scale: float
    counts: dict[FactorId, int]


class Reducer:
    """One update's way from local sums to what is folded into running averages."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.due: Due = {}
        plan = team.plan
        self.buckets = plan.cut(plan.update)
        self.reduced = {op.factor for op in plan.update}
        self._of = [{op.factor[0] for op in ops} for ops in self.buckets]
        self._summing = Summing(
            team, plan.routes.factors, team.factor_wire, team.sum_dtype, "factors"
        )
        self.in_flight: list[SentBucket] = []
        self._done: set[str] = set()
        self._next = 0
        self._pass: object = None
        self.overlaps = False  # whether anybody calls complete()
        self._unit: dict[FactorId, float] = {}  # of what travels

    def begin(self, due: Due) -> None:
        """A new step that updates these factors. Buckets in flight are waited for, as all ranks
        sent them."""
        for sent in self.in_flight:
            self._summing.settle(sent.in_flight)
        self.due = due
        self.in_flight, self._done, self._next, self._pass = [], set(), 0, None

    def discard(self, scale: float) -> None:
        """Nothing of this step counts. Other ranks may have sent more than this one, and wait."""
        if self.overlaps:
            for index in range(self._next, len(self.buckets)):
                self._launch(index, scale, last=True)

    def complete(self, block: Block, this: object, scale: float) -> None:
        """No more will come to the sums of a block in this pass: send what can be sent.

        Only one pass of a step does so. What others add is found at the step, by all ranks."""
        self._pass = self._pass or this
        if this is not self._pass or not scale:
            return
        self._done.add(block.name)
        while self._next < len(self.buckets) and self._of[self._next] <= self._done:
            if not self._summing.has_room(self._due_of(self._next), self._under_way):
                return
            self._launch(self._next, scale)
            self._next += 1

    @property
    def _under_way(self) -> list[InFlight]:
        return [sent.in_flight for sent in self.in_flight]

    def _due_of(self, index: int) -> tuple[Reduce, ...]:
        return tuple(op for op in self.buckets[index] if self._is_due(op))

    def finish(self, step: Step) -> tuple[StepTotals, dict[Block, NewSums]]:
        """What this rank folds, of all ranks' sums since the last step."""
        blocks, scale, entered = (
            self.team.blocks.values(),
            step.statistics_scale,
            step.terms * step.share,
        )
        if self.team.alone:
            return self._finish_alone(step, entered)
        if not self.team.units:
            for index in range(self._next, len(self.buckets)):
                self._launch(index, scale, last=True)
        totals = self._totals(step, entered)
        self._unit = {factor: _unit(most) for factor, most in totals.largest.items()}
        if totals.late:  # nothing has left yet, or a pass came after its sums had
            for index in range(len(self.buckets)):
                self._launch(index, scale, last=True)
        if totals.rescaled:
            self._send_differences(scale)
        new_sums: dict[Block, NewSums] = {block: {} for block in blocks}
        for (name, factor), total in self._arrivals().items():
            block = self.team.blocks[name]
            divisor = totals.entered
            if not block.factors[factor].of_gradients:
                divisor = totals.counts[name, factor]
            if divisor and totals.counts[name, factor]:
                new_sums[block][factor] = (total, 1.0 / divisor)
        for block in blocks:  # what does not travel: the owner's own batch stands for all
            own = {n for n in self.team.keeps[block] if (block.name, n) not in self.reduced}
            new_sums[block] |= _means(block, block.take_sums(own), entered, scale)
        return totals, new_sums

    def _finish_alone(self, step: Step, entered: float) -> tuple[StepTotals, dict[Block, NewSums]]:
        sums = {block: block.take_sums() for block in self.team.blocks.values()}
        counts: dict[FactorId, float] = {}
        for block, own in sums.items():
            for name, total in own.items():
                counts[block.name, name] = float(total.count)
        scale = step.statistics_scale
        new_sums = {block: _means(block, own, entered, scale) for block, own in sums.items()}
        samples = step.samples or 0
        totals = StepTotals(
            samples, True, step.passes, counts, {}, entered=entered, votes=step.votes
        )
        return totals, new_sums

    def _launch(self, index: int, scale: float, *, last: bool = False) -> None:
        """Send the sums of a bucket, zeros where there are none: other ranks wait for them.
        ``last``: no sample follows, so that these sums are not needed again."""
        ops = self._due_of(index)
        if not ops:
            return
        counts: dict[FactorId, int] = {}

        def share(op: SumOp) -> Tensor:
            assert isinstance(op, Reduce)
            block, name = self.team.blocks[op.factor[0]], op.factor[1]
            own = block.take_sum(name)
            counts[op.factor] = 0 if own is None else own.count
            factor = scale**2 if block.factors[name].of_gradients else 1.0
            factor /= self._unit.get(op.factor, 1.0)
            return self._share(block, name, None if own is None else own.kept, factor)

        if last:  # then all ranks send all buckets, so that waiting for the first ones is safe
            self._summing.make_room(ops, self._under_way)
        sent = self._summing.start(ops, share, keep=not last)
        self.in_flight.append(SentBucket(sent, scale, counts))

    def _send_differences(self, scale: float) -> None:
        """What shares of gradients lack that left before all samples had come: on this rank perhaps
        nothing, but all ranks send alike."""
        for sent in list(self.in_flight):
            ops = [op for op in sent.in_flight.ops if self._is_of_gradients(op)]
            lacking = (scale / sent.scale) ** 2 - 1.0

            def difference(op: SumOp, sent: SentBucket = sent, lacking: float = lacking) -> Tensor:
                if op not in sent.in_flight.shares:  # it left at the step, with all samples
                    numbers = self.team.plan.numbers(op)
                    dtype = self.team.factor_wire.held_as
                    return torch.zeros(numbers, dtype=dtype, device=self.team.device)
                return self._summing.share(sent.in_flight, op) * lacking

            if ops:
                self._summing.make_room(ops, self._under_way)
                self.in_flight.append(SentBucket(self._summing.start(ops, difference), scale, {}))

    def _is_of_gradients(self, op: SumOp) -> bool:
        assert isinstance(op, Reduce)
        block, name = op.factor
        return self.team.blocks[block].factors[name].of_gradients

    def _is_due(self, op: Reduce) -> bool:
        block, name = op.factor
        return name in self.due.get(self.team.blocks[block], ())

    def _share(self, block: Block, name: str, kept: Tensor | None, factor: float) -> Tensor:
        form = block.forms[name]
        size = form.sent if self.team.packed else form.numel
        if kept is None:
            return torch.zeros(size, dtype=self.team.sum_dtype, device=block.device)
        share = form.pack(kept) if self.team.packed else kept
        return share if factor == 1.0 else share * factor

    def _totals(self, step: Step, entered: float) -> StepTotals:
        """One small sum of everything that all ranks must know."""
        samples, scale = step.samples or 0, step.statistics_scale
        blocks = list(self.team.blocks.values())
        counts: dict[FactorId, float] = {(b.name, n): 0.0 for b in blocks for n in b.factors}
        for sent in self.in_flight:
            for factor, count in sent.counts.items():
                counts[factor] += count
        for block in blocks:
            for name, total in block.sums.items():
                if (block.name, name) in self.reduced or name in self.team.keeps[block]:
                    counts[block.name, name] += total.count
        late = any((b.name, n) in self.reduced for b in blocks for n in b.sums)
        rescaled = any(sent.scale != scale for sent in self.in_flight)
        present = [block.has_gradient for block in blocks]
        found = (entered, *step.votes)
        digest = self.team.digest
        mine = [digest, digest**2, samples, samples**2, step.passes, late, rescaled]
        mine += [*found, *present]
        largest = self._largest(scale) if self.team.units else {}
        digests, square_digests, n, squares, all_passes, any_late, any_rescaled, *rest = (
            self.team.total(
                [float(number) for number in (*mine, *counts.values(), *largest.values())]
            ).tolist()
        )
        if digests:
            self.team.settle(digests, square_digests)
        (all_entered, *votes), rest = rest[: len(found)], rest[len(found) :]
        having, rest = rest[: len(blocks)], rest[len(blocks) :]
        return StepTotals(
            self.team.counted(n),
            abs(squares * self.team.size - n * n) < 0.5,
            int(all_passes),
            dict(zip(counts, rest, strict=False)),
            {block.name: int(k) for block, k in zip(blocks, having, strict=True)},
            bool(any_late),
            all_entered,
            tuple(votes),
            bool(any_rescaled),
            dict(zip(largest, rest[len(counts) :], strict=True)),
        )

    def _largest(self, scale: float) -> dict[FactorId, float]:
        """Of this rank's share of each factor the largest number; the host reads all at once."""
        keys, squares, numbers = [], [], []
        for block in self.team.blocks.values():
            for name, factor in block.factors.items():
                total = block.sums.get(name)
                kept = torch.zeros(1, device=block.device) if total is None else total.kept
                keys.append((block.name, name))
                squares.append(scale**2 if factor.of_gradients else 1.0)
                numbers.append(kept.abs().amax().to(self.team.sum_dtype))
        most = torch.stack(numbers).tolist()
        return {key: a * b for key, a, b in zip(keys, most, squares, strict=True)}

    def _arrivals(self) -> dict[FactorId, Tensor]:
        """The sums of all ranks that this one keeps, of all buckets."""
        found: dict[FactorId, Tensor] = {}
        buckets, self.in_flight = self._under_way, []
        for op, total in self._summing.finish(buckets):
            assert isinstance(op, Reduce)
            block, name = self.team.blocks[op.factor[0]], op.factor[1]
            total = total.to(self.team.sum_dtype)
            if (unit := self._unit.get(op.factor, 1.0)) != 1.0:
                total = total * unit
            if self.team.packed:
                total = block.forms[name].unpack(total)
            found[op.factor] = found[op.factor] + total if op.factor in found else total
        return found


def _means(block: Block, sums: Sums, entered: float, scale: float) -> NewSums:
    """Sums of this rank, each with what makes it a mean over terms or positions."""
    return {
        name: (
            total.kept,
            scale**2 / entered if block.factors[name].of_gradients else 1.0 / total.count,
        )
        for name, total in sums.items()
        if total.count and entered
    }


def _unit(most: float) -> float:
    """A power of two, so that dividing by it rounds nothing, of which ``most`` is at most 2^15.

    Its inverse is a float32, too: what is smaller than that allows counts for nothing."""
    return ldexp(1.0, max(frexp(most)[1] - 15, -110)) if most and isfinite(most) else 1.0
