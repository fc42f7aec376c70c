"""A sample of injected faults, and processes that are killed at a collective."""

import os
import random
import signal
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from fuzz.faults import ALIKE, CLASSES, ONE_RANK, REFUSED, RIGHT, fine, injected, of_messages
from natgrad.comm import ProcessGroups
from natgrad.comm.recording import Recording

PATIENCE = 6.0  # seconds that a collective waits


def test_no_fault_is_silent():
    found = injected(40, seed=0)
    assert all(fine(what, how) for what, counts in found.items() for how in counts), found
    assert sum(counts.total() for counts in found.values()) == 40
    kinds = {name.removesuffix("s") for name in CLASSES}
    assert {what.partition(",")[0] for what in found} >= {"full disk"}
    assert len({kind for kind in kinds for what in found if what.startswith(kind)}) == len(kinds)


def test_a_number_that_became_none_on_its_way_is_in_no_weight():
    """At every collective, of every rank."""
    found = Counter(how for _, how in of_messages(random.Random(0), ("damaged",), once=True))
    assert found.keys() <= {RIGHT, REFUSED, ALIKE, ONE_RANK}, found
    assert found[REFUSED] > 10


class Doomed(Recording):
    """Ends its process by signal 9 as it begins collective number ``last``."""

    def __init__(self, inner, last):
        super().__init__(inner)
        self.last, self.calls = last, 0

    def _count(self):
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1

    def exchange(self, *args):
        self._count()
        return super().exchange(*args)

    def total(self, *args):
        self._count()
        return super().total(*args)

    def reduce_scatter(self, *args):
        self._count()
        return super().reduce_scatter(*args)

    def all_gather(self, *args):
        self._count()
        return super().all_gather(*args)

    def gather(self, value):
        self._count()
        return self.inner.gather(value)


def killed_at(call, placement):
    """Rank 1 dies at its collective number ``call``; what ends the other, and when. Without a
    ``call``, how many there are."""
    import torch.distributed as dist

    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    comm = ProcessGroups(group)
    doomed = Doomed(comm, call if comm.rank == 1 else None)
    start = time.monotonic()
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = natgrad.KFAC(
            model,
            optimizer,
            update_every=1,
            refresh_every=1,
            distributed=natgrad.Distributed(placement=placement, group=doomed),
        )
        for step in range(2):
            torch.manual_seed(10 * step + comm.rank)
            optimizer.zero_grad()
            x = torch.randn(4, 4, dtype=torch.float64)
            F.cross_entropy(model(x), torch.arange(4) % 3).backward()
            kfac.step()
            optimizer.step()
        comm.gather("the end")  # a rank that died after its last message has been missed now
    except Exception as error:
        return type(error).__name__, time.monotonic() - start
    return doomed.calls, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_at_every_collective(world):
    """From the first one, when KFAC is made, to the last one of the second step; each third of
    them, as every one takes two processes."""
    placement = natgrad.MemOpt()
    calls = world.run(killed_at, None, placement, ranks=2)[1][0]
    assert calls > 8
    for call in (*range(0, calls, 3), calls - 1):
        found = world.run(killed_at, call, placement, ranks=2, lost=[1], timeout=60)
        name, seconds = found[0]
        assert name == "CommunicationError", call
        assert seconds < PATIENCE + 3
