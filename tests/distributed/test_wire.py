"""How statistics travel changes no result, but for the rounding that a short dtype brings."""

import re
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import natgrad
from distributed.training import NETWORKS, Run, alone, batch, network, train, wrapped
from kfac_keywords import grouped
from natgrad import KFAC
from natgrad.comm import float21
from natgrad.errors import SettingError
from natgrad.placement import Route

LAYOUTS = ("plain", "ddp", "fsdp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, float21)
TERMS = {"mlp": 1, "cnn": 1, "lm": 6}
DAMPING = 100.0


def trains(runs):
    return [train(run)["weights"] for run in runs]


@lru_cache(maxsize=64)
def reference(name, ranks):
    return alone(Run(name), ranks)


def error(found, expected):
    """The largest one of all weights, relative to the largest number of each."""
    return max(
        ((found[name] - weight).abs().max() / weight.abs().max()).item()
        for name, weight in expected.items()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_packing_and_buckets_change_nothing(world, in_pairs, name, layout):
    """64 bytes are less than most factors have, so every exchange carries one of them. The fourth
    way is that of the other tests. Each two of a way, a network and a layout."""
    ways = {
        "packed": {"packed": True, "bucket_bytes": 64},
        "unpacked": {"packed": False, "bucket_bytes": 64},
        "in large buckets": {"packed": False, "bucket_bytes": 25 << 20},
    }
    runs = [
        Run(name, layout, {**ways[way], "placement": natgrad.MemOpt()})
        for way, *where in in_pairs(ways, NETWORKS, LAYOUTS)
        if where == [name, layout]
    ]
    assert runs
    for found in world.run(trains, runs, ranks=3):
        for weights in found:
            assert error(weights, reference(name, 3)) <= 1e-10


# Short dtypes.


def roundoff(dtype):
    """The largest relative error of rounding to nearest."""
    return 2.0**-13 if dtype == float21 else torch.finfo(dtype).eps / 2


def first_step(model, x, y, **kfac):
    """Factors and weights after one step; the factors are those that this rank keeps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, damping=DAMPING, kl_clip=None, **grouped(**kfac))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    optimizer.step()
    factors = {
        (block.name, name): block.forms[name].dense(running.mean)
        for block in kfac.blocks
        for name, running in block.running.items()
    }
    steps = {
        name.removeprefix("module."): p.detach() - before[name]
        for name, p in model.named_parameters()
    }
    assert all(int(block.dropped) == 0 for block in kfac.blocks)
    return factors, steps


def first_steps(name, layout, dtypes):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = (t.chunk(ranks)[rank] for t in batch(name, 0, 4 * ranks))
    more = {"terms_per_sample": TERMS[name]}
    return [
        first_step(wrapped(network(name), layout), x, y, wire_dtype=dtype, **more)
        for dtype in dtypes
    ]


def assert_rounded(found, expected, roundoff):
    """Every share of a factor is rounded once, which moves an entry of the sum by at most
    ``roundoff sum |shares|``, and that is at most ``roundoff sqrt(F_ii F_jj)``, the shares being
    sums of squares. Entries of a convolution's factor are sums of up to four such numbers."""
    for key, factor in found.items():
        moved = (factor.double() - expected[key]).abs().max()
        assert moved <= 4 * roundoff * expected[key].abs().max(), key


@pytest.mark.parametrize("layout", ["plain", "ddp"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_short_dtype_rounds_shares_once(world, name, layout):
    """``|E_ij| <= u sqrt(F_ii F_jj)`` makes ``|E| <= u tr F``. A step ``(F + damping)^-1 g`` then
    moves by at most ``|E| / damping`` of itself, for ``F = A x G`` by 2 u tr A tr G / damping."""
    factors, steps = first_step(network(name), *batch(name, 0, 8), terms_per_sample=TERMS[name])
    products = {}
    for (block, _), factor in factors.items():
        trace = factor.diagonal(dim1=1, dim2=2).sum().item()
        products[block] = products.get(block, 1.0) * trace
    products.pop("embed", None)  # the factors of two layers, first brought to one pair
    moved = 2 * max(products.values()) / DAMPING
    for found in world.run(first_steps, name, layout, DTYPES, ranks=2):
        for dtype, (own, taken) in zip(DTYPES, found, strict=True):
            assert_rounded(own, factors, roundoff(dtype))
            bound = 4 * roundoff(dtype) * moved
            assert bound < 0.1
            for key, step in steps.items():
                if not key.startswith("embed"):
                    assert (taken[key] - step).norm() <= bound * step.norm(), (dtype, key)
        assert any(not torch.equal(own[key], factors[key]) for own, _ in found for key in own)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_round_in_the_same_way(world, layout):
    """Also where several of them keep a factor, as of three ranks and two blocks, and each adds the
    shares up by itself."""
    calls = {}
    for dtype in (*DTYPES, torch.float64):
        kfac = {"wire_dtype": dtype, "include": ["0", "2"], "placement": natgrad.ReduceScatter()}
        runs = [Run("mlp", layout, kfac), Run("cnn", layout, {"wire_dtype": dtype})]
        calls[dtype] = (runs,)
    for dtype, (first, *others) in world.each(trains, calls, ranks=3).items():
        for found in others:
            for weights, expected in zip(found, first, strict=True):
                for name, weight in expected.items():
                    assert torch.equal(weights[name], weight), (dtype, name)
        assert (error(first[1], reference("cnn", 3)) <= 1e-10) == (dtype == torch.float64)


# float16 ends at 65504 and has nothing below 6e-8.


class Bright(nn.Module):
    """Inputs of 30 at 400 positions: sums of 360,000 a sample; gradients are tiny."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)) * 1e-3)


def bright(samples):
    torch.manual_seed(1)
    x = 30 + torch.randn(samples, 2, 20, 20)
    return x, torch.randint(2, (samples,))


def bright_steps(layout, dtypes):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = (t.chunk(ranks)[rank] for t in bright(8))
    return [first_step(wrapped(Bright(), layout), x, y, wire_dtype=dtype) for dtype in dtypes]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float16_neither_overflows_nor_vanishes(world, layout):
    model = Bright().double()
    x, y = bright(8)
    factors, _ = first_step(model, x.double(), y)
    assert factors["conv", "A"].abs().max() * 8 * 400 > 65504  # of sums
    assert 0 < factors["conv", "G"].abs().max() < 6e-8  # of means
    for found in world.run(bright_steps, layout, [torch.float16], ranks=2):
        assert_rounded(found[0][0], factors, roundoff(torch.float16))


def bright_and_broken():
    """Rank 0 has an infinite input: nobody folds, and the next batch is as good as ever."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, half = Bright(), natgrad.Distributed(wire_dtype=torch.float16)
    kfac = KFAC(model, update_every=1, kl_clip=None, distributed=half, include="conv")
    for step in range(2):
        x, y = (t.chunk(ranks)[rank].clone() for t in bright(8))
        if rank == 0 and step == 0:
            x[0, 0, 0, 0] = float("inf")
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
    (block,) = kfac.blocks
    means = {n: block.forms[n].dense(r.mean) for n, r in block.running.items()}
    return int(block.dropped), means


def test_numbers_that_are_none_are_dropped_in_float16(world):
    model = Bright().double()
    x, y = bright(8)
    factors, _ = first_step(model, x.double(), y)
    for dropped, means in world.run(bright_and_broken, ranks=2):
        assert dropped == 1
        assert_rounded({("conv", n): mean for n, mean in means.items()}, factors, 2**-11)


# Inverses and gradients.


def short_runs(runs):
    """Weights of each, and the bytes of its last step by purpose."""
    found = []
    for run in runs:
        result = train(run)
        found.append((result["weights"], result["sent"][-1]))
    return found


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize(
    ("layout", "placement"),
    [
        ("ddp", natgrad.MemOpt()),
        ("ddp", natgrad.Hybrid(0.5)),
        ("ddp", natgrad.CommOpt()),
        ("fsdp", natgrad.MemOpt()),
        ("plain", natgrad.ReduceScatter()),
    ],
)
def test_short_inverses_and_gradients_are_the_same_on_all_ranks(world, layout, placement, route):
    """Half the bytes of float32, a quarter of float64; ranks that made a number round it as well,
    or they would train other weights than those that got it."""
    kfac = {"placement": placement, "route": route}
    # The last step updates.
    runs = [Run("cnn", layout, kfac, steps=3)]
    for dtype in (torch.bfloat16, float21):
        short = {"inverse_dtype": dtype, "gradient_dtype": dtype}
        runs.append(Run("cnn", layout, {**kfac, **short}, steps=3))
    results = world.run(short_runs, runs, ranks=4)
    (full, before), *others = results[0]
    for (rounded, _), most in zip(others, (0.2, 0.01), strict=True):
        assert error(full, rounded) > 1e-6 or not {"inverses", "gradients"} & before.keys()
        assert error(rounded, full) < most
    for (one, wide), *shorts in results:
        assert all(torch.equal(one[name], full[name]) for name in full)
        # A message of 21-bit numbers may leave room in its last word, which short ones notice.
        parts = ((1 / 4, 0.03), (1 / 3, 0.25))
        for (other, narrow), (rounded, _), (part, more) in zip(shorts, others, parts, strict=True):
            assert all(torch.equal(other[name], rounded[name]) for name in full)
            for purpose in {"inverses", "gradients"} & wide.keys():
                uncovered = purpose == "gradients" and layout == "plain"
                share = narrow[purpose] / wide[purpose] if wide[purpose] else part
                assert share == pytest.approx(part, abs=more) or (uncovered and share < 0.7)


@pytest.mark.parametrize("name", ["inverse_dtype", "gradient_dtype"])
@pytest.mark.parametrize("given", [torch.float16, torch.int64, "float21"], ids=repr)
def test_their_range_must_be_wide(name, given):
    says = (
        f"Distributed.{name} is {given!r} but must be None or one of torch.float64, "
        "torch.float32, natgrad.comm.float21, torch.bfloat16, whose range is that of what is sent: "
        "pass torch.bfloat16 for half the bytes."
    )
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        natgrad.Distributed(**{name: given})


def test_a_route_must_be_one():
    says = (
        "Distributed.route is 'even' but must be None or a route: pass "
        "natgrad.placement.Route.BALANCED or Route.DIRECT."
    )
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        natgrad.Distributed(route="even")
