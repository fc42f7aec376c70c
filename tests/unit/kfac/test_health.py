"""What goes wrong silently is said once, after the first refreshes, and shown as a table."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import KFAC, Cholesky, MeanLoss, NaturalMuon, Relative, SumLoss
from natgrad.curvature import GaussNewton
from natgrad.kfac import health as room
from natgrad.kfac.stacks import Stack
from natgrad.lengths import Graft


class OwnWave(nn.Module):
    """No layer computes this."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))

    def forward(self, x):
        return x + torch.sin(x @ self.weight)


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), *more, nn.Linear(16, 4))


def trained(model=None, *, steps=room.SPEAKS_AT, pause=None, **settings):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kfac = KFAC(model, optimizer, **settings)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 12, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        if pause is not None:
            pause(kfac)
        kfac.step()
        optimizer.step()
    return kfac


def row(table, name):
    return next(row for row in table.rows if row[0] == name)


def test_all_is_well():
    kfac = trained()  # without a warning
    assert not kfac.monitor.open
    table = kfac.health()
    assert not table.problems
    assert set(table.column("verdict")) == {"ok"}
    assert row(table, "loss")[1] == "found: a mean over 32 terms"
    assert all(0 < cosine < 0.99 for cosine in table.cosines.values())
    assert all(1e-4 < share < 0.95 for share in table.damped.values())
    assert set(table.cosines) == {"0", "2"}
    assert "0 of 7 need a look" in str(table)


def test_cosine_and_share_of_the_damping_beside_dense_matrices():
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    kfac = KFAC(model, kl_clip=None, damping=0.02)
    x = torch.randn(16, 5, dtype=torch.float64)
    F.cross_entropy(model(x), torch.arange(16) % 3).backward()
    raw = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1).flatten()
    kfac.step()
    (block,) = kfac.blocks
    kept = block.structure.matrices(block.kept(), block.forms)
    g, a = (block.forms[n].dense(kept[n])[0] for n in ("G", "A"))
    whole = torch.kron(g, a) + 0.02 * torch.eye(18, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(whole)
    along = (vectors.T @ raw).square()
    table = kfac.health()
    step = torch.linalg.solve(whole, raw)
    assert table.cosines[block.name] == pytest.approx(float(F.cosine_similarity(step, raw, 0)))
    expected = float((along * 0.02 / values).sum() / along.sum())
    assert table.damped[block.name] == pytest.approx(expected)


def said(**settings):
    with pytest.warns(UserWarning, match="After 50 steps K-FAC may not work") as seen:
        kfac = trained(**settings)
    texts = [str(one.message) for one in seen if "may not work" in str(one.message)]
    assert len(texts) == 1
    return kfac, texts[0]


def test_too_much_damping():
    kfac, text = said(damping=100.0)
    assert "The curvature is far below the damping" in text
    assert "Gradients are hardly turned, in 100% of parameters" in text
    table = kfac.health()
    assert min(table.cosines.values()) > 0.99
    assert row(table, "curvature")[2] == "too much damping"
    assert row(table, "direction")[2] == "same as plain"
    # Said once, and not again.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.cross_entropy(kfac.model(torch.randn(8, 12)), torch.arange(8) % 4).backward()
        kfac.step()


def test_too_little_damping():
    kfac, text = said(damping=1e-12, kl_clip=1e-6)
    assert "The curvature is far above the damping" in text
    assert row(kfac.health(), "curvature")[2] == "too little damping"


@pytest.mark.parametrize("damping", [100.0, 1e-12])
def test_advice_on_the_damping_is_of_what_was_given(damping):
    """Who has not passed a loss cannot leave it out."""
    change = "Lower it" if damping > 1 else "Raise it"
    for loss in (None, MeanLoss()):
        table = trained(steps=2, damping=damping, kl_clip=1e-6, loss=loss).health()
        advice = row(table, "curvature")[3]
        assert advice.startswith(f"{change}, ")
        assert "damping=natgrad.Relative()" in advice
        assert ("leave loss=... out" in advice) == (loss is not None)


def test_gradients_that_are_hardly_turned_come_with_what_to_do():
    advice = row(trained(steps=2, damping=100.0).health(), "direction")[3]
    assert advice.startswith("Lower the damping or pass damping=natgrad.Relative()")
    advice = row(trained(steps=2, damping=Relative(1e4)).health(), "direction")[3]
    assert advice == "Lower the damping, or batches are too small to show any curvature."


def test_a_scale_that_does_not_matter_is_not_waited_for():
    model = network()
    optimizer = NaturalMuon(model)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 12)), torch.arange(8) % 4).backward()
        optimizer.step()
    found = row(optimizer.kfac.health(), "loss")
    assert found[1:3] == ("not looked for, as its scale does not matter here", "ok")
    assert row(KFAC(network(), kl_clip=None).health(), "loss")[1] == "not seen yet"


