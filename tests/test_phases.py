"""K-FAC switched on or off by phase: it gets only weights (Pauloski 2022, sec. 6.3.3)."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, AdamW

from natgrad import KFAC
from natgrad.lab.schemes import LAMB, parameter_groups
from training_loops import NETS, assert_equal, factors, hooks, often

OPTIMIZERS = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "lamb": lambda model: LAMB(parameter_groups(model, 0.01), lr=0.01),
}


def steps(net, model, optimizer, kfac, numbers):
    for number in numbers:
        x, y = net.batch(seed=number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("net", ["mlp", "tied"])
def test_off_on_off_on(net, name):
    """Each phase, with the optimizer's state going on, is bit for bit what a copy of model and
    optimizer does that has never seen another."""
    net, made = NETS[net], OPTIMIZERS[name]
    model = net.model()
    optimizer = made(model)
    found = []
    for phase in range(4):
        on, numbers = phase % 2 == 1, range(3 * phase, 3 * phase + 3)
        twin = net.model()
        twin.load_state_dict(model.state_dict())
        its = made(twin)
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        its_kfac = KFAC(twin, its, **often()) if on else None
        steps(net, twin, its, its_kfac, numbers)

        assert hooks(model) == 0
        kfac = KFAC(model, optimizer, **often()) if on else None
        steps(net, model, optimizer, kfac, numbers)
        if kfac is not None:
            assert kfac.steps == 3
            assert_equal(factors(kfac), factors(its_kfac))
            found.append(factors(kfac))
            kfac.detach()
        assert_equal(list(model.parameters()), list(twin.parameters()))
    # The second one begins with no curvature, not with that of the first.
    assert any(not torch.equal(found[0][key], found[1][key]) for key in found[0])
