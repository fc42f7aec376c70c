"""K-FAC that hangs on an optimizer, on several ranks: states that one rank saves alone, scalers."""

import contextlib
import copy
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.errors import SettingError

pytestmark = pytest.mark.distributed
OFTEN = {"update_every": 1, "refresh_every": 2}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def batch(seed, rank):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)


def made(kind, wrap=DistributedDataParallel, **attached):
    model = network()
    model = wrap(model) or model
    if kind == "NaturalMuon":
        optimizer = natgrad.NaturalMuon(model, **OFTEN)
        return model, optimizer, optimizer.kfac
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, natgrad.KFAC(model, optimizer, **OFTEN).attach(**attached)


def train(model, optimizer, steps):
    rank = torch.distributed.get_rank()
    for seed in steps:
        optimizer.zero_grad()
        x, y = batch(seed, rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def shared(state):
    """What rank 0 has saved, on all ranks."""
    sent = [state]
    torch.distributed.broadcast_object_list(sent, 0)
    return sent[0]


def one_rank_saves(kind):
    whole, optimizer, kfac = made(kind)
    train(whole, optimizer, range(3))
    rank, saved = torch.distributed.get_rank(), None
    if kind == "attached" and rank == 0:
        with pytest.warns(UserWarning, match=r"saved without K-FAC's, which takes all ranks"):
            assert "kfac" not in optimizer.state_dict()  # and nobody waits
    kfac.state_dict()
    if rank == 0:
        saved = copy.deepcopy([whole.state_dict(), optimizer.state_dict()])
    saved = shared(saved)
    train(whole, optimizer, range(3, 6))
    assert kfac.gathered_state() is None  # it is that of an earlier step
    model, optimizer, kfac = made(kind)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(3, 6))
    return torch.equal(flat(model), flat(whole)), kfac.steps


def all_ranks_save():
    whole, optimizer, kfac = made("attached", all_ranks_save=True)
    train(whole, optimizer, range(2))
    assert kfac.gathered_state() is None
    return sorted(optimizer.state_dict())


def sharded(folder, kind):
    """By torch's own functions for states, with K-FAC's shards beside them."""
    whole, optimizer, kfac = made(kind, fully_shard)
    train(whole, optimizer, range(3))
    told = pytest.warns(UserWarning, match=r"or save kfac.shards\(\) beside it")
    with told if kind == "attached" else contextlib.nullcontext():
        model_state, optimizer_state = get_state_dict(whole, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "kfac": kfac.shards()}
    dcp.save(state, checkpoint_id=folder)
    train(whole, optimizer, range(3, 6))
    model, optimizer, kfac = made(kind, fully_shard)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert kfac.steps == 0
    state = {"model": model_state, "optimizer": optimizer_state, "kfac": kfac.shards()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    train(model, optimizer, range(3, 6))
    full = [torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs(model, whole)]
    return all(full), kfac.steps


def pairs(one, other):
    return zip(one.parameters(), other.parameters(), strict=True)


def scaled_plain_ranks():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match=r"a GradScaler leaves it out on a rank that overflows"):
        natgrad.KFAC(model, optimizer, scaler=scaler).attach()
    natgrad.KFAC(model, optimizer).attach()
    x, y = batch(0, torch.distributed.get_rank())
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(SettingError, match=r"a GradScaler leaves it out on a rank that overflows"):
        scaler.step(optimizer)


def untold_scaler():
    """Statistics leave during the backward pass, when nobody knows of the scaler yet."""
    model, optimizer, _ = made("attached")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = batch(0, torch.distributed.get_rank())
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(SettingError, match=r"statistics have left this rank with its scale"):
        scaler.step(optimizer)


def made_too_early():
    """Before the trainer has initialised torch.distributed: ranks would go ways of their own."""
    with patch("natgrad.comm.connecting.initialised", lambda: False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        natgrad.KFAC(model, optimizer).attach()
    x, y = batch(0, torch.distributed.get_rank())
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(SettingError, match=r"initialised after KFAC was made.*TrainingArguments"):
        optimizer.step()
    alone = natgrad.Distributed(group=natgrad.comm.Alone())
    kfac = natgrad.KFAC(model, optimizer, distributed=alone)  # as the user wants it
    F.cross_entropy(model(x), y).backward()
    kfac.step()


def everything(folder):
    warnings.simplefilter("error")
    kinds = ("attached", "NaturalMuon")
    found = {
        **{("saved", kind): one_rank_saves(kind) for kind in kinds},
        **{("sharded", kind): sharded(f"{folder}/{kind}", kind) for kind in kinds},
        "all": all_ranks_save(),
    }
    scaled_plain_ranks()
    untold_scaler()
    made_too_early()
    return found


def test_states_and_scalers(world, tmp_path):
    for found in world.run(everything, str(tmp_path), ranks=2):
        assert found.pop("all") == ["kfac", "param_groups", "state"]
        assert found == dict.fromkeys(found, (True, 6))
