"""How what a rank sends, receives and plans grows with the number of ranks: it does not."""

import sys
import tracemalloc
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from natgrad.placement import (
    Cluster,
    CommOpt,
    Gather,
    Hybrid,
    Link,
    MemOpt,
    Reduce,
    ReduceScatter,
    Return,
    Route,
    Share,
    World,
    flows,
    simulate,
    simulator,
)
from natgrad.specs import BlockSpec, FactorSpec, Piece
from unit.placement.networks import chunked, ekfac, linear, mixed, resnet50, tensor_parallel

WORLDS = (2, 3, 4, 8, 16, 60, 64, 256, 1000, 4096, 10_000)


def spread(blocks, size):
    """Blocks of one rank, as all of several hold them."""
    return [
        replace(b, pieces=tuple(replace(p, holders=range(size)) for p in b.pieces)) for b in blocks
    ]


def one_wide_layer(size):
    """The worst ownership there is: one factor is nearly everything."""
    return [linear("wide", 10, 4608, size, bias=False), linear("small", 8, 8, size)]


NETWORKS = {
    "resnet50": lambda size: spread(resnet50(), size),
    "one wide layer": one_wide_layer,
    "rotated": lambda size: [ekfac(f"l{i}", 400, 300 + i, size) for i in range(5)],
}


