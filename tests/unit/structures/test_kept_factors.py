"""What structures keep: what depends on the scale of the loss, and how much is too much."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from natgrad import EKFAC, KFAC, Diagonal, Full, Kronecker, UnitWise
from natgrad.errors import CoverageError

STRUCTURES = [
    Kronecker(),
    Kronecker("reduce"),
    Kronecker("traces"),
    EKFAC(),
    EKFAC(sharing="traces"),
    UnitWise(),
    Diagonal(),
    Full(),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_factors_of_a_sum_are_those_of_the_mean(structure):
    """Gradients of a sum over six samples are six times as long; inputs are what they are. The tied
    weight has both in each of its factors."""
    kept = {}
    for reduction, loss in (("mean", natgrad.MeanLoss()), ("sum", natgrad.SumLoss())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
        model[2].weight = model[0].weight
        model.double()
        kfac = KFAC(
            model,
            kl_clip=None,
            structure=structure,
            loss=loss,
            inverse=natgrad.Eigen(),
            update_every=1,
            refresh_every=1,
        )
        tokens, targets = torch.randint(5, (2, 6))
        F.cross_entropy(model(tokens), targets, reduction=reduction).backward()
        kfac.step()
        kept[reduction] = {
            (block.name, name): numbers
            for block in kfac.blocks
            for name, numbers in block.kept().items()
        }
    assert len(kept["mean"]) >= 2
    for name, numbers in kept["mean"].items():
        torch.testing.assert_close(kept["sum"][name], numbers, rtol=1e-9, atol=1e-12)


def test_a_limit_is_the_largest_that_is_taken():
    model = nn.Linear(4, 3)
    (block,) = KFAC(model, kl_clip=None, structure=Full(limit=15)).blocks
    assert block.forms["F"].dim == 15
    with pytest.raises(CoverageError, match=r"has 15 x 15 entries .* above the limit of 14 param"):
        KFAC(model, kl_clip=None, structure=Full(limit=14))
