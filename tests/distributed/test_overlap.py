"""Sums leave during the backward pass, in one order on all ranks, whatever their graphs are."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import natgrad
from distributed.training import wrapped
from kfac_keywords import grouped
from natgrad import KFAC

SMALL = 1  # byte, so that every factor is a bucket of its own
BY_MEMORY = natgrad.Distributed(natgrad.MemOpt(), bucket_bytes=SMALL)


class Net(nn.Module):
    """Four layers. ``way`` says what is special about them."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.third, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x):
        x = self.first(x).tanh()
        if self.way == "unused on rank 1" and dist.get_rank() == 1:
            return self.head(self.third(x).tanh())
        if self.way == "called twice":
            x = self.second(x).tanh()
        if self.way.startswith("checkpoint"):
            reentrant = self.way == "checkpoint, reentrant"
            x = checkpoint(lambda x: self.third(self.second(x).tanh()), x, use_reentrant=reentrant)
        else:
            x = self.third(self.second(x).tanh())
        return self.head(x.tanh())


def wrap(way, layout):
    if layout == "ddp":
        options = {"find_unused_parameters": True} if way == "unused on rank 1" else {}
        return nn.parallel.DistributedDataParallel(Net(way), **options)
    return wrapped(Net(way), layout)


def data(step):
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))


def recorded(kfac):
    """Appended to by every exchange: its purpose, and from whom how much comes."""
    events = []
    exchange = kfac.comm.exchange

    def spy(send, sizes, receive, purpose):
        events.append((purpose, tuple(sizes), tuple(receive)))
        return exchange(send, sizes, receive, purpose)

    kfac.comm.exchange = spy
    return events


def events_of(way, layout, micro=1, bucket_bytes=SMALL, **settings):
    """What happens, in order, in two steps; and all factors as they are then."""
    model = wrap(way, layout)
    settings = {"placement": natgrad.MemOpt(), "bucket_bytes": bucket_bytes, **settings}
    kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, **grouped(**settings))
    events = recorded(kfac)
    for step in range(2):
        model.zero_grad()
        x, y = data(step)
        for index in range(micro):
            last = index == micro - 1
            if layout == "fsdp":
                model.set_requires_gradient_sync(last)
            quiet = layout == "ddp" and not last
            with model.no_sync() if quiet else nullcontext():
                out = model(x)
                if settings.get("curvature"):
                    kfac.observe(out)
                    events.append("observed")
                (F.cross_entropy(out, y) / micro).backward()
            events.append("backward" if last else "part")
        kfac.step()
        events.append("step")
    return events, kfac.plan, averages(kfac)


def averages(kfac):
    return {(b.name, name): r.mean.clone() for b in kfac.blocks for name, r in b.running.items()}


def before(events, mark):
    """Exchanges of statistics before the first ``mark``, and all of them in that step."""
    end, whole = events.index(mark), events.index("step")
    one = [event for event in events[:end] if event[0] == "factors"]
    return one, [event for event in events[:whole] if event[0] == "factors"]


