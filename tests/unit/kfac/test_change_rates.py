"""Change rates of factors (Osawa 2019, eq. 19), by hand, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import EKFAC, KFAC, Kronecker

DECAY, STEPS = 0.6, 4


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        yield torch.randn(6, 5, generator=generator, dtype=torch.float64)


def trained(structure):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    kfac = KFAC(
        model,
        kl_clip=None,
        factor_decay=DECAY,
        structure=structure,
        update_every=1,
        refresh_every=2,
    )
    rates = kfac.track_changes()
    for x in batches():
        model.zero_grad()
        F.mse_loss(model(x), torch.zeros(6, 3, dtype=torch.float64)).backward()
        kfac.step()
    return kfac, rates


def by_hand(estimates):
    """Of matrices written out: of each estimate, and of the bias-corrected average."""
    found, average, weight = [], None, 0.0
    for step, new in enumerate(estimates):
        weight = DECAY * weight + 1 - DECAY
        share = (1 - DECAY) / weight
        moved = new if average is None else average + share * (new - average)
        if step:
            before = estimates[step - 1]
            of_estimate = (new - before).norm() / before.norm()
            found.append((step, of_estimate, (moved - average).norm() / average.norm()))
        average = moved
    return found


@pytest.mark.parametrize("block", [None, 2], ids=["whole", "in blocks"])
def test_they_are_frobenius_norms_of_estimates_and_of_averages(block):
    _, rates = trained(Kronecker(input_block=block))
    inputs = [torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], 1) for x in batches()]
    estimates = [x.mT @ x / 6 for x in inputs]
    if block:
        mask = torch.block_diag(*[torch.ones(2, 2, dtype=torch.float64)] * 3)
        estimates = [estimate * mask for estimate in estimates]
    found = [(c.step, c.estimate, c.average) for c in rates.found["", "A"]]
    for one, other in zip(found, by_hand(estimates), strict=True):
        assert one == pytest.approx([float(number) for number in other], rel=1e-12)


def test_they_are_shown_and_stopped():
    kfac, rates = trained(EKFAC())
    assert rates.found.keys() == {("", "A"), ("", "G")}  # and nothing in a basis that changes
    shown = str(rates)
    assert f"{rates.found['', 'G'][-1].estimate:.3g}" in shown
    rates.stop()
    x = next(batches())
    F.mse_loss(kfac.model(x), torch.zeros(6, 3, dtype=torch.float64)).backward()
    kfac.step()
    assert len(rates.found["", "A"]) == STEPS - 1
