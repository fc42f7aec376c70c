"""The scale of a loss is found by all ranks together, and is that of one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distributed import layouts
from distributed.layouts import assert_same
from distributed.training import weights, wrapped
from natgrad import KFAC, Distributed, MemOpt, Relative

RANKS, EACH, T, C, STEPS = 2, 4, 6, 5, 4


def network():
    torch.manual_seed(0)
    layers = (nn.Embedding(C, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C))
    return nn.Sequential(*layers).double()


def batch(step, pad):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(C, (RANKS * EACH, T), generator=generator)
    y = (3 * x + 1) % C
    if pad:  # ranks have different numbers of terms
        length = torch.arange(RANKS * EACH) % T + 1
        length[:EACH] = T - step % 3
        y = y.masked_fill(torch.arange(T) >= length[:, None], -100)
    return x, y


def total(z, y):
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum")


def mean(z, y):
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def squares(z, y):
    return (z - F.one_hot(y, C)).square().mean()


# The loss, whether there is padding, and what is found: W1 of all ranks, or nothing.
CASES = {
    "mean": (mean, False, "mean"),
    "sum": (total, False, "other"),
    "padded sum": (total, True, "other"),
    "a third": (lambda z, y: mean(z, y) / 3, False, "other"),
    "unknown": (squares, False, None),
    "unknown, relative": (squares, False, None),  # whose steps get a length, layer by layer
}


def trained(model, case, rank, ranks):
    loss, pad, _ = CASES[case]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    settings = {"update_every": 2, "refresh_every": 2, "kl_clip": 1e-2}
    if case.endswith("relative"):
        settings["damping"] = Relative(0.1)
    kfac = KFAC(model, optimizer, **settings, distributed=Distributed(MemOpt()))
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, pad)
        own = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
        loss(model(x[own]), y[own]).backward()
        kfac.step()
        # What is not covered keeps the gradient of the loss as it was written: here all is.
        optimizer.step()
    return weights(model), kfac.settings.found, kfac.settings.unknown


def train_all(layout):
    layouts.quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {case: trained(wrapped(network(), layout), case, rank, ranks) for case in CASES}


def train_layouts():
    return {layout: train_all(layout) for layout in ("plain", "ddp", "fsdp")}


def test_weights_are_those_of_one_process(world):
    expected = {case: trained(network(), case, 0, 1)[0] for case in CASES}
    for found in world.run(train_layouts, ranks=RANKS):
        for layout, cases in found.items():
            for case, (own, loss, unknown) in cases.items():
                kind = CASES[case][2]
                assert unknown == (kind is None), (layout, case)
                assert (None if loss is None else loss.kind) == kind, (layout, case)
                assert_same(own, expected[case], f"{layout}, {case}")
