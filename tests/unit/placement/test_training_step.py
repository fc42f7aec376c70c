"""Lanes of a training step by hand, and what they must do when something changes."""

from dataclasses import replace
from itertools import pairwise

import pytest

from natgrad.errors import SettingError
from natgrad.placement import (
    CLUSTERS,
    Arrival,
    Cluster,
    CommOpt,
    Hybrid,
    Kind,
    MemOpt,
    ReduceScatter,
    StepModel,
    Workload,
    World,
    largest_batch,
    rank_memory,
    simulate,
)
from unit.placement.networks import chunked, linear, mlp, replicated, resnet50

# A link that takes a second for a byte after a latency that does not count, and 1 flop/s.
UNIT = Cluster(flops=1.0, bandwidth=1.0, latency=1e-9, overhead=1e-9)
STRATEGIES = (MemOpt(), Hybrid(0.5), CommOpt(), ReduceScatter())


def modelled(plan, workload, cluster=UNIT):
    return StepModel(plan, simulate(plan, cluster), workload, cluster)


def one_layer(size, **world):
    """3 x 3 without bias: 36 bytes of weights, 48 of two triangles, 96 of two decompositions."""
    return [linear("one", 3, 3, size, bias=False)], World(size, **world)


def lane(step, name):
    return [
        (span.stage, round(span.begin, 3), round(span.end, 3))
        for span in step.spans
        if span.lane == name
    ]


