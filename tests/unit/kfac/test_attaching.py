"""One line, ``KFAC(model, optimizer).attach()``, is the two lines in any loop."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, AdamW

import natgrad
from natgrad import KFAC, MonteCarloFisher, NaturalMuon
from natgrad.errors import CaptureError, CheckpointError, SettingError

OFTEN = {"update_every": 1, "refresh_every": 2}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def batch(seed, n=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)


def loss_of(model, seed):
    x, y = batch(seed)
    return F.cross_entropy(model(x), y)


def adamw(model):
    return AdamW(model.parameters(), lr=0.02)


def momentum(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Plain:
    """``step()`` of the two lines and of the one, in the same loop."""

    def __init__(self, attached, make=momentum, scaler=None, **settings):
        self.model, self.attached, self.scaler = network(), attached, scaler
        self.optimizer = make(self.model)
        told = {} if attached else {"scaler": scaler}
        self.kfac = KFAC(self.model, self.optimizer, **{**OFTEN, **settings}, **told)
        if attached:
            assert self.kfac.attach() is self.kfac

    def step(self, clips=False):
        if clips and self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if not self.attached:
            self.kfac.step()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def accumulated(run, seed):
    for micro in range(3):
        (loss_of(run.model, 10 * seed + micro) / 3).backward()
    run.step()


def clipped(run, seed):
    loss_of(run.model, seed).backward()
    run.step(clips=True)


def half(run, seed):
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(run.model, seed)
    loss.backward()
    run.step()


def scaled(run, seed):
    run.scaler.scale(loss_of(run.model, seed)).backward()
    run.step()


def scaled_and_clipped(run, seed):
    run.scaler.scale(loss_of(run.model, seed)).backward()
    run.step(clips=True)


def plain(run, seed):
    loss_of(run.model, seed).backward()
    run.step()


@pytest.mark.parametrize("curvature", [None, MonteCarloFisher(seed=1)], ids=["empirical", "drawn"])
@pytest.mark.parametrize("one", [plain, accumulated, clipped, half, scaled, scaled_and_clipped])
@pytest.mark.parametrize("make", [adamw, momentum])
def test_is_the_two_lines(one, make, curvature):
    """Bit by bit; a scaler that nobody tells of is found."""
    runs = []
    for attached in (False, True):
        scaler = None
        if one in (scaled, scaled_and_clipped):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        run = Plain(attached, make, scaler, curvature=curvature)
        for seed in range(5):
            run.optimizer.zero_grad()
            one(run, seed)
        assert run.kfac.steps == 5
        runs.append(run)
    if curvature is not None and runs[0].scaler is not None:
        # The first vectors that are sent back are not scaled yet: the same up to rounding.
        torch.testing.assert_close(flat(runs[0].model), flat(runs[1].model))
    else:
        assert torch.equal(flat(runs[0].model), flat(runs[1].model))


def test_a_fused_optimizer_unscales_by_itself():
    found = []
    for fused in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        run = Plain(
            True, lambda m, f=fused: AdamW(m.parameters(), lr=0.02, fused=f), scaler, kl_clip=1e-4
        )
        for seed in range(4):
            run.optimizer.zero_grad()
            scaled(run, seed)
        assert run.kfac.scaler is scaler
        found.append(flat(run.model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_leaves_nothing(fused):
    """Neither in the statistics nor in the count of steps."""
    found = []
    for fails in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, backoff_factor=1 - 1e-9)
        run = Plain(True, lambda m: AdamW(m.parameters(), lr=0.02, fused=fused), scaler)
        for seed in range(4):
            if fails and seed == 2:
                run.optimizer.zero_grad()
                (scaler.scale(loss_of(run.model, 77)) * float("inf")).backward()
                run.step()
            run.optimizer.zero_grad()
            scaled(run, seed)
        assert run.kfac.steps == 4
        found.append(run.kfac.state_dict()["blocks"]["0"]["factors"]["A"]["mean"])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("to_none", [True, False])
def test_the_second_line_at_every_micro_batch_is_told_of(to_none):
    """As inside of ``accelerator.accumulate``, where the optimizer's step does nothing."""
    model = network()
    optimizer = momentum(model)
    kfac = KFAC(model, optimizer, **OFTEN)
    for seed in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, seed).backward()
        kfac.step()
        optimizer.step()
    loss_of(model, 3).backward()
    kfac.step()
    loss_of(model, 4).backward()
    with pytest.warns(UserWarning, match=r"gradients that it had preconditioned.*attach\(\)"):
        kfac.step()