WAYS = ["plain", "called twice", "checkpoint", "checkpoint, reentrant"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_all_buckets_leave_during_the_backward_pass(world, layout, way):
    results = world.run(events_of, way, layout, ranks=3)
    for events, plan, _ in results:
        during, all_of_them = before(events, "backward")
        assert len(all_of_them) == len(plan.buckets) == 8
        assert during == all_of_them
    assert_one_order(results)
    if way.startswith("checkpoint"):  # which is no other mathematics
        assert_same_averages(results, world.run(events_of, "plain", layout, ranks=3))


def assert_same_averages(results, expected):
    for (_, _, found), (_, _, other) in zip(results, expected, strict=True):
        assert found.keys() == other.keys()
        for key in found:
            torch.testing.assert_close(found[key], other[key], rtol=1e-12, atol=1e-15)


def assert_one_order(results):
    """What a rank sends in its n-th exchange is what others await in theirs."""
    exchanges = [[e for e in events if not isinstance(e, str)] for events, *_ in results]
    assert len({tuple(purpose for purpose, *_ in each) for each in exchanges}) == 1
    for together in zip(*exchanges, strict=True):
        for rank, (_, sizes, _) in enumerate(together):
            for other, (_, _, receive) in enumerate(together):
                assert sizes[other] == receive[rank]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_buckets_leave_as_soon_as_their_layers_are_done(world, layout):
    """Those of a layer when its own gradient is there, before any is sent further back."""
    for left in world.run(leaving, layout, ranks=2):
        assert left == [2, 4, 6, 8]


def leaving(layout):
    """Exchanges so far whenever the backward pass has come to the output of a layer."""
    model = wrap("plain", layout)
    kfac = KFAC(model, kl_clip=None, distributed=BY_MEMORY)
    events, left = recorded(kfac), []

    def watch(module, inputs, out):
        out.register_hook(lambda g: left.append(len(events)))  # after that of K-FAC

    inner = model.module if layout == "ddp" else model
    for layer in (inner.first, inner.second, inner.third, inner.head):
        layer.register_forward_hook(watch)
    x, y = data(0)
    F.cross_entropy(model(x), y).backward()
    found = list(left)
    kfac.step()
    return found


def test_a_layer_that_one_rank_does_not_use(world):
    """Its bucket waits for the step there, and with it all later ones; others wait for nothing."""
    results = world.run(events_of, "unused on rank 1", "ddp", ranks=2)
    assert_one_order(results)
    for rank, (events, plan, _) in enumerate(results):
        during, all_of_them = before(events, "backward")
        assert len(all_of_them) == len(plan.buckets) == 8
        assert len(during) == (8, 4)[rank]  # head and third; not second, and so not first
    one_bucket = world.run(events_of, "unused on rank 1", "ddp", 1, 25 << 20, ranks=2)
    assert_same_averages(results, one_bucket)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_nothing_leaves_before_the_last_micro_batch(world, layout):
    results = world.run(events_of, "plain", layout, 3, ranks=2)
    assert_one_order(results)
    for events, plan, _ in results:
        assert events[:2] == ["part", "part"]
        during, all_of_them = before(events, "backward")
        assert during == all_of_them
        assert len(during) == len(plan.buckets)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_observed_sums_leave_before_the_backward_pass_of_the_loss(world, layout):
    """All vectors of the exact Fisher together: nothing travels twice."""
    settings = {"curvature": natgrad.ExactFisher()}
    for events, plan, _ in world.run(observed, layout, settings, ranks=2):
        during, all_of_them = before(events, "observed")
        assert during == all_of_them
        assert len(during) == len(plan.buckets)


def observed(layout, settings):
    return events_of("plain", layout, **settings)


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
def test_float16_waits_for_the_step(world, layout):
    """Its unit is known only then."""
    for events, plan, _ in world.run(halved, layout, ranks=2):
        during, all_of_them = before(events, "backward")
        assert during == []
        assert len(all_of_them) == len(plan.buckets)


def halved(layout):
    return events_of("plain", layout, wire_dtype=torch.float16)


def discarded(way):
    """A batch is thrown away whose sums have left rank 0 only, then a good one follows."""
    model = wrap(way, "ddp")
    kfac = KFAC(model, kl_clip=None, distributed=BY_MEMORY)
    for step in range(2):
        model.zero_grad()
        x, y = data(step)
        F.cross_entropy(model(x), y).backward()
        if step == 0:
            kfac.discard()
    kfac.step()
    return averages(kfac)


@pytest.mark.parametrize("way", ["plain", "unused on rank 1"])
def test_what_is_discarded_still_arrives(world, way):
    results = world.run(discarded, way, ranks=2)
    expected = world.run(stepped, way, ranks=2)
    for found, good in zip(results, expected, strict=True):
        assert found.keys() == good.keys()
        for key in found:
            assert torch.equal(found[key], good[key])


def stepped(way):
    model = wrap(way, "ddp")
    kfac = KFAC(model, kl_clip=None, distributed=BY_MEMORY)
    x, y = data(1)
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    return averages(kfac)
