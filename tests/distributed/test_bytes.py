"""Every byte that a rank sends and every number that it keeps is in the plan."""

import sys
import warnings
from collections import defaultdict
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import natgrad
from distributed.training import NETWORKS, Run, backward, network, wrapped
from natgrad.comm import float21
from natgrad.placement import Return, Route, World
from natgrad.tables import bytes_text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.networks import resnet32

STRATEGIES = {
    "mem": natgrad.MemOpt(),
    "half": natgrad.Hybrid(0.5),
    "comm": natgrad.CommOpt(),
    "scatter": natgrad.ReduceScatter(),
    "local": natgrad.Local(),
    "auto": natgrad.Auto(),
}
LAYOUTS = ["plain", "ddp", "fsdp"]
RANKS = [2, 3, 4]
SPARED = {"mlp": "2", "cnn": "conv2", "lm": "down"}  # a layer of each network
STALE, ALL = 1, 2  # what happens in the steps: all at once at every second one


def measure(name, layout, choices):
    """Three steps with each of ``choices``: what a rank sent in each, and what its plan says."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = (2,) * ranks if ranks > 4 else ()  # there are 16 samples
    return [_measured(Run(name, layout, kfac, batches=each), rank, ranks) for kfac in choices]


def _measured(run, rank, ranks):
    model = wrapped(network(run.network), run.layout)
    kfac, optimizer = run.make(model)
    sent, calls = [], []
    for step in range(3):
        optimizer.zero_grad()
        before = kfac.comm.traffic.snapshot()
        backward(run, model, step, rank, ranks)
        kfac.step()
        optimizer.step()
        one = kfac.comm.traffic - before
        sent.append(one.sent)
        calls.append(one.calls)
    plan, memory = kfac.plan, kfac.memory().total
    others = sum(p.numel() for p in kfac.gradients.parameters) - sum(b.numel for b in plan.blocks)
    return {
        "sent": sent,
        "calls": calls,
        "plan": plan,
        "planned": plan.sent(rank, others),
        "kept": (memory.get("factors", 0), memory.get("inverses", 0)),
        "table": kfac.traffic(),
    }


def exact(sent, ranks):
    """A sum over W ranks sends W-ths of bytes: in these, all numbers are whole ones."""
    return {purpose: round(n * ranks) for purpose, n in sent.items() if n}


def planned(sent, *clocks):
    """By purpose, in a step in which these ``clocks`` are due."""
    found = {"gradients": sent.gradients}
    found["agreement"] = sum(getattr(sent.agreement, clock) for clock in clocks)
    if "update" in clocks:
        found["factors"] = sent.factors
    if "refresh" in clocks:
        found["inverses"] = sent.inverses
    return found


def all_choices(ranks, name):
    choices = {}
    for key, strategy in STRATEGIES.items():
        if key != "half" or ranks != 3:
            choices[key] = {"placement": strategy}
    for key in ("mem", "half", "comm", "local"):
        if key in choices:
            choices[f"{key}, EKFAC"] = {**choices[key], "structure": natgrad.EKFAC()}
    for key in ("mem", "half", "comm", "scatter", "mem, EKFAC", "comm, EKFAC"):
        if key in choices:
            choices[f"{key}, balanced"] = {**choices[key], "route": Route.BALANCED}
    small = {"route": Route.BALANCED, "bucket_bytes": 100, "wire_dtype": torch.bfloat16}
    choices["small buckets of bfloat16, balanced"] = small
    short = dict.fromkeys(("wire_dtype", "inverse_dtype", "gradient_dtype"), torch.bfloat16)
    for key in ("mem", "comm", "scatter"):
        for route in Route:
            choices[f"{key}, {route.value}, short"] = {**choices[key], **short, "route": route}
    short = dict.fromkeys(("wire_dtype", "inverse_dtype", "gradient_dtype"), float21)
    for key in ("mem", "comm", "scatter"):
        for route in Route:
            choices[f"{key}, {route.value}, 21 bits"] = {**choices[key], **short, "route": route}
    choices["not all layers"] = {"exclude": SPARED[name]}
    choices["Cholesky"] = {"inverse": natgrad.Cholesky(), "placement": natgrad.MemOpt()}
    choices["float16"] = {"wire_dtype": torch.float16}
    choices["unpacked"] = {"packed": False, "bucket_bytes": 100}
    return choices


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_sends_and_keeps_what_the_plan_says(world, in_pairs, layout, name):
    """Each two of what is chosen, a number of ranks, a layout and a network."""

    def left_out(key, ranks, *_):
        return key not in all_choices(ranks, "mlp")  # half of three ranks is none of them

    by_ranks = defaultdict(dict)
    for key, ranks, *where in in_pairs(
        all_choices(2, "mlp"), RANKS, LAYOUTS, NETWORKS, unless=left_out
    ):
        if where == [layout, name]:
            by_ranks[ranks][key] = all_choices(ranks, name)[key]
    assert by_ranks
    for ranks, choices in by_ranks.items():
        results = world.run(measure, name, layout, list(choices.values()), ranks=ranks)
        for rank, found in enumerate(results):
            for key, one in zip(choices, found, strict=True):
                for step, clocks in ((ALL, ("update", "refresh", "apply")), (STALE, ("apply",))):
                    expected = exact(planned(one["planned"], *clocks), ranks)
                    assert exact(one["sent"][step], ranks) == expected, (key, rank, step)
                assert one["kept"] == astuple(one["plan"].memory(rank))[:2], (key, rank)


WORLDS_OF_EIGHT = [("ddp", "lm"), ("plain", "cnn"), ("fsdp", "mlp")]


@pytest.mark.parametrize("which", WORLDS_OF_EIGHT, ids="-".join)
def test_so_do_eight_ranks(world, in_pairs, which):
    """Bytes that a rank receives are its share of what all others send, so both are compared. Each
    two of a world, a placement and a route."""
    strategies = (natgrad.MemOpt(), natgrad.Hybrid(0.25), natgrad.CommOpt())
    layout, name = which
    choices = [
        {"placement": strategy, "route": route}
        for where, strategy, route in in_pairs(WORLDS_OF_EIGHT, strategies, Route)
        if where == which
    ]
    results = world.run(measure, name, layout, choices, ranks=8)
    for index in range(len(choices)):
        plan = results[0][index]["plan"]
        for step, clocks in ((ALL, ("update", "refresh", "apply")), (STALE, ("apply",))):
            for rank, found in enumerate(results):
                one = found[index]
                expected = exact(planned(one["planned"], *clocks), 8)
                assert exact(one["sent"][step], 8) == expected, (choices[index], rank, step)
            for ops in (plan.update, plan.refresh, plan.apply):
                flows = plan.flows(ops)
                assert flows.sent.sum() == flows.received.sum()


def in_nodes(name, choices):
    """Ranks in nodes of two, by a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    return measure(name, "ddp", [{**choice, "group": mesh} for choice in choices])


