"""Lookahead by hand."""

import pytest
import torch
from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.schemes import Lookahead


def descend(optimizer, w, steps):
    """The weight after each step under a gradient of 1."""
    found = []
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        optimizer.step()
        found.append(w.item())
    return found


def test_two_rounds_by_hand():
    w = nn.Parameter(torch.tensor([8.0]))
    optimizer = Lookahead(torch.optim.SGD([w], lr=1.0), every=4, alpha=0.25)
    # Forward to 4, of which a quarter of the way stays; then the same from 7.
    assert descend(optimizer, w, 8) == [7, 6, 5, 7, 6, 5, 4, 6]


def test_the_momentum_within_goes_on():
    w = nn.Parameter(torch.tensor([0.0]))
    optimizer = Lookahead(torch.optim.SGD([w], lr=1.0, momentum=0.5), every=2, alpha=0.5)
    # Steps of 1, 1.5, 1.75, 1.875: to -2.5, back to -1.25, then by 3.625 and half of it back.
    assert descend(optimizer, w, 4) == [-1, -1.25, -3.0, -1.25 - 3.625 / 2]


@pytest.mark.parametrize(("every", "alpha"), [(1, 1.0), (3, 1.0)])
def test_all_of_the_way_is_the_optimizer_itself(every, alpha):
    w = nn.Parameter(torch.tensor([8.0]))
    found = descend(Lookahead(torch.optim.SGD([w], lr=1.0), every, alpha), w, 5)
    assert found == [7, 6, 5, 4, 3]


def test_changes_between_rounds_are_kept():
    w = nn.Parameter(torch.tensor([8.0]))
    optimizer = Lookahead(torch.optim.SGD([w], lr=1.0), every=2)
    descend(optimizer, w, 2)
    with torch.no_grad():
        w.fill_(100.0)
    w.grad = None
    optimizer.step()  # sets out without a gradient
    assert descend(optimizer, w, 1) == [99.5]
    assert descend(optimizer, w, 2) == [98.5, 98.5]


def test_gradients_that_are_missing_at_times():
    w, other = nn.Parameter(torch.tensor([8.0])), nn.Parameter(torch.tensor([0.0]))
    optimizer = Lookahead(torch.optim.Adam([w, other], lr=1.0), every=2)
    found = []
    for missing in (True, False, False, True, True, True, False, False):
        w.grad, other.grad = None if missing else torch.ones(1), torch.ones(1)
        optimizer.step()
        found.append(round(w.item(), 4))
    # Adam's steps are of 1; what has moved in a round goes half of it back, whether or not the
    # last gradient of the round is there.
    assert found == [8, 7.5, 6.5, 7, 7, 7, 6, 6]


def test_errors():
    w = nn.Parameter(torch.ones(1))
    with pytest.raises(
        SettingError, match=r"Lookahead.every is 0 but must be a whole number of at"
    ):
        Lookahead(torch.optim.SGD([w], lr=1.0), every=0)
    with pytest.raises(SettingError, match=r"Lookahead.alpha is 0 but must be in \(0, 1\]: pass"):
        Lookahead(torch.optim.SGD([w], lr=1.0), alpha=0)