def fractions(size):
    return [1 / size, *(k / size for k in (size // 4, size // 2) if k and size % k == 0), 1.0]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("size", WORLDS)
def test_the_busiest_rank_moves_no_more_than_twice_the_factors_and_inverses(size, network):
    """Bytes sent or received by one rank, at most 2.5 times what a network has of them packed, at
    any number of ranks; of gradients three times, as short rows of a grid stay direct."""
    for fraction in fractions(size):
        plan = Hybrid(fraction)(NETWORKS[network](size), World(size))
        factors = 4 * sum(spec.on_wire for spec in plan.factors.values())
        inverses = 4 * sum(spec.parts for spec in plan.factors.values())
        gradients = 4 * sum(block.numel + 1 for block in plan.blocks)
        for ops, most in (
            (plan.update, 2.5 * factors),
            (plan.refresh, 2.5 * inverses),
            (plan.apply, 3.0 * gradients),
        ):
            assert plan.flows(ops).busiest <= most, (fraction, plan.routes)


def test_the_documents_say_how_busy_a_rank_is():
    """The table of docs/distributed.md."""
    text = (Path(__file__).parents[3] / "docs" / "distributed.md").read_text(encoding="utf-8")
    table = text[text.index("<!-- busiest -->") : text.index("<!-- /busiest -->")]
    _, header, _, *lines = [line.strip("| ").split("|") for line in table.strip().splitlines()]
    sizes = [int(cell.replace(",", "")) for cell in header[1:]]
    assert sizes[-1] == 10_000
    shown = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    for what, route in product(("update", "refresh"), Route):
        found = []
        for size in sizes:
            strategy = MemOpt() if what == "update" else CommOpt()
            plan = strategy(NETWORKS["resnet50"](size), World(size, route=route))
            specs = plan.factors.values()
            whole = sum(spec.on_wire if what == "update" else spec.parts for spec in specs)
            share = plan.flows(getattr(plan, what)).busiest / (4 * whole)
            found.append(f"{share:.2f}" if share < 10 else f"{share:.0f}")
        assert shown[f"{what}, {route.value}"] == found


@pytest.mark.parametrize("size", WORLDS)
def test_so_for_local_gradients(size):
    plan = ReduceScatter()(one_wide_layer(size), World(size, gradients_are_local=True))
    gradients = 4 * sum(block.numel + 1 for block in plan.blocks)
    assert plan.flows(plan.apply).busiest <= 2 * 2.5 * gradients  # there and back


@pytest.mark.parametrize("layout", [chunked, tensor_parallel])
@pytest.mark.parametrize("size", [2, 8, 64, 1000, 10_000])
def test_so_for_shards(size, layout):
    """Of layers with as many rows as ranks, so that all of these hold something."""
    blocks = [linear(f"l{i}", 20_000 + i, 90, size, layout) for i in range(4)]
    for strategy in (MemOpt(), CommOpt()):
        plan = strategy(blocks, World(size, sharded=True))
        gradients = 4 * sum(block.numel + 1 for block in plan.blocks)
        assert plan.flows(plan.apply).busiest <= 2.5 * gradients


def test_the_direct_route_grows():
    """What the other one is for."""
    busiest = [
        MemOpt()(one_wide_layer(size), World(size, route=Route.DIRECT)) for size in (8, 64, 512)
    ]
    bytes_moved = [plan.flows(plan.update).busiest for plan in busiest]
    assert bytes_moved[1] > 7 * bytes_moved[0] > 49 * bytes_moved[0] / 8
    assert bytes_moved[2] > 7 * bytes_moved[1]


def test_small_and_even_worlds_stay_direct():
    """Two collectives in the place of one must gain something."""
    plan = MemOpt()(mixed(2), World(2))
    assert plan.routes.balanced == ()
    assert MemOpt()(one_wide_layer(64), World(64)).routes.balanced == ("factors", "results")


@pytest.mark.parametrize("size", [16, 64, 256, 1000, 10_000])
def test_resnet50_is_updated_in_a_fraction_of_a_second(size):
    """On the default cluster, 100 Gbit/s: 0.26 s on 16 and 171 s on 10,000 ranks by all-to-alls."""
    blocks = NETWORKS["resnet50"](size)
    for strategy in (MemOpt(), CommOpt()):
        times = simulate(strategy(blocks, World(size)), Cluster())
        assert max(times.update) < 0.1
        assert max(times.refresh) < 0.5


def llama(layers, width, hidden, words, keys):
    """Blocks of a network with 70 billion parameters, on one rank."""

    def linear(name, rows, cols):
        factors = tuple(
            (key, FactorSpec(dim, 1, dim * (dim + 1) // 2, parts=dim * (dim + 1)))
            for key, dim in (("A", cols), ("G", rows))
        )
        piece = Piece(0, ((0, rows), (0, cols)), (0,))
        return BlockSpec(name, "Linear", (1, rows, cols), factors, ("A", "G"), (piece,))

    blocks = []
    for i in range(layers):
        shapes = {
            "q": (width, width),
            "k": (keys, width),
            "v": (keys, width),
            "o": (width, width),
            "gate": (hidden, width),
            "up": (hidden, width),
            "down": (width, hidden),
        }
        blocks += [linear(f"{i}.{name}", *shape) for name, shape in shapes.items()]
    return blocks


def over(blocks, size):
    """FSDP over all ranks."""
    found = []
    for b in blocks:
        (piece,) = b.pieces
        rows = piece.box[0][1]
        chunk = -(-rows // size)
        part = replace(piece, holders=range(-(-rows // chunk)), chunk=chunk)
        found.append(replace(b, pieces=(part,)))
    return found


def test_the_collectives_of_a_plan_are_counted_once(monkeypatch):
    """For seconds, bytes and memory alike: of thousands of buckets that is nearly all the work."""
    counted = []
    count = flows.collectives_of

    def watched(plan, ops, *others, **named):
        counted.append((tuple(ops), others, named))
        return count(plan, ops, *others, **named)

    plan = Hybrid(1 / 4)(over(llama(1, 64, 96, 128, 32), 8), World(8, sharded=True))
    for module in (flows, simulator):
        monkeypatch.setattr(module, "collectives_of", watched)
    simulate(plan, Cluster())
    chosen = plan.renamed("another name")
    for one in (plan, chosen):
        assert one.most_memory > 0
        assert one.sent(0).factors > 0
        assert one.by_rank().rows
    kinds = [{type(op) for op in ops} for ops, *_ in counted]
    assert kinds == [{Reduce}, {Share}, {Gather}, {Return}]
    assert "_calls" not in plan.__dict__  # which would be large


def test_what_was_counted_to_choose_a_route_is_not_counted_again(monkeypatch):
    plan = MemOpt()(one_wide_layer(64), World(64))
    assert plan.routes.balanced == ("factors", "results")
    counted = []
    count = flows.collectives_of

    def watched(plan, ops, *others, **named):
        counted.extend(type(op) for op in ops)
        return count(plan, ops, *others, **named)

    monkeypatch.setattr(flows, "collectives_of", watched)
    times = simulate(plan, Cluster())
    assert not {Reduce, Return} & {*counted}
    anew = replace(plan)  # knows nothing
    assert simulate(anew, Cluster()) == times
    assert {Reduce, Return} <= {*counted}
    assert [anew.memory(rank) for rank in (0, 1, 63)] == [plan.memory(r) for r in (0, 1, 63)]


@pytest.mark.parametrize("fraction", [1.0, 1 / 2, 1 / 8])
def test_equal_layers_on_the_same_ranks_are_counted_once(monkeypatch, fraction):
    """The work does not grow with the layers, but with the kinds of them and the columns of a grid;
    and nothing is another number for it."""
    world = World(8, sharded=True, bucket_bytes=1)  # every op a bucket of its own
    cluster = Cluster(node=4, inside=Link(1e-6, 3e10))
    counted = []
    count = flows._Count.direct

    def watched(self, op):
        counted.append(type(op))
        count(self, op)

    def planned(layers):
        counted.clear()
        return Hybrid(fraction)(over(llama(layers, 64, 96, 128, 32), 8), world)

    def numbers(plan):
        ranks = range(8)
        return simulate(plan, cluster), [(plan.memory(r), plan.sent(r)) for r in ranks]

    monkeypatch.setattr(flows._Count, "direct", watched)
    plan = planned(12)
    once = numbers(plan)
    kinds, columns = 4, round(1 / fraction)
    assert counted.count(Gather) == kinds * columns
    assert counted.count(Return) == kinds * columns * (columns > 1)
    assert len([op for op in plan.apply if isinstance(op, Gather)]) == 7 * 12
    monkeypatch.setattr(flows, "_likeness", lambda plan, op: object())
    assert numbers(planned(12)) == once
    assert counted.count(Gather) == 7 * 12


def test_pricing_a_plan_takes_few_calls_of_an_op():
    """Counted, as seconds depend on the computer. Before equal ones were priced once there were
    some 200, half of them of numpy on arrays of all ranks."""
    world = World(1000, sharded=True)
    blocks = over(llama(40, 8192, 28672, 128256, 1024), 1000)
    plan = CommOpt()(blocks, world)
    calls = 0

    def profile(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        simulate(plan, Cluster(node=8, inside=Link(1e-6, 3e11)))
    finally:
        sys.setprofile(None)
    ops = len(plan.update) + len(plan.refresh) + len(plan.apply)
    assert calls < 100 * ops


@pytest.mark.slow
def test_seventy_billion_parameters_on_ten_thousand_ranks_are_planned_in_little_memory():
    blocks = over(llama(80, 8192, 28672, 128256, 1024), 10_000)
    assert sum(b.numel for b in blocks) > 65e9
    tracemalloc.start()
    plan = Hybrid(1 / 250)(blocks, World(10_000, sharded=True))
    times = simulate(plan, Cluster())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6
    assert len(plan.update) == 2 * len(blocks)
    assert max(times.update) < 3600
