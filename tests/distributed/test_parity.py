"""The weights do not depend on how many ranks train, nor on who does what."""

from functools import lru_cache

import pytest
import torch

import natgrad
from distributed.training import METHODS, NETWORKS, Run, alone, train

PLACEMENTS = {
    "mem": natgrad.MemOpt(),
    "half": natgrad.Hybrid(0.5),
    "comm": natgrad.CommOpt(),
    "scatter": natgrad.ReduceScatter(),
    "auto": natgrad.Auto(),
}


@lru_cache(maxsize=64)
def reference(network, method, ranks, batches=()):
    return alone(Run(network, kfac=METHODS[method], batches=batches), ranks)


def assert_same(found, expected):
    for name, weight in expected.items():
        error = (found[name] - weight).abs().max() / weight.abs().max()
        assert error <= 1e-10, f"{name}: {error:.1e}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", ["mem", "half", "comm", "scatter"])
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_are_those_of_one_process(world, ranks, network, layout, placement, method):
    if placement == "half" and ranks == 3:
        pytest.skip("half of three ranks are no ranks")
    kfac = {**METHODS[method], "placement": PLACEMENTS[placement]}
    expected = reference(network, method, ranks)
    for result in world.run(train, Run(network, layout, kfac), ranks=ranks):
        assert_same(result["weights"], expected)
        assert torch.isfinite(torch.cat([w.flatten() for w in result["weights"].values()])).all()