def test_residuals_say_what_the_loss_is():
    model = network()
    kfac = KFAC(model, kl_clip=None, curvature=GaussNewton())
    kfac.residuals(model(torch.randn(8, 12))).backward()
    kfac.step()
    assert row(kfac.health(), "loss")[1] == "as residuals(...) say"


def test_low_coverage_is_said_unless_it_is_meant():
    _, text = said(model=network(OwnWave(16), nn.Flatten()), exclude="0")
    assert "preconditioned, not OwnWave" in text
    assert "natgrad.register()" in text
    trained(exclude="0")


def test_statistics_that_never_arrive():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = network(), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    _, text = said(model=Two())
    assert "1 of 3 blocks have none ('unused')" in text


def test_a_refresh_that_costs_more_than_ten_steps():
    def pause(kfac):
        kfac.monitor.first_refresh = 60.0

    _, text = said(pause=pause)
    assert "Refreshes are expensive: the first refresh took" in text
    assert "refresh_every" in text


def test_an_unknown_scale_with_an_absolute_damping():
    model = network()
    kfac = KFAC(model, kl_clip=None, damping=0.1)
    model(torch.randn(8, 12)).square().mean().backward()
    kfac.step()
    found = row(kfac.health(), "loss")
    assert found[2] == "unknown"
    assert "leave that out" in found[3]
    assert "likelihood=natgrad.curvature.Gaussian()" in found[3]


@pytest.mark.parametrize("loss", [MeanLoss(), SumLoss()], ids=["MeanLoss", "SumLoss"])
def test_before_anything_was_seen(loss):
    table = KFAC(network(), kl_clip=None, loss=loss).health()
    assert not table.problems
    assert not table.cosines
    assert row(table, "direction")[1].startswith("not looked at yet")
    assert row(table, "loss")[1].startswith(f"as said: {type(loss).__name__}")


@pytest.mark.parametrize(
    "settings",
    [{"damping": Relative(0.1)}, {"length": Graft()}, {"inverse": Cholesky()}],
    ids=["relative", "graft", "cholesky"],
)
def test_of_other_settings(settings):
    table = trained(**settings).health()
    assert not table.problems
    assert len(table.cosines) == 2
    assert bool(table.damped) == ("inverse" in settings)


def test_steps_that_are_not_looked_at_compute_nothing(monkeypatch):
    seen = []
    original = Stack._products

    def products(self):
        seen.append(kfac.steps)
        return original(self)

    monkeypatch.setattr(Stack, "_products", products)
    model = network()
    kfac = KFAC(model, kl_clip=None, refresh_every=4, update_every=2)
    for step in range(40):
        model.zero_grad()
        F.cross_entropy(model(torch.randn(8, 12)), torch.arange(8) % 4).backward()
        kfac.step()
        if step == 32:
            kfac.health()  # asks for the next one
    assert sorted(set(seen)) == [0, 4, 8, 12, 16, 20, 36]
