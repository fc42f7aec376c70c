"""Whatever makes up a step, its ranks together do what one process does with all of the data."""

import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import natgrad
from distributed.training import EACH, Run, batch, network, weights, wrapped

LAYOUTS = ("plain", "ddp", "fsdp")
NAMES = ("mlp", "cnn", "lm")
REDUCTIONS = ("mean", "sum")


def trained(run, sizes, rank, way=""):
    """``sizes``: samples of each rank; one size is one process. Returns K-FAC and the model.

    ``way``: "every pass syncs" leaves out no_sync, "observe" shows outputs, "adapt" adapts."""
    alone = len(sizes) == 1
    layout = "plain" if alone else run.layout
    model = wrapped(network(run.network), layout)
    kfac, optimizer = run.make(model)
    for step in range(run.steps):
        x, y = (t.split(sizes)[rank] for t in batch(run.network, step, sum(sizes)))
        optimizer.zero_grad()
        parts = 1 if alone else run.micro
        for index, (one, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            sync(model, layout, way == "every pass syncs" or index == parts - 1)
            out = model(one)
            if way == "observe":
                kfac.observe(out)
            loss = F.cross_entropy(out, target, reduction=run.reduction)
            (loss / parts if run.reduction == "mean" else loss).backward()
        kfac.step()
        optimizer.step()
        if way == "adapt":
            with torch.no_grad():
                after = F.cross_entropy(model(x), y, reduction=run.reduction)
            kfac.adapt(loss.detach(), after)
    return kfac, model


def sync(model, layout, wanted):
    if layout == "fsdp":
        model.set_requires_gradient_sync(wanted)
    elif layout == "ddp":
        model.require_backward_grad_sync = wanted


def on_ranks(runs, way):
    """The weights after each of ``runs``, and the dampings."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for run in runs:
        kfac, model = trained(run, run.batches or (EACH,) * ranks, rank, way)
        found.append((weights(model), kfac.settings.adapted))
    return found


def check(world, runs, ranks, way="", batches=()):
    """Each of ``runs`` gives the same on all ranks as one process has with all of their data."""
    samples = sum(batches) or EACH * ranks
    expected = []
    for run in runs:
        kfac, model = trained(run, (samples,), 0, way)
        expected.append((weights(model), kfac.settings.adapted))
    for found in world.run(on_ranks, runs, way, ranks=ranks):
        for (own, damping), (theirs, one), run in zip(found, expected, runs, strict=True):
            for name, weight in theirs.items():
                error = (own[name] - weight).abs().max() / weight.abs().max()
                assert error <= 1e-10, f"{run}, {name}: {error:.1e}"
            assert damping == pytest.approx(one, rel=1e-10)
            if way == "adapt":
                assert damping != run.kfac["damping"].start


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_losses(world, layout):
    check(world, [Run(name, layout, reduction="sum") for name in ("mlp", "cnn", "lm")], 3)


def reduction_of(name, turn):
    """Of three networks in three turns, layouts or placements, one in two has a sum."""
    return REDUCTIONS[(NAMES.index(name) + turn) % 2]


def test_every_network_and_every_turn_meets_both_reductions():
    met = {(turn, name, reduction_of(name, turn)) for turn in range(3) for name in NAMES}
    assert {(turn, reduction) for turn, _, reduction in met} == set(product(range(3), REDUCTIONS))
    assert {(name, reduction) for _, name, reduction in met} == set(product(NAMES, REDUCTIONS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulation(world, layout):
    turn = LAYOUTS.index(layout)
    runs = [Run(name, layout, micro=2, reduction=reduction_of(name, turn)) for name in NAMES]
    check(world, runs, 2)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_accumulation_in_which_every_pass_syncs(world, layout):
    """The first pass sends its sums, so those of the second one come late."""
    runs = [
        Run(name, layout, {"bucket_bytes": 64, "structure": structure}, micro=2)
        for name, structure in (
            ("mlp", natgrad.EKFAC()),
            ("cnn", None),
            ("cnn", natgrad.EKFAC()),
            ("lm", None),
        )
    ]
    check(world, runs, 2, "every pass syncs")


@pytest.mark.parametrize(
    ("turn", "placement"),
    list(enumerate([natgrad.MemOpt(), natgrad.CommOpt(), natgrad.ReduceScatter()])),
)
def test_batches_of_different_sizes_where_nobody_else_adds_gradients_up(world, turn, placement):
    kfac = {"placement": placement}
    runs = [
        Run(name, "plain", kfac, batches=(3, 5), reduction=reduction_of(name, turn))
        for name in NAMES
    ]
    check(world, runs, 2, batches=(3, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_exact_fisher(world, layout):
    """The three in turn with one structure or the other, as networks with reductions."""
    turn, runs = LAYOUTS.index(layout), []
    for index, (name, micro) in enumerate((("mlp", 1), ("cnn", 1), ("mlp", 2))):
        structure = (None, natgrad.EKFAC())[(index + turn) % 2]
        kfac = {"curvature": natgrad.ExactFisher(), "structure": structure}
        runs.append(Run(name, layout, kfac, micro=micro))
    check(world, runs, 2, "observe")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clocks(world, layout):
    intervals = [
        {"update_every": {"A": 2, "G": 4}, "refresh_every": 4},
        {"update_every": 1, "refresh_every": {"A": 3, "G": 2}},
        {"update_every": 1, "refresh_every": natgrad.schedules.Drift(DRIFT)},
        {"update_every": 1, "refresh_every": natgrad.schedules.Staggered(4)},
        {"update_every": 1, "norm_damping": 0.1},
    ]
    # The networks in turn, so that each meets all clocks in some layout.
    turn = LAYOUTS.index(layout)
    runs = [
        Run(("cnn", "lm")[(index + turn) % 2], layout, {**kfac, **MEM}, steps=6)
        for index, kfac in enumerate(intervals)
    ]
    check(world, runs, 3)


DRIFT = 0.2
MEM = {"placement": natgrad.MemOpt()}


@pytest.mark.parametrize("name", ["cnn", "lm"])
def test_drift_makes_some_factors_due_and_not_all(name):
    """In one process: so that it is worth the comparison."""
    results = []
    for interval in (1, natgrad.schedules.Drift(DRIFT), natgrad.schedules.Drift(1e9)):
        run = Run(name, kfac={"update_every": 1, "refresh_every": interval}, steps=6)
        results.append(weights(trained(run, (12,), 0)[1]))
    for one, other in ((0, 1), (1, 2)):
        assert any(not torch.allclose(results[one][n], results[other][n]) for n in results[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adaptive_damping(world, layout):
    """Every rank passes the losses of its own batch, and all get the same damping."""
    rule, runs = natgrad.schedules.LevenbergMarquardt(start=0.1, every=1, decay=0.7), []
    for name in NAMES:
        reduction = reduction_of(name, LAYOUTS.index(layout))
        of_lm = natgrad.MemOpt() if reduction == "mean" else natgrad.CommOpt()
        placement = {"mlp": natgrad.MemOpt(), "cnn": natgrad.CommOpt(), "lm": of_lm}[name]
        kfac = {"damping": rule, "placement": placement}
        runs.append(Run(name, layout, kfac, reduction=reduction))
    check(world, runs, 2, "adapt")


def test_adaptive_damping_on_batches_of_different_sizes(world):
    rule = natgrad.schedules.LevenbergMarquardt(start=0.1, every=1, decay=0.7)
    runs = [
        Run(name, "plain", {"damping": rule}, batches=(3, 5), reduction=reduction)
        for name in ("mlp", "lm")
        for reduction in ("mean", "sum")
    ]
    check(world, runs, 2, "adapt", batches=(3, 5))


# Batches of different sizes where others add gradients up, every rank counting once.


def averages(kfac):
    return {
        (block.name, name): running.mean
        for block in kfac.blocks
        for name, running in block.running.items()
    }


def uneven(run):
    """Running averages after the first step, and what is said in all of them."""
    rank = dist.get_rank()
    one = replace(run, steps=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        kfac, _ = trained(one, run.batches, rank)
        first = [str(warning.message) for warning in said]
        trained(run, run.batches, rank)
    return averages(kfac), first, [str(warning.message) for warning in said][len(first) :]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "lm"])
def test_curvature_counts_every_sample_once(world, name, layout):
    kfac = {"update_every": 1, "placement": natgrad.MemOpt()}
    run = Run(name, layout, kfac, batches=(3, 5), steps=3)
    expected = averages(trained(replace(run, steps=1), (8,), 0)[0])
    found = {}
    for own, *said in world.run(uneven, run, ranks=2):
        found |= own
        for messages in said:  # once in one step, and once in three
            (message,) = messages
            assert message == (
                "The ranks saw batches of different sizes. Curvature counts every sample once, but "
                "DDP and FSDP count every rank once: give all ranks equally many samples, or "
                "weight their losses."
            )
    assert found.keys() == expected.keys()
    for key, mean in expected.items():
        torch.testing.assert_close(found[key], mean, rtol=1e-10, atol=1e-12 * mean.abs().max())


def drawn(layout):
    """Sums of gradients at targets that were drawn for the same samples on every rank."""
    kfac, _ = Run("mlp", layout, {"curvature": natgrad.MonteCarloFisher()}).make(network("mlp"))
    kfac.observe(kfac.model(batch("mlp", 0, 8)[0]))
    return {block.name: block.sums["G"].kept.clone() for block in kfac.blocks}


def test_ranks_draw_different_targets(world):
    first, second = world.run(drawn, "plain", ranks=2)
    assert all(not torch.allclose(first[name], second[name]) for name in first)