# What is thrown away.


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("natural", [True, False])
def test_batches_that_are_skipped_do_not_add_up(to_none, natural):
    found = []
    for skips in (False, True):
        model = network()
        optimizer = NaturalMuon(model, update_every=1) if natural else momentum(model)
        kfac = optimizer.kfac if natural else KFAC(model, optimizer, **OFTEN).attach()
        for seed in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            if skips and seed % 2:
                loss_of(model, 50 + seed).backward()  # say, its loss was not finite
                optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, seed).backward()
            assert kfac.capture.samples() == 12
            optimizer.step()
        found.append(flat(model))
    assert torch.equal(*found)


def gan(through, zeroed, natural):
    """Trains both; the generator's pass goes ``through`` the discriminator."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = []
    for net in (generator, critic):
        if natural:
            optimizers.append(NaturalMuon(net, update_every=1))
        else:
            optimizers.append(AdamW(net.parameters(), lr=0.01))
            KFAC(net, optimizers[-1], **OFTEN).attach()
    makes, judges = optimizers
    for seed in range(5):
        z, real = torch.randn(12, 4), torch.randn(12, 5) + seed
        if zeroed == "before":
            judges.zero_grad()
        true = F.softplus(-critic(real)).mean()
        (true + F.softplus(critic(generator(z).detach())).mean()).backward()
        judges.step()
        if zeroed == "after":
            judges.zero_grad()
        frozen = through == "frozen"
        critic.requires_grad_(not frozen)
        makes.zero_grad()
        other = copy.deepcopy(critic) if through == "a copy" else critic
        F.softplus(-other(generator(z))).mean().backward()
        makes.step()
        critic.requires_grad_(True)
        if zeroed == "after" and not frozen:
            judges.zero_grad()
    return flat(critic)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("zeroed", ["before", "after"])
@pytest.mark.parametrize("through", ["itself", "frozen"])
def test_a_discriminator_does_not_count_the_generators_pass(through, zeroed, natural):
    expected = gan("a copy", zeroed, natural)
    assert torch.equal(gan(through, zeroed, natural), expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("curvature", [None, MonteCarloFisher(seed=1)], ids=["empirical", "drawn"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_a_gradient_of_the_input_alone_does_not_count(how, curvature):
    """As for adversarial examples."""
    model = network()
    kfac = KFAC(model, kl_clip=None, curvature=curvature, **OFTEN)
    x, y = batch(0)
    x.requires_grad_()
    if how == "grad":
        torch.autograd.grad(F.cross_entropy(model(x), y), x)
    else:
        F.cross_entropy(model(x), y).backward(inputs=[x])
    assert kfac.capture.samples() is None
    loss_of(model, 1).backward()
    assert kfac.capture.samples() == 12
    kfac.step()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    kfac = KFAC(model, kl_clip=None, curvature=curvature, **OFTEN)
    loss_of(model, 1).backward()
    kfac.step()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_no_gradients_are_no_step():
    model = network()
    optimizer = momentum(model)
    kfac = KFAC(model, optimizer).attach()
    optimizer.step()
    assert kfac.steps == 0


# Closures.


@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure(keyword):
    one, other = Plain(True, adamw), Plain(False, adamw)
    for seed in range(4):

        def closure(seed=seed):
            one.optimizer.zero_grad()
            loss = loss_of(one.model, seed)
            loss.backward()
            return loss

        step = one.optimizer.step
        assert (step(closure=closure) if keyword else step(closure)).item() > 0
        other.optimizer.zero_grad()
        plain(other, seed)
    assert torch.equal(flat(one.model), flat(other.model))
    assert one.kfac.steps == 4


def test_a_closure_that_is_called_again_is_refused():
    class Twice(SGD):
        def step(self, closure):
            closure()
            closure()

    model = network()
    optimizer = Twice(model.parameters(), lr=0.1)
    KFAC(model, optimizer).attach()

    def closure():
        optimizer.zero_grad()
        loss_of(model, 0).backward()

    with pytest.raises(SettingError, match="Twice evaluates its closure several times in a step"):
        optimizer.step(closure)


def test_lbfgs_is_refused_by_name():
    model = network()
    kfac = KFAC(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(SettingError, match="LBFGS measures curvature by differences of gradients"):
        kfac.attach()


# Several optimizers.


def two(model, lr=0.02):
    weights = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(weights, lr=lr)
    return [muon, AdamW(rest, lr=0.01)]


@pytest.mark.parametrize("scales", [False, True])
def test_two_optimizers_step_on_the_gradients_of_one_pass(scales):
    found = []
    for attached in (False, True):
        model = network()
        optimizers = two(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scales else None
        kfac = KFAC(model, optimizers, kl_clip=1e-6, scaler=None if attached else scaler, **OFTEN)
        assert kfac.optimizer == tuple(optimizers)
        if attached:
            kfac.attach()
        for seed in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, seed)
            (scaler.scale(loss) if scales else loss).backward()
            if not attached:
                kfac.step()
            for optimizer in optimizers if seed % 2 else reversed(optimizers):
                scaler.step(optimizer) if scales else optimizer.step()
            if scales:
                scaler.update()
        assert kfac.steps == 4
        found.append(flat(model))
    assert torch.equal(*found)


def test_the_clip_reads_the_rate_of_the_optimizer_that_holds_a_parameter():
    def factor(rate):
        model = network()
        kfac = KFAC(model, two(model, rate), kl_clip=1e-12, **OFTEN)
        loss_of(model, 0).backward()
        kfac.step()
        assert kfac.rates.of(model[0].weight) == rate
        assert kfac.rates.of(model[0].bias) == 0.01
        return model[0].weight.grad.norm()

    assert factor(1000.0) < 0.01 * factor(1.0)


def test_an_optimizer_that_sits_a_round_out_is_refused():
    model = network()
    muon, adam = two(model)
    KFAC(model, [muon, adam]).attach()
    loss_of(model, 0).backward()
    muon.step()
    muon.zero_grad()
    loss_of(model, 1).backward()
    with pytest.raises(SettingError, match="AdamW has not stepped on the gradients that K-FAC"):
        muon.step()


def test_gradients_changed_between_two_optimizers_are_refused():
    model = network()
    muon, adam = two(model)
    KFAC(model, [muon, adam]).attach()
    loss_of(model, 0).backward()
    muon.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
    with pytest.raises(SettingError, match="Gradients of AdamW were changed after K-FAC had"):
        adam.step()


def in_turn(own, attached, to_none):
    """Two optimizers that step in turn, each after a backward pass of its own; what is told."""
    model = network()
    parameters = list(model.parameters())
    optimizers = [SGD(some, lr=0.1) for some in (parameters[:2], parameters[2:])]
    kfac = KFAC(model, optimizers, **OFTEN)
    if attached:
        kfac.attach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(4):
            stepping = optimizers[seed % 2]
            for one in [stepping] if own else optimizers:
                one.zero_grad(set_to_none=to_none)
            loss_of(model, seed).backward()
            if not attached:
                kfac.step()
            stepping.step()
    kfac.detach()
    assert not any(p._backward_hooks for p in parameters)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("attached", [True, False])
def test_gradients_of_the_other_optimizer_that_were_not_zeroed_are_told_of(attached):
    (said,) = in_turn(own=True, attached=attached, to_none=True)
    assert "call zero_grad() of all optimizers before each backward pass" in said
    assert in_turn(own=False, attached=attached, to_none=True) == []


def test_zeros_in_place_are_no_gradients_that_are_added_to():
    assert in_turn(own=False, attached=False, to_none=False) == []


# States.


def test_a_run_that_is_resumed():
    whole = Plain(True, adamw)
    for seed in range(6):
        whole.optimizer.zero_grad()
        plain(whole, seed)
    first = Plain(True, adamw)
    for seed in range(3):
        first.optimizer.zero_grad()
        plain(first, seed)
    state = through_a_file([first.model.state_dict(), first.optimizer.state_dict()])
    second = Plain(True, adamw)
    plain(second, 50)
    second.model.load_state_dict(state[0])
    second.optimizer.load_state_dict(state[1])
    for seed in range(3, 6):
        second.optimizer.zero_grad()
        plain(second, seed)
    assert torch.equal(flat(second.model), flat(whole.model))
    assert second.kfac.steps == 6


def test_other_loaders_do_not_mind():
    run = Plain(True, adamw)
    plain(run, 0)
    state = run.optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "kfac"}
    other = adamw(network())
    other.load_state_dict(state)
    assert set(other.state_dict()) == {"state", "param_groups"}


def test_a_state_without_curvature_is_told_of():
    run, bare = Plain(True, adamw), Plain(False, adamw)
    plain(bare, 0)
    with pytest.warns(UserWarning, match=r"has none of K-FAC.*begins anew.*kfac.shards\(\)"):
        run.optimizer.load_state_dict(bare.optimizer.state_dict())


def test_a_state_that_does_not_fit_changes_nothing():
    run = Plain(True, adamw)
    plain(run, 0)
    state = copy.deepcopy(run.optimizer.state_dict())
    del state["kfac"]["blocks"]["0"]
    state["state"][0]["step"] += 5
    with pytest.raises(CheckpointError):
        run.optimizer.load_state_dict(state)
    assert run.optimizer.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("natural", [True, False])
def test_torchs_checkpoint_makes_no_step(natural):
    """It steps an optimizer without state on gradients of 0, to see what it keeps."""
    model = network()
    optimizer = NaturalMuon(model) if natural else adamw(model)
    kfac = optimizer.kfac if natural else KFAC(model, optimizer).attach()
    before = flat(model)
    assert "state" in get_optimizer_state_dict(model, optimizer)
    assert kfac.steps == 0
    assert torch.equal(flat(model), before)
    loss_of(model, 0).backward()
    optimizer.step()
    assert kfac.steps == 1


def test_copies_go_on_as_the_original():
    run = Plain(True, adamw)
    for seed in range(3):
        run.optimizer.zero_grad()
        plain(run, seed)
    model, optimizer, kfac = copy.deepcopy((run.model, run.optimizer, run.kfac))
    for seed in range(3, 6):
        for m, o in ((run.model, run.optimizer), (model, optimizer)):
            o.zero_grad()
            loss_of(m, seed).backward()
            o.step()
    assert kfac.steps == run.kfac.steps == 6
    assert torch.equal(flat(model), flat(run.model))


# Hanging on, and off.


def test_detached_is_the_optimizer_alone():
    run, model = Plain(True), network()
    optimizer = momentum(model)
    run.kfac.detach()
    for seed in range(2):
        for m, o in ((run.model, run.optimizer), (model, optimizer)):
            o.zero_grad()
            loss_of(m, seed).backward()
            o.step()
    assert torch.equal(flat(run.model), flat(model))
    assert "kfac" not in run.optimizer.state_dict()


def test_another_optimizer_takes_its_place():
    run = Plain(True)
    before = run.optimizer
    run.kfac.optimizer = run.optimizer = adamw(run.model)
    plain(run, 0)
    assert run.kfac.steps == 1
    assert "kfac" in run.optimizer.state_dict()
    assert "kfac" not in before.state_dict()
    before.step()
    assert run.kfac.steps == 1


def test_attached_twice_is_attached_once():
    run = Plain(True)
    run.kfac.attach()
    plain(run, 0)
    assert run.kfac.steps == 1


def test_the_second_line_left_in_is_refused():
    run = Plain(True)
    loss_of(run.model, 0).backward()
    with pytest.raises(CaptureError, match=r"attached to its optimizer.*leave the call out"):
        run.kfac.step()


def test_without_an_optimizer_there_is_nothing_to_hang_on():
    with pytest.raises(SettingError, match=r"there is no optimizer: pass KFAC\(model, optimizer\)"):
        KFAC(network(), kl_clip=None).attach()


def test_what_is_no_optimizer_is_refused():
    class Groups:
        param_groups = ()

    kfac = KFAC(network(), Groups(), kl_clip=None)
    with pytest.raises(SettingError, match=r"Groups has no hooks of torch\.optim\.Optimizer"):
        kfac.attach()
    with pytest.raises(SettingError, match=r"optimizer is a str but must be .* a list of them"):
        natgrad.KFAC(network(), ["adam"])


def test_one_line_says_what_it_is():
    model = network()
    model.append(nn.PReLU(3))  # which nobody covers
    optimizer = adamw(model)
    kfac = KFAC(model, optimizer)
    assert repr(kfac) == (
        "<KFAC of Sequential: 3 blocks precondition 95.8% of 72 parameters, damping=0.01, "
        "kl_clip=0.01, in front of AdamW, step 0>"
    )
    kfac.attach()
    loss_of(model, 0).backward()
    optimizer.step()
    assert repr(kfac).endswith("attached to AdamW, step 1>")
    assert "length=Rms(" in repr(NaturalMuon(network()).kfac)
    assert repr(KFAC(network(), kl_clip=None)).endswith("damping=0.01, kl_clip=None, step 0>")