def test_two_levels_send_what_one_does(world):
    choices = [
        {"placement": strategy, "route": Route.BALANCED}
        for strategy in (natgrad.MemOpt(), natgrad.CommOpt())
    ]
    flat = world.run(measure, "cnn", "ddp", choices, ranks=4)
    nodes = world.run(in_nodes, "cnn", choices, ranks=4)
    for one, other in zip(flat, nodes, strict=True):
        for before, after in zip(one, other, strict=True):
            assert before["sent"] == after["sent"]
            assert before["plan"] == after["plan"]


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
def test_a_rank_by_itself_sends_nothing(world, layout):
    choices = [{"placement": strategy} for strategy in STRATEGIES.values()]
    choices.append({"structure": natgrad.EKFAC()})
    (found,) = world.run(measure, "cnn", layout, choices, ranks=1)
    for one in found:
        assert one["calls"] == [{}, {}, {}]
        assert exact(planned(one["planned"], "update", "refresh", "apply"), 1) == {}
        assert one["kept"] == astuple(one["plan"].memory(0))[:2]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_happens_between_refreshes_if_all_ranks_have_all(world, ranks, name):
    """Not even an empty message: DDP has added up the gradients, and CommOpt left no more to do."""
    choice = {"placement": natgrad.CommOpt()}
    for (one,) in world.run(measure, name, "ddp", [choice], ranks=ranks):
        assert one["calls"][STALE] == {}
        assert one["calls"][ALL].keys() == {"factors", "inverses", "agreement"}


