"""Running averages of factors and how far they move, against matrices written out."""

import pytest
import torch

from natgrad.capture.averages import NewEstimate, RunningFactor
from natgrad.capture.change_rates import FactorChanges
from natgrad.linalg.forms import Triangle

DECAY = 0.6


def test_an_average_without_bias_and_how_far_it_moves():
    """``sum_t decay^(T - t) X_t / sum_t decay^(T - t)``, with sums of new data that are no means
    yet, of which one is not finite and left out."""
    form, device = Triangle(3), torch.device("cpu")
    running = {"A": RunningFactor(form, torch.float64, device)}
    changes = FactorChanges(form)
    data = torch.randn(5, 7, 3, dtype=torch.float64)
    data[2, 0, 0] = float("nan")
    means, average, shown = [], None, []
    for step, rows in enumerate(data):
        total = torch.zeros(form.numel, dtype=torch.float64)
        form.add_rows(total, rows[None])
        new = NewEstimate(running, {"A": (total, 1 / 7)})
        assert bool(new.finite) == (step != 2)
        own = running["A"]
        if new.finite:
            changes.add(step, own.mean, own.weight, new.gaps["A"], DECAY)
        new.fold(new.finite, DECAY)
        if step != 2:
            means.append(rows.mT @ rows / 7)
            weights = [DECAY ** (len(means) - 1 - i) for i in range(len(means))]
            before = average
            average = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
            if before is not None:
                moved = float((average - before).norm() / before.norm())
                gap = float((means[-1] - means[-2]).norm() / means[-2].norm())
                shown.append((step, gap, moved))
        torch.testing.assert_close(form.dense(own.mean)[0], average)
    found = [(one.step, one.estimate, one.average) for one in changes.found]
    assert [step for step, _, _ in found] == [1, 3, 4]
    for one, other in zip(found, shown, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def test_nothing_to_compare_with():
    """After a pause the next update is a first one, and one after no curvature is infinite."""
    form = Triangle(1)
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    changes = FactorChanges(form)
    changes.add(0, none, none, none, DECAY)
    changes.forget()
    changes.add(1, none, none, none, DECAY)
    assert changes.found == []
    changes.add(2, none, one, -one, DECAY)
    assert [(c.step, c.estimate) for c in changes.found] == [(2, float("inf"))]
