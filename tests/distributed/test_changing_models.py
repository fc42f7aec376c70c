"""Models of several ranks that change while they are trained: blocks follow, ranks stay alike."""

import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from natgrad import KFAC, CommOpt, Distributed, MemOpt, NaturalMuon
from natgrad.errors import SettingError


class Words(nn.Module):
    """With an embedding whose gradient is sparse, and parts that come later."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5, sparse=True)
        self.frozen, self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.frozen(self.words(tokens)).tanh()).tanh())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(k, (8,), generator=generator) for k in (9, 3))


def trained(alone: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after steps between which layers are unfrozen, replaced and frozen again."""
    torch.manual_seed(0)
    model = Words().double()
    optimizer = SGD(model.parameters(), lr=0.1)
    kfac = None if alone else KFAC(model, optimizer, exclude=["hidden", "frozen"])
    said = []
    for step in range(8):
        if step == 2:
            model.frozen.requires_grad_(True)
        if step == 4:
            torch.manual_seed(1)
            model.hidden.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if step == 6:
            model.head.requires_grad_(False)
        optimizer.zero_grad()
        ranks = range(2) if alone else [dist.get_rank()]
        x, y = (torch.cat(t) for t in zip(*(batch(2 * step + r) for r in ranks), strict=True))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            F.cross_entropy(model(x), y).backward()
            if kfac is not None:
                kfac.step()
        said += [str(one.message) for one in found]
        assert model.words.weight.grad is not None
        assert model.words.weight.grad.is_sparse  # as optimizers for such gradients want it
        # Covered parameters are left alone, so that all others show plain averages.
        model.head.zero_grad()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, said


def both() -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    theirs, said = trained(alone=False)
    return theirs, trained(alone=True)[0], said


def test_what_is_excluded_and_replaced_is_averaged(world):
    """Sparse gradients as well. The gradients without a block are those of one process."""
    results = world.run(both, ranks=2)
    for found, expected, said in results:
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], msg=name)
        assert said == []
    for name, weight in results[0][0].items():
        assert torch.equal(weight, results[1][0][name]), name


# Gradual unfreezing and a new head, beside one process that does the same.


def network() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (5, 6, 6, 6, 3)
    pairs = pairwise(sizes)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairs)).double()


def samples(index: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * index + rank)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=generator)


def unfrozen(
    layout: str, placement: object, ranks: int, muon: bool, head: bool
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Weights after a training in which layers join from the last to the first, and perhaps a new
    ``head`` comes. All that between updates, so that one process does not notice it earlier."""
    net, alone = network(), layout == "alone"
    model: nn.Module = net
    if layout == "ddp":  # which averages what is trained when it is made
        model = DistributedDataParallel(net, find_unused_parameters=True)
    for index in range(3):
        net[index].requires_grad_(False)
    if layout == "fsdp":
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    options = {"update_every": 2, "refresh_every": 4, "damping": 0.1}
    if not alone:
        options["distributed"] = Distributed(placement=placement)
    if muon:
        optimizer = NaturalMuon(model, lr=0.02, **options)
        kfac = optimizer.kfac
    else:
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.5)
        kfac = KFAC(model, optimizer, **options)
    plans = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(12):
            if step in (3, 5, 7):
                net[{3: 2, 5: 1, 7: 0}[step]].requires_grad_(True)
            if step == 9 and head:
                torch.manual_seed(5)
                net[3] = nn.Sequential(nn.Linear(6, 3), nn.Tanh()).double()
                if not muon:
                    optimizer.param_groups[0]["params"] = list(net.parameters())
            optimizer.zero_grad()
            mine = range(ranks) if alone else [dist.get_rank()]
            x, y = (torch.cat(t) for t in zip(*(samples(step, r) for r in mine), strict=True))
            F.cross_entropy(model(x), y).backward()
            if not muon:
                kfac.step()
            optimizer.step()
            plans.append(f"{kfac.plan.fingerprint():x}")
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in net.named_parameters()}
    return {n: p.detach() for n, p in full.items()}, plans, [str(one.message) for one in said]


@pytest.mark.parametrize(
    ("layout", "placement", "ranks", "muon"),
    [
        ("plain", MemOpt(), 2, False),
        ("plain", CommOpt(), 2, True),
        ("ddp", MemOpt(), 3, False),
        ("ddp", MemOpt(), 2, True),
        ("fsdp", None, 2, False),
    ],
)
def test_unfreezing_on_ranks_is_unfreezing_in_one_process(world, layout, placement, ranks, muon):
    head = layout == "plain"  # which DDP and FSDP would not know
    results = world.run(unfrozen, layout, placement, ranks, muon, head, ranks=ranks)
    expected, plans, _ = unfrozen("alone", None, ranks, muon, head)
    assert len(set(plans)) == 4
    for weights, its, said in results:
        assert its == results[0][1]
        assert len(set(its)) == len(set(plans))
        assert said == []
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-11, msg=name)


def changed_on_one_rank(freezes: bool) -> str:
    model = network()
    if not freezes:
        model[0].requires_grad_(False)
    kfac = KFAC(model, kl_clip=None, update_every=4)
    x, y = samples(0, dist.get_rank())
    for step in range(2):
        if step == 1 and dist.get_rank() == 1:
            model[0].requires_grad_(not freezes)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        try:
            kfac.step()
        except SettingError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("freezes", [False, True])
def test_a_change_on_one_rank_alone_is_refused_by_all(world, freezes):
    said = world.run(changed_on_one_rank, freezes, ranks=2)
    for rank, word in enumerate(("is as it was", "has changed")):
        assert f"not on all ranks alike (on rank {rank} it {word})" in said[rank]


def unfrozen_behind_ddp(wrapped_again: bool) -> str:
    net = network()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    kfac = KFAC(model, kl_clip=None, update_every=1)
    x, y = samples(0, dist.get_rank())
    for step in range(4):
        if step == 1:
            net[0].requires_grad_(True)
            if wrapped_again:
                model = DistributedDataParallel(net)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        try:
            kfac.step()
        except SettingError as error:
            return str(error)
    return f"{len(kfac.blocks)} blocks"


@pytest.mark.parametrize("wrapped_again", [False, True])
def test_what_ddp_does_not_average_is_refused(world, wrapped_again):
    for said in world.run(unfrozen_behind_ddp, wrapped_again, ranks=2):
        if wrapped_again:
            assert said == "4 blocks"
        else:
            assert "The gradient of '0.0.weight' is another one on every rank, as DDP" in said