def test_a_step_has_few_collectives(world):
    """On two ranks each kind of step makes these calls and no others: a small sum more would not be
    seen in bytes, but every one is waited for."""
    stale, update = {"update_every": 2}, {"update_every": 1}
    choices = [
        {"placement": placement, **often}
        for placement in (natgrad.MemOpt(), natgrad.Local())
        for often in (stale, update)
    ]
    for found in _two(world, "mlp", *choices):
        for sends, of_one in (({"factors": 1}, found[:2]), ({}, found[2:])):
            applied = {"gradients": 1, "agreement": 1}  # whose gradients are there
            updated = {**sends, "gradients": 1, "agreement": 3}  # counts; which sums are finite
            both = {**updated, "agreement": 4}  # which decompositions failed
            without_update, with_update = (one["calls"] for one in of_one)
            assert without_update == [both, applied, both]
            assert with_update == [both, updated, both]


def test_only_what_is_updated_travels(world):
    choice = {"update_every": {"A": 1, "G": 2}, "placement": natgrad.MemOpt()}
    for rank, (one,) in enumerate(world.run(measure, "lm", "ddp", [choice], ranks=2)):
        plan = one["plan"]
        inputs = [op for op in plan.update if op.factor[1] in ("A", "At")]
        assert 0 < len(inputs) < len(plan.update)
        assert one["sent"][STALE]["factors"] == plan.flows(inputs).sent[rank]
        assert plan.flows(inputs).sent.max() > 0
        assert one["sent"][ALL]["factors"] == one["planned"].factors


@pytest.mark.parametrize("ranks", [2, 3])
def test_owners_alone_halve_an_all_reduce(world, ranks):
    """Factors and gradients to one rank each, results back to all (Osawa 2019, sec. 3.3)."""
    choice = {"placement": natgrad.ReduceScatter()}
    results = world.run(measure, "mlp", "plain", [choice], ranks=ranks)
    plan = results[0][0]["plan"]
    factors = 8 * sum(spec.on_wire for spec in plan.factors.values())
    gradients = 8 * sum(block.numel for block in plan.blocks)
    clips = 8 * len(plan.blocks)
    back = (ranks - 1) * (gradients + clips)
    assert back == sum(plan.flows(op for op in plan.apply if isinstance(op, Return)).sent)
    sent = [one["sent"][ALL] for (one,) in results]
    total = sum(each["factors"] + each["gradients"] for each in sent)
    all_reduce = 2 * (ranks - 1) * (factors + gradients)
    assert total - back == all_reduce / 2


