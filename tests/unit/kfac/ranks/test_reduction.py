"""Local sums of several ranks become one mean where a factor is kept; here ranks are threads."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import nn

import natgrad
from kfac_keywords import grouped
from natgrad import KFAC
from natgrad.comm import Alone, float21
from natgrad.comm.base import Communicator
from natgrad.comm.transfers import Arrived
from natgrad.kfac.ranks.reduction import _unit
from natgrad.placement import Route


class Thread(Communicator):
    """A rank that others of the same process are told everything of."""

    def __init__(self, rank, board, barrier):
        super().__init__(rank, len(board))
        self.board, self.barrier = board, barrier

    def _all(self, own):
        self.board[self.rank] = own
        self.barrier.wait(timeout=20)
        everyone = list(self.board)
        self.barrier.wait(timeout=20)
        return everyone

    def _exchange(self, send, sizes, receive, failure):
        everyone = self._all(send.split(sizes))
        pieces = [pieces[self.rank] for pieces in everyone]
        assert [len(piece) for piece in pieces] == receive
        return Arrived(torch.cat(pieces))

    def _total(self, own, dtype, failure):
        return Arrived(sum(self._all(own)).to(dtype))

    def _all_gather(self, send, failure):
        return Arrived(torch.cat(self._all(send)))

    def _split(self, ranks):
        return Thread(self.rank, self.board, self.barrier) if len(ranks) == self.size else Alone()

    def _gather(self, value):
        return self._all(value)


def together(ranks, function):
    """What ``function(rank, communicator)`` returns on each rank."""
    board, barrier = [None] * ranks, Barrier(ranks)

    def call(rank):
        try:
            return function(rank, Thread(rank, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(call, r) for r in range(ranks)]]


@pytest.fixture(autouse=True, params=Route, ids=lambda route: route.value)
def _route(request, monkeypatch):
    """Whatever is sent goes by either route."""
    monkeypatch.setattr(Member, "route", request.param)


class Member:
    """A rank with a K-FAC whose sums are made up, so that its reduction is all there is to see."""

    route = None

    def __init__(self, rank, comm, **settings):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).double()
        settings = {"bucket_bytes": 1, "group": comm, "route": self.route, **settings}
        self.kfac = KFAC(model, kl_clip=None, **grouped(**settings))
        self.rank, self.blocks = rank, {block.name: block for block in self.kfac.blocks}
        self.reducer = self.kfac.reducer
        self.scale = 1.0
        self.forget()

    def forget(self):
        """``all``: what has been added since, as a dense matrix and a number of terms."""
        names = [(b, n) for b, block in self.blocks.items() for n in block.factors]
        self.all = dict.fromkeys(names, (0.0, 0))

    def add(self, *names, size=1.0, seed=0):
        """A random sum of 5 terms to all factors of these blocks."""
        for block in map(self.blocks.get, names or self.blocks):
            for name, total in block.open(block.factors, torch.float64).items():
                form = total.form
                generator = torch.Generator().manual_seed(100 * seed + self.rank)
                rows = torch.randn(1, 5, form.dim, generator=generator, dtype=torch.float64)
                kept = torch.zeros_like(total.kept)
                form.add_rows(kept, rows * size)
                total.kept += kept
                total.count += 5
                dense, terms = self.all[block.name, name]
                self.all[block.name, name] = dense + form.dense(kept), terms + 5

    def complete(self, *names, this="pass"):
        for name in names:
            self.reducer.complete(self.blocks[name], this, self.scale)

    def finish(self, samples, passes=1):
        """Means by factor: those that are kept here."""
        now = self.kfac._now(samples)
        step = replace(now, samples=samples, passes=passes, statistics_scale=self.scale)
        totals, news = self.reducer.finish(step)
        means = {
            (block.name, name): block.forms[name].dense(total * factor)
            for block, found in news.items()
            for name, (total, factor) in found.items()
        }
        return totals, means


def check(results, samples, scales=(1.0, 1.0), tolerance=1e-12):
    """``results``: member and means of each rank. Every factor is kept by one of them, and is the
    mean over the data of all."""
    found = {}
    for _, means in results:
        assert not found.keys() & means.keys()
        found |= means
    members = [member for member, _ in results]
    assert found.keys() == members[0].all.keys()
    for factor, mean in found.items():
        squares = [scale**2 if factor[1] == "G" else 1.0 for scale in scales]
        expected = sum(s * m.all[factor][0] for s, m in zip(squares, members, strict=True))
        terms = sum(member.all[factor][1] for member in members)
        expected /= sum(samples) if factor[1] == "G" else terms
        error = (mean - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, factor


def test_the_mean_over_all_ranks():
    def rank(rank, comm):
        member = Member(rank, comm)
        member.scale = (2.0, 3.0)[rank]  # as of a mean over 2 and over 3 samples
        member.add()
        totals, means = member.finish((2, 3)[rank], passes=rank)
        assert (totals.samples, totals.passes, totals.even) == (5, 1, False)
        assert totals.counts == dict.fromkeys(member.all, 10.0)
        assert not totals.late
        assert not totals.rescaled
        assert all(block.sums == {} for block in member.blocks.values())
        return member, means

    check(together(2, rank), samples=(2, 3), scales=(2.0, 3.0))


def test_a_rank_without_data_sends_zeros():
    def rank(rank, comm):
        member = Member(rank, comm)
        member.scale = float(rank)
        if rank:
            member.add()
        totals, means = member.finish(4 * rank or None)
        assert totals.samples == 4
        return member, means

    check(together(2, rank), samples=(0, 4))


def test_buckets_leave_in_the_order_of_the_plan():
    """The last layer comes first: what is done before it waits."""

    def rank(rank, comm):
        member = Member(rank, comm)
        member.add()
        buckets = [{op.factor[0] for op in ops} for ops in member.reducer.buckets]
        assert buckets == [{"1"}, {"1"}, {"0"}, {"0"}]
        member.complete("0")
        assert member.reducer.in_flight == []
        member.complete("1")
        sent = [sent.in_flight.ops for sent in member.reducer.in_flight]
        assert sent == list(member.reducer.buckets)
        return member, member.finish(1)[1]

    check(together(2, rank), samples=(1, 1))


def test_one_pass_of_a_step_sends_and_what_others_add_comes_late():
    """Each rank learns of more samples after its sums have left, and by a factor of its own."""

    def rank(rank, comm):
        member = Member(rank, comm)
        member.scale = (1.0, 3.0)[rank]
        member.add()
        member.complete("1", "0", this="first")
        assert len(member.reducer.in_flight) == 4
        member.scale = (4.0, 5.0)[rank]
        member.add(seed=1)
        member.complete("1", "0", this="second")
        assert len(member.reducer.in_flight) == 4
        totals, means = member.finish((4, 5)[rank], passes=2)
        assert totals.late
        assert totals.rescaled
        assert totals.counts == dict.fromkeys(member.all, 20.0)
        assert member.reducer.in_flight == []
        return member, means

    check(together(2, rank), samples=(4, 5), scales=(4.0, 5.0))


def test_a_pass_that_came_late_on_one_rank_only():
    def rank(rank, comm):
        member = Member(rank, comm)
        member.add()
        member.complete("1", "0")
        if rank:
            member.add("0", seed=1)
        totals, means = member.finish(2)
        assert totals.late
        assert not totals.rescaled
        return member, means

    check(together(2, rank), samples=(2, 2))


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize(
    ("dtype", "eps"),
    [
        (torch.float16, 2.0**-10),
        (torch.bfloat16, 2.0**-7),
        (torch.float32, 2.0**-23),
        (float21, 2.0**-12),
    ],
    ids=repr,
)
def test_wire_dtypes_at_any_size(dtype, eps, size):
    """Squares of 1e-9 and 1e9 are far outside of float16."""

    def rank(rank, comm):
        member = Member(rank, comm, wire_dtype=dtype)
        member.add(size=size * (1 + rank))
        assert member.kfac.plan.world.units == (dtype == torch.float16)
        _, means = member.finish(1)
        return member, means

    check(together(2, rank), samples=(1, 1), tolerance=eps)


@pytest.mark.parametrize("dtype", [torch.float16, float21], ids=repr)
def test_what_is_not_finite_arrives_as_that(dtype):
    def rank(rank, comm):
        member = Member(rank, comm, wire_dtype=dtype)
        member.add()
        if rank:
            member.blocks["0"].sums["A"].kept[0] = float("inf")
        return member.finish(1)[1]

    some, others = together(2, rank)
    for factor, mean in (some | others).items():
        assert bool(mean.isfinite().all()) == (factor != ("0", "A"))


def test_the_owner_alone_where_nothing_travels():
    def rank(rank, comm):
        member = Member(rank, comm, placement=natgrad.Local())
        member.scale = 3.0
        member.add()
        totals, means = member.finish(4)
        assert comm.traffic.calls.keys() == {"agreement"}
        assert set(totals.counts.values()) == {5.0}
        for (block, name), mean in means.items():
            scale = 9 / 4 if name == "G" else 1 / 5
            expected = member.all[block, name][0] * scale
            torch.testing.assert_close(mean, expected, rtol=1e-12, atol=0)
        return means

    some, others = together(2, rank)
    assert some.keys() | others.keys() == {(b, n) for b in "01" for n in "AG"}


def test_discarding_sends_what_other_ranks_wait_for():
    def rank(rank, comm):
        member = Member(rank, comm)
        member.reducer.overlaps = True
        member.add()
        member.complete(*("1", "0")[: 2 - rank])  # rank 1 has sent less
        member.kfac.discard()
        assert member.reducer.in_flight == []
        assert all(block.sums == {} for block in member.blocks.values())
        member.forget()
        member.add(seed=1)
        return member, member.finish(1)[1]

    check(together(2, rank), samples=(1, 1))


@pytest.mark.parametrize("most", [1e-28, 2**-20, 1.0, 3.0, 65504.0, 2.0**40, 1e300])
def test_units_are_powers_of_two_that_use_the_range_of_float16(most):
    unit = _unit(most)
    assert 2.0**14 <= most / unit < 2.0**15
    assert unit == 2.0 ** round(torch.tensor(unit, dtype=torch.float64).log2().item())


@pytest.mark.parametrize("most", [1e-29, 1e-45, 1e-300, 5e-324])
def test_units_are_not_so_small_that_their_inverse_is_infinite(most):
    small = torch.tensor(most, dtype=torch.float32)
    assert (small * (1.0 / _unit(most))).isfinite()
    assert _unit(most) >= 2.0**-110


@pytest.mark.parametrize("most", [0.0, float("inf"), float("nan")])
def test_nothing_and_what_is_no_number_have_no_unit(most):
    assert _unit(most) == 1.0
