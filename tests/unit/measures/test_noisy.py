"""Noisy natural gradient: what is drawn, that the mean comes back, and that it trains."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from kfac_keywords import LOSSES
from natgrad import EKFAC, KFAC, Cholesky, Diagonal, Full, Kronecker, MeanLoss, UnitWise
from natgrad.errors import CheckpointError, SettingError
from natgrad.measures.noisy import NoisyKFAC

DTYPE = torch.float64
N, TAU, T = 50, 2.0, 0.5
GAMMA = T * TAU / N
STRUCTURES = {
    "kronecker": Kronecker(),
    "ekfac": EKFAC(),
    "full": Full(),
    "unit-wise": UnitWise(),
    "diagonal": Diagonal(),
}


def network():
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)
    ).to(DTYPE)


def batch(n=12):
    return torch.randn(n, 3, dtype=DTYPE), torch.randint(2, (n,))


def build(model, steps=2, *, structure=None, **options):
    """After some steps that see and decompose everything, so that there is a posterior."""
    optimizer = SGD(model.parameters(), lr=0.01)
    settings = {"damping": 0.1, "kl_clip": None, "update_every": 1, "refresh_every": 1}
    kfac = KFAC(model, optimizer, structure=structure, **settings | options)
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    return kfac


def noisy_of(kfac, **options):
    return NoisyKFAC(kfac, N, **{"prior_precision": TAU, "temperature": T} | options)


def decomposed_matrix(block):
    """``F`` over ``vec(W)``, as the block was last decomposed, column by column."""
    eye = torch.eye(torch.Size(block.shape).numel(), dtype=DTYPE)
    decomposed = block.decomposed()
    return torch.stack([decomposed.multiply(m.view(block.shape), 0.0).flatten() for m in eye])


def values(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_matrix_is_what_kfac_has_decomposed(structure):
    kfac = build(network(), steps=1, structure=STRUCTURES[structure])
    for block in kfac.blocks:
        kept = block.kept()
        if "S" in block.parts and "S" not in kept:  # its eigenvalues' product stands in for S
            kept["S"] = block.parts["S"][0].flatten()
        basis = block.decomposed_factors()
        expected = block.structure.matrix(kept, block.forms, block.shape, basis).dense()
        assert (decomposed_matrix(block) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("structure", STRUCTURES)
def test_drawn_weights_have_the_covariance_of_the_posterior(structure):
    """Of one layer, so that no others are drawn."""
    model = network()
    kfac = build(model, structure=STRUCTURES[structure], include="0")
    noisy, count = noisy_of(kfac), 3000
    block = kfac.blocks[0]
    mean = torch.cat([model[0].weight, model[0].bias.unsqueeze(1)], 1).detach().flatten()
    rows = []
    for _ in range(count):
        with noisy:
            drawn = torch.cat([model[0].weight, model[0].bias.unsqueeze(1)], 1)
            rows.append(drawn.detach().flatten())
    rows = torch.stack(rows)
    F_block = decomposed_matrix(block)
    precision = F_block + GAMMA * torch.eye(len(F_block), dtype=DTYPE)
    expected = T / N * torch.linalg.inv(precision)
    variance = expected.diagonal()
    assert ((rows.mean(0) - mean).abs() < 5 * (variance / count).sqrt()).all()
    spread = (torch.outer(variance, variance) + expected.square()) / count
    assert ((torch.cov(rows.T) - expected).abs() < 5 * spread.sqrt()).all()


def test_every_layer_is_drawn_and_comes_back_bit_for_bit():
    model = network()
    noisy = noisy_of(build(model))
    before = values(model)
    with noisy:
        inside = values(model)
    assert all(not torch.equal(a, b) for a, b in zip(before, inside, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    noisy.sample()
    assert not torch.equal(model[0].weight, before[0])
    noisy.restore()
    noisy.restore()  # a second time does nothing
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


def test_the_mean_comes_back_after_an_exception():
    model = network()
    noisy = noisy_of(build(model))
    before = values(model)

    def fail():
        with noisy:
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    with noisy:  # and may be left again
        pass


def test_without_curvature_there_is_no_noise():
    model = network()
    noisy = noisy_of(build(model, steps=0))
    before = values(model)
    with noisy:
        assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_is_kfacs_with_the_gradient_of_the_prior(reduction):
    """Of the mean weights, in the units of the loss."""
    x, y = batch()
    found = []
    for around in (True, False):
        torch.manual_seed(0)
        model = network()
        kfac = build(model, steps=0, loss=LOSSES[reduction]())
        noisy = noisy_of(kfac)
        loss = F.cross_entropy(model(x), y, reduction=reduction)
        if not around:
            weights = sum(p.square().sum() for p in model.parameters())
            scale = len(x) if reduction == "sum" else 1
            loss = loss + scale * GAMMA / 2 * weights
        loss.backward()
        noisy.step() if around else kfac.step()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("ignore:loss=MeanLoss")  # there is one term for four
def test_terms_of_a_sample_share_the_prior():
    grads = []
    for terms in (1, 4):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(DTYPE)
        kfac = build(model, steps=0, loss=MeanLoss(terms), damping=0.1 / terms)
        x, y = batch()
        (F.cross_entropy(model(x), y) / terms).backward()
        noisy_of(kfac).step()
        # K-FAC's gradient and damping are of one term, and so is the prior's share.
        grads.append(model.weight.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-9)


def test_random_numbers_go_on_where_they_were_saved():
    model = network()
    noisy, other = (noisy_of(build(network(), steps=0), seed=seed) for seed in (0, 1))
    kfac = build(model)
    noisy.kfac = other.kfac = kfac
    with noisy:
        pass
    other.load_state_dict(noisy.state_dict())
    drawn = []
    for one in (noisy, other):
        with one:
            drawn.append(model[0].weight.detach().clone())
    assert torch.equal(*drawn)


def digits(n=160):
    """Four blurred strokes in images of 6 x 6 pixels, with noise."""
    strokes = torch.zeros(4, 6, 6)
    strokes[0, :, 2], strokes[1, 3, :] = 1.0, 1.0
    strokes[2].fill_diagonal_(1.0)
    strokes[3] = strokes[2].flip(0)
    y = torch.randint(4, (n,))
    return strokes[y].flatten(1) + 0.4 * torch.randn(n, 36), y


def test_training_goes_down():
    x, y = digits()
    model = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = KFAC(model, optimizer, damping=0.05, update_every=2, refresh_every=4)
    noisy = NoisyKFAC(kfac, len(x), temperature=0.3)
    with torch.no_grad():
        first = F.cross_entropy(model(x), y)
    for step in range(60):
        here = torch.arange(step * 32, step * 32 + 32) % len(x)
        optimizer.zero_grad()
        with noisy:
            F.cross_entropy(model(x[here]), y[here]).backward()
        noisy.step()
        optimizer.step()
    with torch.no_grad():
        last = F.cross_entropy(model(x), y)
        with noisy:
            drawn = F.cross_entropy(model(x), y)
    assert last < 0.2 * first
    assert last < drawn < first


def errors():
    model = network()
    kfac = build(model)
    drawn = noisy_of(build(network()))
    drawn.sample()
    cholesky = build(network(), steps=0, inverse=Cholesky())
    low = noisy_of(build(network(), steps=0, damping=1e-6))
    away = noisy_of(build(network()))
    away.kfac.blocks[1].parts.clear()
    fresh = noisy_of(kfac)
    return {
        "kfac": (lambda: NoisyKFAC(model, N), "around a Sequential but must be around a natgrad"),
        "samples": (lambda: NoisyKFAC(kfac, 0), "samples is 0 but must be a whole number"),
        "prior": (lambda: noisy_of(kfac, prior_precision=0), "prior_precision is 0 but must be"),
        "temperature": (lambda: noisy_of(kfac, temperature=-1), "temperature is -1 but must be"),
        "cholesky": (lambda: noisy_of(cholesky), r"which Cholesky\(\) does not give for '0'"),
        "twice": (drawn.sample, r"The weights are a sample already: call restore\(\)"),
        "step": (drawn.step, "moves the mean, but the weights are a sample: leave the"),
        "damping": (
            low.step,
            "damping of '0' is 1e-06 but must be a number and at least .* = 0.02: give KFAC",
        ),
        "elsewhere": (away.sample, "decomposition of LayerNorm '2' is on other ranks"),
        "state": (lambda: fresh.load_state_dict({"seed": 1}), r"has the keys \['seed'\] but that"),
    }


CASES = errors()


@pytest.mark.parametrize("which", CASES)
def test_errors_say_what_to_do(which):
    call, sentence = CASES[which]
    kind = CheckpointError if which == "state" else SettingError
    with pytest.raises(kind, match=sentence):
        call()


def test_sharded_weights_are_refused(monkeypatch):
    monkeypatch.setattr("natgrad.measures.noisy.is_sharded", lambda p: True)
    kfac = build(network(), steps=0)
    with pytest.raises(SettingError, match="weights of '0' are spread over ranks"):
        NoisyKFAC(kfac, N)
