"""Stages of a pipeline by torch.distributed.pipelining, each with a K-FAC of its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad

STEPS, BATCH, MICRO = 5, 16, 2
SETTINGS = {"damping": 0.1, "update_every": 2, "refresh_every": 2}


def stages():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        second = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
        return first.double(), second.double()


def made(stage, **settings):
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    return natgrad.KFAC(stage, optimizer, **SETTINGS, **settings), optimizer


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (BATCH,), generator=generator)


def weights(stage):
    return [p.detach().clone() for p in stage.parameters()]


def alone():
    both = stages()
    steppers = [made(stage) for stage in both]
    for step in range(STEPS):
        for _, optimizer in steppers:
            optimizer.zero_grad()
        x, y = batch(step)
        F.cross_entropy(both[1](both[0](x)), y).backward()
        for kfac, optimizer in steppers:
            kfac.step()
            optimizer.step()
    return [weights(stage) for stage in both]


def pipeline(schedule):
    """The first half of the ranks has the first stage, each rank for its own part of the data."""
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh

    replicas = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("stage", "data"))
    index, replica = mesh.get_coordinate()
    part = stages()[index]
    each = BATCH // replicas
    example = torch.zeros(each // MICRO, 7 if index else 5, dtype=torch.float64)
    example.requires_grad_(bool(index))
    stage = pipelining.PipelineStage(
        part,
        index,
        2,
        torch.device("cpu"),
        input_args=example,
        output_args=part(example),
        group=mesh.get_group("stage"),
    )
    running = getattr(pipelining, schedule)(
        stage, MICRO, lambda out, y: F.cross_entropy(out, y) / MICRO, scale_grads=False
    )
    group = mesh["data"] if replicas > 1 else natgrad.comm.Alone()
    kfac, optimizer = made(part, distributed=natgrad.Distributed(group=group))
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (t[replica * each :][:each] for t in batch(step))
        running.step(target=y) if index else running.step(x)
        kfac.step()
        optimizer.step()
    return index, weights(part)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_weights_are_those_of_one_process(world, schedule, ranks):
    expected = alone()
    for index, found in world.run(pipeline, schedule, ranks=ranks):
        torch.testing.assert_close(found, expected[index], rtol=1e-10, atol=1e-12)