def test_linear_factors_are_triangles(world):
    """Of N x N numbers, N (N + 1) / 2 are sent, to the other rank (Osawa 2019, sec. 3.4)."""
    choice = {"include": "0", "placement": natgrad.MemOpt()}
    sent = [one["sent"][ALL]["factors"] for (one,) in _two(world, "mlp", choice)]
    assert sorted(sent) == [0, 8 * (6 * 7 // 2 + 7 * 8 // 2)]  # 5 inputs and a bias, 7 outputs


def test_inputs_of_convolutions_are_their_distinct_blocks(world):
    """Of a 3 x 3 kernel 29 blocks C x C and the bias row, not the triangle of 9 C + 1."""
    choice = {"include": "conv1", "placement": natgrad.MemOpt()}
    sent = [one["sent"][ALL]["factors"] for (one,) in _two(world, "cnn", choice)]
    channels, outputs = 2, 4
    inputs = 29 * channels**2 + 9 * channels + 1
    assert inputs < (9 * channels + 1) * (9 * channels + 2) // 2
    assert sorted(sent) == [0, 8 * (inputs + outputs * (outputs + 1) // 2)]


def _two(world, name, *choices):
    return world.run(measure, name, "ddp", list(choices), ranks=2)


def test_sixteen_bits_halve_the_bytes_of_factors(world):
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    choices = [{"wire_dtype": dtype} for dtype in dtypes]
    for found in world.run(measure, "cnn", "ddp", choices, ranks=2):
        full, single, *halves = (one["sent"][ALL].get("factors", 0) for one in found)
        assert full == 2 * single
        assert halves == [single / 2] * 2
        assert len({one["sent"][ALL]["inverses"] for one in found}) == 1  # which are not statistics


def test_21_bits_are_two_thirds_of_the_bytes(world):
    """And at most a word more for every message, of which there is one a factor and rank."""
    choices = [{"wire_dtype": dtype} for dtype in (torch.float32, float21)]
    for found in world.run(measure, "cnn", "ddp", choices, ranks=2):
        single, short = (one["sent"][ALL].get("factors", 0) for one in found)
        factors = len(found[0]["plan"].factors)
        assert 2 / 3 * single <= short <= 2 / 3 * single + 8 * factors


@pytest.mark.parametrize(("dtype_bytes", "most"), [(2, 0.2), (4, 0.4)])
def test_resnet_32_against_an_all_reduce_of_dense_factors(dtype_bytes, most):
    """From its shapes alone, on 8 ranks: packed factors to one owner each."""
    ranks = tuple(range(8))
    kfac = natgrad.KFAC(resnet32(), kl_clip=None)
    blocks = [
        replace(block, pieces=tuple(replace(piece, holders=ranks) for piece in block.pieces))
        for block in kfac.plan.blocks
    ]
    plan = natgrad.MemOpt()(blocks, World(8, factor_bytes=dtype_bytes, route=Route.DIRECT))
    sent = sum(plan.sent(rank).factors for rank in range(8))
    numbers = sum(
        spec.batch * (spec.dim if spec.diagonal else spec.dim**2) for spec in plan.factors.values()
    )
    dense = 2 * 7 * 4 * numbers
    assert len(plan.factors) > 60
    assert 0.05 < sent / dense <= most


@pytest.mark.parametrize("name", NETWORKS)
def test_memory_falls_with_the_fraction(world, name):
    """A block's inverses are at ``fraction`` of the ranks, so their mean over the ranks is that
    share of all; running averages are at one rank whatever the fraction, or at more where ranks
    would idle. So the mean of all falls."""
    fractions = (1.0, 0.5, 0.25)
    choices = [{"placement": natgrad.Hybrid(fraction)} for fraction in fractions]
    results = world.run(measure, name, "ddp", choices, ranks=4)
    kept = [[found[index]["kept"] for found in results] for index in range(3)]
    inverses = [sum(both[1] for both in each) / 4 for each in kept]
    assert inverses == [inverses[0] * fraction for fraction in fractions]
    means = [sum(map(sum, each)) / 4 for each in kept]
    assert means[0] > means[1] > means[2]


def test_traffic_is_a_table(world):
    choice = {"placement": natgrad.MemOpt()}
    for rank, (one,) in enumerate(world.run(measure, "mlp", "fsdp", [choice], ranks=2)):
        table = one["table"]
        assert set(table.sent) == {"factors", "agreement", "gradients"}
        for key, by_step in (("sent", one["sent"]), ("calls", one["calls"])):
            for purpose, total in getattr(table, key).items():
                assert total == sum(step.get(purpose, 0) for step in by_step)
        for purpose, sent, calls, a_step in table.rows:
            assert sent == bytes_text(table.sent[purpose])
            assert calls == str(table.calls[purpose])
            assert a_step == bytes_text(table.sent[purpose] / 3)
        total = bytes_text(sum(table.sent.values()))
        assert table.footer == f"{total} sent by rank {rank} of 2 in 3 steps"
        assert table.footer in table.plain()


def test_one_process_has_no_traffic():
    table = natgrad.KFAC(network("mlp"), kl_clip=None).traffic()
    assert table.rows == ()
    assert table.footer == "0 B sent by rank 0 of 1 in 0 steps"