class TestByHand:
    workload = Workload(9, 100, 200, 50, 8, batch=2, arrivals=(Arrival(9, 0.75, "one"),))

    def test_one_rank_sends_nothing(self):
        model = modelled(MemOpt()(*one_layer(1)), self.workload)
        step = model.step(Kind.REFRESH)
        work = model.plan.work(0)
        ends = [200, 200 + 400 + 100, 700 + work.decompose]
        assert lane(step, "compute") == [
            ("forward", 0, ends[0]),
            ("backward", ends[0], ends[1]),
            ("decompose", ends[1], ends[2]),
            ("precondition", ends[2], ends[2] + work.precondition),
        ]
        assert lane(step, "communication") == []
        assert step.exposed == pytest.approx(0)

    def test_gradients_leave_during_the_backward_pass(self):
        """All 9 numbers are there after 3/4 of it, and an all-reduce of 36 bytes sends 36."""
        step = modelled(CommOpt()(*one_layer(2)), self.workload).step(Kind.WITHOUT)
        assert lane(step, "communication") == [("gradients", 500, 536)]
        assert step.seconds == pytest.approx(600)
        assert step.exposed == pytest.approx(0, abs=1e-6)

    def test_what_is_late_is_waited_for(self):
        late = replace(self.workload, arrivals=(Arrival(9, 1.0, "one"),))
        step = modelled(CommOpt()(*one_layer(2)), late).step(Kind.WITHOUT)
        assert lane(step, "communication") == [("gradients", 600, 636)]
        assert step.exposed == pytest.approx(36, rel=1e-6)

    def test_factors_share_the_link_with_gradients(self):
        """A at rank 0 and G at rank 1: each sends the other one triangle, 24 bytes."""
        step = modelled(CommOpt()(*one_layer(2)), self.workload).step(Kind.UPDATE)
        sent = lane(step, "communication")
        ready = 200 + 0.75 * 500
        assert sent == [("factors", ready, ready + 24), ("gradients", ready + 24, ready + 60)]

    def test_an_owner_gives_back(self):
        model = modelled(MemOpt()(*one_layer(2)), self.workload)
        step = model.step(Kind.STALE)
        products = model.plan.work(0).precondition
        begin = 600 + products
        assert lane(step, "communication")[-1] == ("give back", begin, begin + 40)
        assert step.seconds == pytest.approx(begin + 40)

    def test_local_gradients_are_summed_by_kfac_alone(self):
        plan = CommOpt()(*one_layer(2, gradients_are_local=True))
        workload = replace(self.workload, parameters=11)  # two have no block
        step = modelled(plan, workload).step(Kind.STALE)
        assert lane(step, "communication") == [("gradients", 600, 644)]

    def test_shards_are_gathered_twice(self):
        blocks = [linear("one", 3, 3, 2, chunked, bias=False)]
        plan = MemOpt()(blocks, World(2, sharded=True))
        step = modelled(plan, self.workload).step(Kind.WITHOUT)
        assert lane(step, "communication") == [
            ("weights", 0, 18),
            ("weights", 18, 36),  # ahead
            ("gradients", 618, 636),
        ]
        assert lane(step, "compute") == [("forward", 18, 218), ("backward", 218, 618)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("layout", [replicated, chunked])
class TestEveryPlacement:
    workload = Workload(4000, 1e6, 2e6, 1e6, 1000, batch=4)

    def model(self, strategy, layout, cluster=None, **changes):
        blocks, world = mlp(4, layout), World(4, sharded=layout is chunked)
        cluster = cluster or Cluster(1e9, 1e7, 1e-5)
        workload = replace(self.workload, **changes)
        return modelled(strategy(blocks, world), workload, cluster)

    def test_kinds_of_steps_do_more_and_more(self, strategy, layout):
        model = self.model(strategy, layout)
        seconds = [model.step(kind).seconds for kind in Kind]
        assert seconds == sorted(seconds)
        assert len(set(seconds)) == 4

    def test_lanes_do_one_thing_at_a_time(self, strategy, layout):
        for kind in Kind:
            step = self.model(strategy, layout).step(kind)
            for name in ("compute", "communication"):
                spans = [span for span in step.spans if span.lane == name]
                for before, after in pairwise(spans):
                    assert after.begin >= before.end - 1e-12

    def test_kfac_s_own_stages_are_those_of_the_simulator(self, strategy, layout):
        model = self.model(strategy, layout)
        stages = model.step(Kind.REFRESH).stages()
        times = model.times
        own = stages.get("decompose", 0) + stages.get("share", 0)
        assert own == pytest.approx(max(times.refresh))
        own = sum(stages.get(name, 0) for name in ("gather", "precondition", "give back"))
        assert own == pytest.approx(max(times.apply))
        assert stages["factors"] == pytest.approx(max(times.update))

    def test_the_average_is_that_of_a_cycle(self, strategy, layout):
        model = self.model(strategy, layout)
        stale, update, both = (
            model.step(kind).seconds for kind in (Kind.STALE, Kind.UPDATE, Kind.REFRESH)
        )
        cycle = [both if i == 0 else update if i % 5 == 0 else stale for i in range(20)]
        assert model.average(5, 20) == pytest.approx(sum(cycle) / 20)

    def test_staggered_steps_are_shorter_at_most_and_longer_on_average(self, strategy, layout):
        model = self.model(strategy, layout)
        average, longest = model.staggered(10, 100)
        assert longest < model.step(Kind.REFRESH).seconds
        assert average > model.average(10, 100) - 1e-12
        together = model.staggered(1, 1)[1]  # all at every step
        assert together == pytest.approx(model.step(Kind.REFRESH).seconds)

    def test_a_wider_link_hides_more(self, strategy, layout):
        slow = self.model(strategy, layout).step(Kind.UPDATE)
        fast = self.model(strategy, layout, Cluster(1e9, 1e9, 1e-6)).step(Kind.UPDATE)
        assert fast.exposed < slow.exposed

    def test_memory_grows_with_the_batch_by_activations_alone(self, strategy, layout):
        one, many = (rank_memory(self.model(strategy, layout, batch=b)) for b in (1001, 1011))
        assert many.total - one.total == 10 * 1000
        plan = self.model(strategy, layout).plan
        assert one.kfac == many.kfac == plan.fullest(4000 - sum(b.numel for b in plan.blocks))
        shards = 4 if layout is chunked else 1
        assert many.weights == many.gradients == many.optimizer == 4000 * 4 / shards

    def test_the_largest_batch_fits_and_one_more_does_not(self, strategy, layout):
        cluster = Cluster(1e9, 1e7, 1e-5, capacity=1e6)
        most = largest_batch(self.model(strategy, layout, cluster))
        fits, fails = (
            rank_memory(self.model(strategy, layout, cluster, batch=b)).total
            for b in (most, most + 1)
        )
        assert fits <= 1e6 < fails


def test_after_a_backward_pass_activations_are_gone():
    workload = Workload(9, 1, 1, 1, 1, parameter_bytes=1)
    model = modelled(MemOpt()([linear("one", 3, 3, 1, bias=False)], World(1)), workload)
    memory = rank_memory(model)
    assert memory.activations == 1
    assert memory.total == 9 + 9 + memory.optimizer + memory.kfac.kept + memory.kfac.workspace
    assert memory.kfac.workspace > 1 + memory.kfac.sums
    assert sum(memory.kinds().values()) > memory.total

    # Where that is the busiest moment, it decides whether one sample fits.
    for capacity, fits in ((memory.total, True), (memory.total - 1, False)):
        limited = replace(UNIT, capacity=float(capacity))
        own = modelled(MemOpt()([linear("one", 3, 3, 1, bias=False)], World(1)), workload, limited)
        if fits:
            assert largest_batch(own) > 1
        else:
            with pytest.raises(SettingError, match=r" for one sample, 1 B more: use more ranks"):
                largest_batch(own)


def test_a_direct_sum_needs_a_copy_of_every_rank():
    plan = MemOpt()([linear("one", 3, 3, 8, bias=False)], World(8))
    routes = (
        plan.routed(type(plan.routes.factors).DIRECT),
        plan.routed(type(plan.routes.factors).BALANCED),
    )
    direct, balanced = (plan.memory(0) for plan in routes)
    assert direct.sums == balanced.sums == 48
    # Seven copies, its own, and their sum; of even slices what is sent, what comes, and an eighth.
    assert direct.sums + direct.update == 7 * 48 + 48 + 48
    assert balanced.sums + balanced.update == 2 * 64 + 8


def test_gradients_that_come_evenly():
    even = Workload(20_000_000, 1.0, 2.0, 1.0, 1.0)
    model = modelled(MemOpt()(mlp(2), World(2)), even)
    assert [arrival.share for arrival in model.arrivals] == [0.25, 0.5, 0.75, 1.0]
    assert sum(size for _, size in model.units) == 80_000_000


class TestErrors:
    def test_no_capacity(self):
        model = modelled(MemOpt()(*one_layer(1)), TestByHand.workload)
        with pytest.raises(SettingError, match=r"Cluster.capacity is None but the largest batch"):
            largest_batch(model)

    def test_no_activations(self):
        free = replace(TestByHand.workload, activations=0)
        model = modelled(MemOpt()(*one_layer(1)), free, replace(UNIT, capacity=1e6))
        with pytest.raises(SettingError, match=r"Workload.activations is 0 but a batch is limited"):
            largest_batch(model)

    def test_nothing_fits(self):
        model = modelled(MemOpt()(*one_layer(1)), TestByHand.workload, replace(UNIT, capacity=99))
        with pytest.raises(SettingError, match=r"A rank has 99 B but needs .* use more ranks"):
            largest_batch(model)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("parameters", 0, "Workload.parameters is 0 but must be a whole number of at least 1"),
            ("batch", 0.5, "Workload.batch is 0.5 but must be a whole number"),
            ("forward", -1, "Workload.forward is -1 but must be finite and at least 0"),
        ],
    )
    def test_a_workload(self, field, value, message):
        with pytest.raises(SettingError, match=message):
            replace(TestByHand.workload, **{field: value})

    def test_an_arrival(self):
        with pytest.raises(SettingError, match=r"Arrival.share is 1.5 but must be in \[0, 1\]"):
            Arrival(1, 1.5)

    def test_more_ranks_than_a_cluster_has(self):
        CLUSTERS["v100-112x4"].check_ranks(448)
        with pytest.raises(
            SettingError,
            match="449 ranks are asked for but cluster 'v100-112x4' has 112 nodes of 4: ask for at "
            "most 448, or describe a larger one by its numbers",
        ):
            CLUSTERS["v100-112x4"].check_ranks(449)
        CLUSTERS["default"].check_ranks(10**6)

    def test_a_share_of_the_speed(self):
        with pytest.raises(SettingError, match=r"Cluster.decomposing is 2 but must be in"):
            Cluster(decomposing=2)


def test_decompositions_have_a_speed_of_their_own():
    plan = MemOpt()(resnet50(2), World(2))
    fast, slow = (simulate(plan, Cluster(decomposing=share)) for share in (1.0, 0.1))
    assert max(slow.refresh) == pytest.approx(10 * max(fast.refresh))
    assert slow.apply == fast.apply


@pytest.mark.parametrize("name", CLUSTERS)
def test_sustained_speeds_are_below_the_peaks(name):
    cluster = CLUSTERS[name]
    assert cluster.name == name
    if cluster.inside is not None:
        assert cluster.inside.latency < cluster.latency
        peak = {4: 15.7e12, 8: 989e12}[cluster.node]
        assert 0.05 * peak < cluster.flops < peak
        assert cluster.bandwidth < cluster.node * 50e9


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("layout", [replicated, chunked])
def test_bytes_are_the_same_whoever_counts_them(strategy, layout):
    world = World(4, sharded=layout is chunked, bucket_bytes=2000)
    fresh, priced = (strategy(mlp(4, layout), world) for _ in range(2))
    simulate(priced, Cluster())
    assert [priced.sent(rank) for rank in range(4)] == [fresh.sent(rank) for rank in range(4)]
