"""NaturalMuon is an optimizer like any other."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from natgrad import KFAC, MonteCarloFisher, NaturalMuon, Rms, Spectral
from natgrad.errors import CheckpointError, NatgradError, SettingError
from natgrad.linalg.polar import exact_polar


def network(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 25, 10),
        nn.LayerNorm(10),
        nn.Tanh(),
        nn.Linear(10, 3),
    ).to(dtype)


def batch(step, n=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(n, 1, 5, 5, dtype=torch.float64, generator=generator)
    return x.to(dtype), torch.randint(3, (n,), generator=generator)


def loss_of(model, step, **more):
    x, y = batch(step, dtype=next(model.parameters()).dtype)
    return F.cross_entropy(model(x), y, **more)


def train(model, optimizer, steps, scheduler=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_learns():
    model = network()
    optimizer = NaturalMuon(model)
    before = loss_of(model, 0).item()
    train(model, optimizer, [0] * 60)
    assert loss_of(model, 0).item() < 0.05 * before


def test_is_the_step_of_a_preconditioner_and_adamw_for_the_rest():
    """Beside the two by hand, with a decay and other rates in a group."""
    one, other = network(), network()
    head = [p for n, p in one.named_parameters() if n.startswith("7")]
    rest = [p for n, p in one.named_parameters() if not n.startswith("7")]
    groups = [{"params": head, "lr": 0.03, "weight_decay": 0.2}, {"params": rest}]
    optimizer = NaturalMuon(one, 0.02, params=groups, weight_decay=0.1, refresh_every=2)
    assert {b.name for b in optimizer.kfac.blocks} == {"0", "4", "7"}
    kfac = KFAC(
        other,
        geometry=Spectral(),
        length=Rms(),
        momentum=0.9,
        damping=natgrad.Relative(0.1),
        update_every=4,
        refresh_every=2,
        exclude=["1", "5"],
    )
    norms = [p for i in (1, 5) for p in other[i].parameters()]
    adamw = torch.optim.AdamW(norms, 0.02, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        for model in (one, other):
            model.zero_grad()
            loss_of(model, step).backward()
        optimizer.step()
        kfac.step()
        adamw.step()
        with torch.no_grad():
            for name, p in other.named_parameters():
                if name[0] in "047":
                    lr, decay = (0.03, 0.2) if name[0] == "7" else (0.02, 0.1)
                    p.mul_(1 - lr * decay).sub_(lr * p.grad)
        assert (flat(one) - flat(other)).abs().max() <= 1e-11


def test_the_learning_rate_is_how_far_weights_move():
    model = network()
    optimizer = NaturalMuon(model, 0.3, momentum=0.0)
    before = [p.detach().clone() for p in model[4].parameters()]
    train(model, optimizer, [0])
    moved = torch.cat(
        [(p - b).flatten() for p, b in zip(model[4].parameters(), before, strict=True)]
    )
    assert abs(moved.detach().square().mean().sqrt().item() - 0.3) < 1e-12


def test_a_scheduler_is_obeyed():
    model = network()
    optimizer = NaturalMuon(model, 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 2))
    train(model, optimizer, range(2), scheduler)
    before = flat(model)
    train(model, optimizer, range(2, 4), scheduler)
    assert torch.equal(flat(model), before)


def test_a_closure_is_called_once():
    one, other = network(), network()
    by_closure, plain = NaturalMuon(one), NaturalMuon(other)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        by_closure.zero_grad()
        value = loss_of(one, len(calls))
        value.backward()
        return value

    values = [by_closure.step(closure) for _ in range(3)]
    train(other, plain, range(1, 4))
    assert calls == [True] * 3
    assert all(isinstance(value, torch.Tensor) for value in values)
    assert torch.equal(flat(one), flat(other))


def test_passes_are_accumulated():
    """In evaluation mode, so that batch norm sees no batches."""
    one, other = network().eval(), network().eval()
    whole, parts = NaturalMuon(one, update_every=1), NaturalMuon(other, update_every=1)
    for step in range(4):
        x, y = batch(step)
        whole.zero_grad()
        F.cross_entropy(one(x), y).backward()
        whole.step()
        parts.zero_grad()
        for some in (slice(0, 3), slice(3, 12)):
            (F.cross_entropy(other(x[some]), y[some], reduction="sum") / 12).backward()
        parts.step()
    assert torch.allclose(flat(one), flat(other), rtol=0, atol=1e-11)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_changes_nothing(told, clips):
    one, other = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaled = NaturalMuon(one, scaler=scaler if told else None)
    plain = NaturalMuon(other)
    for step in range(6):
        scaled.zero_grad()
        scaler.scale(loss_of(one, step)).backward()
        if clips:
            scaler.unscale_(scaled)
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        scaler.step(scaled)
        scaler.update()
        plain.zero_grad()
        loss_of(other, step).backward()
        if clips:
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        plain.step()
    assert torch.allclose(flat(one), flat(other), rtol=0, atol=1e-9)


@pytest.mark.parametrize("told", [False, True])
def test_a_step_that_a_scaler_skips(told):
    """Infinite gradients move nothing, enter nothing, and lower the scale."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    optimizer = NaturalMuon(model, scaler=scaler if told else None, update_every=1)
    for step in range(5):
        optimizer.zero_grad()
        value = loss_of(model, step)
        if step == 2:
            before, scale = flat(model), scaler.get_scale()
            value = value * float("inf")
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert torch.equal(flat(model), before)
            assert scaler.get_scale() == scale / 2
    assert torch.isfinite(flat(model)).all()
    assert not torch.equal(flat(model), before)
    state = optimizer.state_dict()["kfac"]["blocks"]["4"]
    assert all(torch.isfinite(t).all() for t in state["moments"].values())
    assert all(torch.isfinite(f["mean"]).all() for f in state["factors"].values())


