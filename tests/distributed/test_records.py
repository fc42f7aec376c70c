"""What a run tells of K-FAC is the same on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.training import network
from natgrad import KFAC, CommOpt, Distributed, MemOpt
from natgrad.lab.train import kfac_record


def told(placement=None):
    """Of an MLP on eight samples a step, spread over the ranks if there are some."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = network("mlp")
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(
        wrapped, optimizer, update_every=1, refresh_every=1, distributed=Distributed(placement)
    )
    for step in range(3):
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        wrapped(x.chunk(ranks)[rank]).square().sum(1).mean().backward()
        kfac.step()
        optimizer.step()
    return kfac_record.drift(kfac), kfac_record.record(kfac)["spectra"]


@pytest.mark.parametrize("placement", [CommOpt(), MemOpt()], ids=["comm", "mem"])
def test_all_ranks_tell_what_one_process_does(world, placement):
    drift, spectra = told()
    assert drift.keys() == {"A", "G"}
    assert len(spectra) == 6
    for found_drift, found in world.run(told, placement, ranks=2):
        for factor, quantiles in drift.items():
            assert found_drift[factor] == pytest.approx(quantiles, rel=1e-6)
        assert [(one["block"], one["factor"]) for one in found] == [
            (one["block"], one["factor"]) for one in spectra
        ]
        for one, own in zip(found, spectra, strict=True):
            assert one["size"] == own["size"]
            assert one["values"] == pytest.approx(own["values"], rel=1e-6, abs=1e-9)
