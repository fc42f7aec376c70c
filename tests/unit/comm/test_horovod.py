"""Horovod: the contract, over a stand-in that has its functions; Horovod itself takes ten minutes
to build and is not installed for tests."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import natgrad
from natgrad.comm import Horovod
from natgrad.comm import horovod as module
from natgrad.errors import SettingError
from unit.comm import horovod_standin as standin
from unit.comm.contract import CONTRACT, says


def with_standin(*functions):
    """Each with a communicator of its own, on all ranks alike."""
    hvd = standin.install()
    module._SETS.clear()
    module._MADE.clear()
    try:
        for function in functions:
            function(Horovod())
        return len(hvd.results)  # what is still kept for somebody who asks
    finally:
        standin.remove()


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_contract(world, ranks):
    assert world.run(with_standin, *CONTRACT, ranks=ranks) == [0] * ranks


def groups(comm):
    assert comm.ranks == (0, 1, 2)
    part = comm.split([1, 2] if comm.rank else [0])
    assert (part.rank, part.size) == ((comm.rank - 1, 2) if comm.rank else (0, 1))
    assert comm.split([1, 2] if comm.rank else [0]).gather(comm.rank) == part.gather(comm.rank)
    if comm.rank:
        assert part.ranks == (1, 2)
        assert part.total(torch.tensor([float(comm.rank)]), "x").wait().tolist() == [3.0]
        assert part.split([0, 1]).gather(comm.rank) == [1, 2]
        says(
            f"Ranks [{comm.rank}] are to be a group within a group of Horovod's, which only all "
            "processes together can make: pass Horovod() of all processes.",
            *(part.split, [part.rank]),
        )


def no_dynamic_sets(comm):
    comm._hvd.dynamic = False
    says(
        "Horovod cannot make a process set of the ranks [0, 1] (HOROVOD_DYNAMIC_PROCESS_SETS is "
        'not set): call hvd.init(process_sets="dynamic").',
        *(comm.split, [2] if comm.rank == 2 else [0, 1]),
    )


@pytest.mark.distributed
def test_groups_are_process_sets(world):
    world.run(with_standin, groups, ranks=3)
    world.run(with_standin, no_dynamic_sets, ranks=3)


def trained(comm):
    """Weights after a few steps, whose gradients K-FAC averages over the ranks of ``comm``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    placed = natgrad.Distributed(natgrad.Hybrid(0.5), group=comm)
    kfac = natgrad.KFAC(model, optimizer, refresh_every=2, distributed=placed)
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = slice(comm.rank * 8 // comm.size, (comm.rank + 1) * 8 // comm.size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), (torch.arange(8) % 3)[mine]).backward()
        kfac.step()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def weights():
    found = []
    with_standin(lambda comm: found.append(trained(comm)))
    return found[0]


@pytest.mark.distributed
def test_weights_are_those_of_one_process(world):
    alone = trained(natgrad.comm.Alone())
    for found in world.run(weights, ranks=2):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)


def test_what_horovod_raises_is_said():
    class Gone:
        def poll(self, handle):
            return True

        def synchronize(self, handle):
            raise RuntimeError("Horovod has been shut down.\nmore")

    failure = "Rank 0 of 2 could not add up 'x'"
    message = module.HorovodTransfer(Gone(), 1, torch.float32, failure, torch.zeros(1))
    assert message.arrived()
    for _ in range(2):
        with pytest.raises(natgrad.comm.CommunicationError) as error:
            message.wait()
        start = f"{failure} (RuntimeError: Horovod has been shut down)."
        assert str(error.value).startswith(start)


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(SettingError) as error:
        Horovod()
    said = str(error.value)
    assert said.startswith("Horovod() needs horovod with its torch extension, which cannot be ")
    advice = "set HOROVOD_WITH_PYTORCH=1 and pip install horovod, or use ProcessGroups()."
    assert said.endswith(advice)

    hvd = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    says(
        "Horovod() was made before Horovod knows of other processes: call hvd.init() first.",
        Horovod,
    )
    hvd = SimpleNamespace(is_initialized=lambda: True, ProcessSet=standin.ProcessSet)
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    says(
        "process_set is 'all' but must be a Horovod process set that this process belongs to, or "
        "None: pass what hvd.add_process_set() returned.",
        *(Horovod, "all"),
    )


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str
)
def test_numbers_move_as_integers_of_their_bits(dtype):
    numbers = torch.tensor([0, 1, 3]).to(dtype)
    bits, each = module._bits(numbers)
    assert bits.dtype in module.BITS.values()
    assert bits.numel() == 3 * each
    assert bits.numel() * bits.element_size() == 3 * numbers.element_size()
    assert torch.equal(bits.view(dtype), numbers)