@pytest.mark.parametrize(
    "geometry", [Spectral(), Spectral(power=0), natgrad.geometry.Elementwise()]
)
def test_goes_on_from_its_state_bit_by_bit(geometry, tmp_path):
    one = network()
    optimizer = NaturalMuon(one, geometry=geometry, refresh_every=3)
    train(one, optimizer, range(5))
    torch.save((one.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = network(seed=1)
    other.load_state_dict(weights)
    resumed = NaturalMuon(other, 0.5, geometry=geometry, refresh_every=3)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["lr"] == 0.01
    for model, this in ((one, optimizer), (other, resumed)):
        train(model, this, range(5, 9))
    assert torch.equal(flat(one), flat(other))


def test_a_state_that_does_not_fit_changes_nothing():
    model = network()
    optimizer = NaturalMuon(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(SettingError, match=r"no kfac, so it is of another optimizer: pass"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    without = NaturalMuon(network(), momentum=0.0)
    with pytest.raises(CheckpointError, match=r"keeps no momentum between steps, but KFAC mom"):
        optimizer.load_state_dict(without.state_dict())
    assert str(optimizer.state_dict()) == str(before)


def test_a_copy_goes_on_as_the_original():
    model = network()
    optimizer = NaturalMuon(model)
    train(model, optimizer, range(3))
    copied, twin = copy.deepcopy((model, optimizer))
    assert twin.kfac.model is copied
    for each, this in ((model, optimizer), (copied, twin)):
        train(each, this, range(3, 7))
    assert torch.equal(flat(model), flat(copied))


def test_muon_measures_no_curvature():
    """Beside ten lines that do the same, and with no hook on any layer."""
    one, other = network(), network()
    optimizer = NaturalMuon(one, 0.02, geometry=Spectral(power=0, floor=1e-9))
    assert not optimizer.kfac.capture.armed
    mean = torch.zeros(10, 101, dtype=torch.float64)
    optimizer.zero_grad()
    for step in range(3):
        other.load_state_dict(one.state_dict())
        other.zero_grad()
        loss_of(other, step).backward()
        train(one, optimizer, [step])
        gradient = torch.cat([other[4].weight.grad, other[4].bias.grad[:, None]], 1)
        mean.lerp_(gradient, 0.1)
        ahead = 0.1 * gradient + 0.9 * mean / (1 - 0.9 ** (step + 1))
        direction = exact_polar(ahead.unsqueeze(0))[0]
        expected = 0.02 * direction / direction.square().mean().sqrt()
        assert torch.allclose(one[4].weight, other[4].weight - expected[:, :-1], atol=1e-9)
    assert not any(b.running or b.parts for b in optimizer.kfac.blocks)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "mapping", "logits"])
def test_the_fisher_of_drawn_labels_sees_the_output_for_itself(kind):
    class Logits:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            out = self.inner(x)
            kinds = {"tensor": out, "tuple": (out, x), "mapping": {"aux": x, "logits": out}}
            return kinds.get(kind, Logits(out))

    def logits(out):
        return {"tensor": lambda: out, "tuple": lambda: out[0]}.get(
            kind, lambda: out["logits"] if isinstance(out, dict) else out.logits
        )()

    found = []
    for explicit in (False, True):
        model = Wrapped(network())
        optimizer = NaturalMuon(model, curvature=MonteCarloFisher(seed=3), update_every=2)
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            out = logits(model(x))
            if explicit:
                optimizer.kfac.observe(out)
            F.cross_entropy(out, y).backward()
            optimizer.step()
        found.append(flat(model))
    assert torch.equal(*found)


def test_what_is_frozen_or_not_there_stays():
    model = network()
    model[0].requires_grad_(False)
    optimizer = NaturalMuon(model)
    before = [p.detach().clone() for p in model[0].parameters()]
    train(model, optimizer, range(2))
    assert all(torch.equal(p, b) for p, b in zip(model[0].parameters(), before, strict=True))
    # It has its place all the same, so that a state fits before and after it is unfrozen.
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert not any(p in optimizer.state for p in model[0].parameters())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0 but must be finite and at least 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0 but must be finite and at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas is 1.0 but must be in \[0, 1\)"),
        ({"momentum": 2}, r"momentum is 2 but must be in \[0, 1\)"),
        ({"geometry": "spectral"}, "geometry is 'spectral' but must be a geometry"),
        ({"exclude": "nothing"}, "nothing"),
    ],
)
def test_a_mistake_is_a_sentence(given, message):
    with pytest.raises(NatgradError, match=message):
        NaturalMuon(network(), **given)


def test_two_of_them_on_one_model_do_not_see_each_other():
    """The vectors that one sends back for its Fisher are no gradients to the other."""
    found = []
    for both in (False, True):
        model = network()
        plain = KFAC(model, kl_clip=None, update_every=1)
        other = KFAC(model, kl_clip=None, curvature=MonteCarloFisher(), update_every=1)
        if not both:
            other.detach()
        for step in range(2):
            model.zero_grad()
            loss_of(model, step).backward()
            plain.step()
        state = plain.state_dict()["blocks"]
        found.append(
            {n: b["factors"]["G"]["mean"] for n, b in state.items() if "G" in b["factors"]}
        )
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
