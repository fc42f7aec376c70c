"""`natgrad.lengths.Dogleg` on several ranks: the weights of one process, however they are cut."""

import copy
import dataclasses
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import natgrad
from distributed import layouts
from distributed.layouts import assert_same
from distributed.training import batch, network, weights, wrapped
from natgrad.errors import SettingError

pytestmark = pytest.mark.distributed
STEPS = 4
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(
        ps, lr=1e-2, eps=1e-3, weight_decay=0.1
    ),  # a bias has no gradient
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}
PLACEMENTS = {"mem": natgrad.MemOpt(), "comm": natgrad.CommOpt()}


def made(model, optimizer, **distributed):
    own = OPTIMIZERS[optimizer](model.parameters())
    settings = {"update_every": 1, "refresh_every": 2, "length": natgrad.lengths.Dogleg()}
    group = natgrad.Distributed(**distributed)
    return own, natgrad.KFAC(model, own, distributed=group, **settings).attach()


def passes(optimizer, model, name, steps, rank=0, ranks=1, of=1):
    """``of`` ranks' batches are one step; this rank's share of them."""
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(name, step, 4 * of)
        each = len(x) // ranks
        some = slice(rank * each, (rank + 1) * each)
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()


@lru_cache(maxsize=16)
def alone(name, optimizer, ranks):
    model = network(name)
    own, kfac = made(model, optimizer)
    passes(own, model, name, range(STEPS), of=ranks)
    return weights(model), dict(kfac.blending.added)


def train_all(name, layout):
    layouts.quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for optimizer in OPTIMIZERS:
        for key, placement in PLACEMENTS.items():
            model = wrapped(network(name), layout)
            own, kfac = made(model, optimizer, placement=placement)
            passes(own, model, name, range(STEPS), rank, ranks, ranks)
            found[optimizer, key] = weights(model), dict(kfac.blending.added)
    return found


@pytest.mark.parametrize(
    ("ranks", "name", "layout"),
    [(2, "cnn", "ddp"), (2, "lm", "fsdp"), (3, "cnn", "fsdp"), (4, "lm", "hsdp")],
)
def test_weights_are_those_of_one_process(world, ranks, name, layout):
    results = world.run(train_all, name, layout, ranks=ranks)
    for found in results:
        for (optimizer, placement), (own, added) in found.items():
            expected, legs = alone(name, optimizer, ranks)
            assert_same(own, expected, f"{optimizer}, {placement}")
            assert added == pytest.approx(legs, rel=1e-6)
            first = results[0][optimizer, placement][0]
            assert all(torch.equal(own[key], first[key]) for key in first), (optimizer, placement)
    assert any(b > 0 for b in alone(name, "adamw", ranks)[1].values())


def go_on(values, state):
    """Two more steps on these ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = wrapped(network("lm"), "ddp")
    model.module.load_state_dict(values)
    optimizer, kfac = made(model, "adamw", placement=natgrad.MemOpt())
    optimizer.load_state_dict(state)
    passes(optimizer, model, "lm", range(2, 4), rank, ranks, of=2)
    plain = network("lm")
    with pytest.raises(SettingError, match="averaged by K-FAC alone: use DistributedDataParallel"):
        made(plain, "adamw")
    return weights(model), kfac.steps


def test_a_state_of_one_process_goes_on_and_plain_ranks_are_refused(world):
    model = network("lm")
    optimizer, _ = made(model, "adamw")
    passes(optimizer, model, "lm", range(2), of=2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    passes(optimizer, model, "lm", range(2, 4), of=2)
    for own, steps in world.run(go_on, *saved, ranks=2):
        assert steps == 4
        assert_same(own, weights(model), "")


def train_cut(layout):
    """Layers in columns and rows, on the ranks of the default group; alone without a layout."""
    layouts.quiet()
    layouts.METHODS["dogleg"] = {"length": natgrad.lengths.Dogleg()}
    case = layouts.Case("transformer", layout, "dogleg")
    replicas = 2 if "fsdp" in layout else 1
    if dist.is_initialized():
        model, part, parts = case.spread()
    else:
        model, part, parts = layouts.network(case.network, case.dtype), 0, 1
        case = dataclasses.replace(case, layout="")
    kfac, optimizer = case.make(model)
    kfac.attach()
    for step in range(case.steps):
        optimizer.zero_grad()
        if dist.is_initialized():
            layouts.backward(case, model, kfac, step, part, parts)
        else:
            x, y = layouts.batch(case.network, step, layouts.EACH * replicas)
            layouts.loss(case, model, kfac, x, y).backward()
        optimizer.step()
    return weights(model), dict(kfac.blending.added)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "tp"), (4, "fsdp + tp")])
def test_layers_that_are_cut(world, ranks, layout):
    expected, legs = train_cut(layout)
    assert any(b > 0 for b in legs.values())
    for own, added in world.run(train_cut, layout, ranks=ranks):
        assert_same(own, expected, layout)
        assert added == pytest.approx(legs, rel=1e-6)
