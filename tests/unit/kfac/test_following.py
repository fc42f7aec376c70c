"""A model that changes while it is trained: blocks follow it, or say what they no longer cover."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD

from natgrad import KFAC
from natgrad.errors import CoverageError

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def step(model: nn.Module, kfac: KFAC) -> dict[str, torch.Tensor]:
    """Returns the plain gradients."""
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    kfac.step()
    return plain


def started(model: nn.Module) -> KFAC:
    kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1)
    step(model, kfac)
    return kfac


def unfreeze(model):
    model[2].weight.requires_grad_(True)


def replace(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def resize(model):
    """Its outputs, and with them the inputs of the next layer."""
    for index, axis in ((2, 0), (4, 1)):
        weight = model[index].weight
        weight.data, weight.grad = torch.cat([weight.data] * 2, axis), None
    model[2].bias.data, model[2].bias.grad = model[2].bias.data.repeat(2), None
    model[2].out_features = model[4].in_features = 16


def pruned(model):
    prune.l1_unstructured(model[2], "weight", 0.5)


def replace_module(model):
    model[2] = nn.Linear(8, 8)


def load_by_assignment(model):
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


def freeze_weight(model):
    model[2].weight.requires_grad_(False)


LOST = {
    replace: ("Linear '2' keeps its plain gradient.* was replaced after", ["2.weight"]),
    resize: ("2.weight was resized after KFAC was made", ["2.weight", "4.bias"]),
    pruned: ("2.weight_orig was pruned or parametrised after", ["2.weight_orig", "2.bias"]),
    replace_module: ("Linear '2' keeps its plain gradient", ["2.weight", "2.bias"]),
    freeze_weight: ("2.weight was frozen after KFAC was made: make a new KFAC", ["2.bias"]),
}


@pytest.mark.parametrize("change", LOST, ids=lambda change: change.__name__)
def test_what_is_no_longer_covered_is_said(change):
    message, left = LOST[change]
    model = net()
    kfac = started(model)
    change(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plain = step(model, kfac)
    assert any(re.search(message, str(one.message)) for one in told)
    assert len(told) == (2 if change is resize else 1)
    uncovered = kfac.coverage().uncovered
    now = dict(model.named_parameters())
    for name in left:
        assert torch.equal(now[name].grad, plain[name])
        assert "KFAC was made" in uncovered[name]
    assert not torch.allclose(now["0.weight"].grad, plain["0.weight"])
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        step(model, kfac)
    kfac.detach()
    again = KFAC(model, kl_clip=None, update_every=1, refresh_every=1)  # the cure that was named
    plain = step(model, again)
    if change is not pruned:  # whose weight is no parameter of the layer any more
        assert not torch.allclose(now[left[-1]].grad, plain[left[-1]])


def test_a_model_without_any_parameter_that_it_had_is_refused():
    model = net()
    kfac = started(model)
    load_by_assignment(model)
    with pytest.raises(CoverageError, match=r"No block of KFAC belongs.*\(assign=True"):
        step(model, kfac)


def test_an_unfrozen_parameter_is_told_of():
    model = net()
    model[2].weight.requires_grad_(False)
    kfac = started(model)
    assert kfac.coverage().uncovered == {"2.weight": "frozen"}
    unfreeze(model)
    with pytest.warns(UserWarning, match="'2.weight' were frozen, or not there, when KFAC was"):
        plain = step(model, kfac)
    assert torch.equal(model[2].weight.grad, plain["2.weight"])
    assert kfac.coverage().uncovered == {"2.weight": "frozen when KFAC was made"}
    assert not torch.allclose(model[2].bias.grad, plain["2.bias"])


def test_a_new_parameter_is_told_of():
    model = net()
    kfac = started(model)
    model.append(nn.Linear(3, 3))
    with pytest.warns(UserWarning, match="'5.weight' and 1 others were frozen, or not there"):
        step(model, kfac)
    assert kfac.coverage().uncovered["5.bias"] == "not there when KFAC was made"


@pytest.mark.filterwarnings("error")
def test_a_layer_that_is_frozen_as_a_whole_and_comes_back():
    """As the parts of a GAN are; nothing is lost, so there is nothing to say."""
    model = net()
    kfac = started(model)
    model[2].requires_grad_(False)
    plain = step(model, kfac)
    assert kfac.coverage().uncovered == {"2.weight": "frozen", "2.bias": "frozen"}
    assert not torch.allclose(model[0].weight.grad, plain["0.weight"])
    model[2].requires_grad_(True)
    plain = step(model, kfac)
    assert kfac.coverage().uncovered == {}
    assert not torch.allclose(model[2].weight.grad, plain["2.weight"])


@pytest.mark.filterwarnings("error")
def test_a_copy_has_not_changed():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer)
    step(model, kfac)
    twin, _, its = copy.deepcopy((model, optimizer, kfac))
    step(twin, its)
    assert its.coverage().uncovered == {"0.weight": "frozen"}


def test_an_untied_module_gives_no_statistics_to_the_weight_that_it_had():
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)))
    model[1].weight = model[2].weight
    kfac = started(model)
    (block,) = [b for b in kfac.blocks if len(b.layers) == 2]
    model[2].weight = nn.Parameter(torch.randn(5, 5) / 3)
    with pytest.warns(UserWarning, match="'2.weight' were frozen, or not there"):
        step(model, kfac)
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    assert block.sums["A"].count == len(X)
