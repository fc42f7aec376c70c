"""Bytes that a rank holds of what it has received during an update: `python -m
benchmarks.receive_memory`.

A rank that keeps a factor gets the shares of all others by the direct route, as many copies as
there are ranks; of even slices it gets one copy of a bucket, whatever the number of ranks. Counted
is every buffer that statistics are received into, from when it is made until it is freed.
"""

import argparse
import weakref
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import natgrad
from benchmarks.networks import linears
from benchmarks.timing import render
from natgrad.comm import launch
from natgrad.comm.process_groups import ProcessGroups
from natgrad.comm.transfers import Pending, Transfer
from natgrad.placement import Route
from natgrad.tables import bytes_text

WIDTHS = [192] * 13  # twelve layers
BUCKET = 300_000  # bytes, of two layers


class Counting(ProcessGroups):
    """Counts the bytes of statistics that have been received and not freed."""

    held = most = 0

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        pending = super()._exchange(send, sizes, receive, failure)
        if "'factors'" in failure:
            assert isinstance(pending, Transfer)
            received = pending._received
            assert received is not None
            self._change(received.nbytes)
            weakref.finalize(received, partial(self._change, -received.nbytes))
        return pending

    def _change(self, size: int) -> None:
        self.held += size
        self.most = max(self.most, self.held)


@dataclass(frozen=True)
class Counted:
    """Of one rank, in bytes."""

    held: int
    owned: int
    copy: int
    update: int


def count(route: Route, widths: list[int]) -> Counted:
    """One update on one of the ranks of the default group."""
    torch.manual_seed(0)
    group = Counting()
    model = linears(widths)
    kfac = natgrad.KFAC(
        model,
        kl_clip=None,
        distributed=natgrad.Distributed(
            natgrad.MemOpt(), group=group, route=route, bucket_bytes=BUCKET
        ),
    )
    model(torch.randn(4, widths[0])).square().mean().backward()
    kfac.step()
    plan = kfac.plan
    owned = sum(
        plan.numbers(op) * plan.number_bytes(op) for op in plan.update if group.rank in op.to
    )
    copy = max(sum(map(plan.numbers, ops)) for ops in plan.cut(plan.update))
    memory = plan.memory(group.rank)
    return Counted(group.most, owned, copy * plan.world.factor_bytes, memory.sums + memory.update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        for route in Route:
            found = launch.run(count, route, args.widths, ranks=ranks)
            most = max(found, key=lambda one: one.held)
            sizes = (most.held, most.copy, most.owned, max(one.update for one in found))
            rows.append((str(ranks), route.value, *map(bytes_text, sizes)))
    names = ("ranks", "route", "received at a time", "a bucket", "owned", "update, planned")
    print(render("Statistics received and not freed, of the rank with most", names, rows))


if __name__ == "__main__":
    main()
