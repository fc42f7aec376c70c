"""Stages of a pipeline, each a model on ranks of its own with a preconditioner of its own."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from distributed.layouts import PLACEMENTS, STEPS, Case, assert_same
from distributed.parallel import CLASSES, EACH, batch, quiet, shard
from distributed.training import weights


def stages() -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh())
        second = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, CLASSES))
        return [first.double(), second.double()]


def stages_alone() -> list[dict[str, Tensor]]:
    """Both stages in one process, each with a preconditioner of its own."""
    models = stages()
    made = [Case().make(model) for model in models]
    for step in range(STEPS):
        x, y = batch("tower", step, 2 * EACH)
        for _, optimizer in made:
            optimizer.zero_grad()
        out = models[1](models[0](x))
        F.cross_entropy(out.transpose(1, 2), y).backward()
        for kfac, optimizer in made:
            kfac.step()
            optimizer.step()
    return [weights(model) for model in models]


def pipeline(wrapper: str, placement: Any, micro: int) -> tuple[int, dict[str, Tensor]]:
    """Ranks 0 and 1 are replicas of the first stage, ranks 2 and 3 of the second."""
    quiet()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage, replica = mesh.get_coordinate()
    model = stages()[stage]
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("data"))
    elif wrapper == "fsdp":
        shard(model, mesh["data"])
    group = mesh["data"] if wrapper == "fsdp" else mesh.get_group("data")
    kfac, optimizer = Case("tower", placement=placement).make(model, group=group)
    other = (dist.get_rank() + 2) % 4
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch("tower", step, 2 * EACH)
        x, y = x[replica * EACH :][:EACH], y[replica * EACH :][:EACH]
        for index, (one, target) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            if wrapper == "ddp":
                model.require_backward_grad_sync = index == micro - 1
            elif wrapper == "fsdp":
                model.set_requires_gradient_sync(index == micro - 1)
            if stage == 0:
                out = model(one)
                dist.send(out.detach(), other)
                gradient = torch.empty_like(out)
                dist.recv(gradient, other)
                out.backward(gradient)
            else:
                received = one.new_empty(*one.shape[:2], 7)
                dist.recv(received, other)
                out = model(received.requires_grad_()).transpose(1, 2)
                (F.cross_entropy(out, target) / micro).backward()
                dist.send(received.grad, other)
        kfac.step()
        optimizer.step()
    return stage, weights(model)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
def test_each_stage_of_a_pipeline_has_its_own_ranks(world, wrapper, micro):
    expected = stages_alone()
    calls = {name: (wrapper, placement, micro) for name, placement in PLACEMENTS.items()}
    for name, found in world.each(pipeline, calls, ranks=4).items():
        assert [stage for stage, _ in found] == [0, 0, 1, 1]
        for stage, result in found:
            assert_same(result, expected[stage], name)
