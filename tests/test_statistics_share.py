"""Curvature from some samples of a batch: exactly theirs, for every layer, and at their cost."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recurrent_cases
from cases import CASES, MODELS, losses
from natgrad import (
    EKFAC,
    KFAC,
    ExactFisher,
    Full,
    Kronecker,
    MeanLoss,
    MonteCarloFisher,
    NaturalMuon,
    UnitWise,
)
from natgrad.capture.chosen import Cut
from natgrad.curvature import Subsample
from natgrad.linalg.forms import Triangle
from oracles import Use, View, close, fisher, kronecker, kronecker_block, term_scale, truth

# torch warns of the copy that it makes for these.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

BATCHED = [case for case in CASES if case.batched]
SHARE = Subsample(2, seed=5)
ALWAYS = {"kl_clip": None, "update_every": 1, "refresh_every": 1}


def of_chosen(view: View, chosen) -> View:
    def some(use):
        return Use(use.a[:, chosen], use.g[:, chosen], use.used[chosen])

    uses, turned = [some(u) for u in view.uses], [some(u) for u in view.transposed]
    return View(view.name, view.matrix, uses, turned, view.elementwise, view.diagonal_inputs)


def dense(block):
    if isinstance(block.structure, EKFAC):
        decomposed = block.decomposed_factors()
        matrix = block.structure.matrix(block.kept(), block.forms, block.shape, decomposed)
        return matrix.dense()
    return block.structure.dense(block.kept(), block.forms, block.shape)


def blocks_of(case, structure):
    n, model = case.batches[-1], case.model()
    loss = MeanLoss(batch_axis=case.batch_axis)
    kfac = KFAC(model, structure=structure, statistics=SHARE, loss=loss, **ALWAYS)
    losses(case, model(*case.data(n))).mean().backward()
    kfac.step()
    return kfac


@pytest.mark.parametrize("case", BATCHED, ids=str)
def test_whole_blocks_are_those_of_the_chosen_samples(case):
    """Dense, from gradients of single samples."""
    n = case.batches[-1]
    chosen = SHARE(0, 0, n)
    assert len(chosen) < n
    known = truth(case, n)
    for block in blocks_of(case, Full()).blocks:
        if block.name in known.views:
            samples = known.sample_matrices(known.views[block.name])
        else:  # a bias by itself
            samples = known.per_sample[block.name].reshape(n, 1, -1, 1)
        assert close(dense(block), fisher(samples[chosen]), 1e-10)
        assert not close(dense(block), fisher(samples), 1e-3)


@pytest.mark.parametrize(
    ("case", "sharing"),
    [*((case, "expand") for case in BATCHED[::2]), *((case, "reduce") for case in BATCHED[1::4])],
    ids=str,
)
def test_kronecker_factors_are_those_of_the_chosen_samples(case, sharing):
    n = case.batches[-1]
    chosen = SHARE(0, 0, n)
    known = truth(case, n)
    for block in blocks_of(case, Kronecker(sharing)).blocks:
        if isinstance(block.structure, UnitWise) or block.name not in known.views:
            continue
        view = of_chosen(known.views[block.name], chosen)
        expected = kronecker_block(*kronecker(view, len(chosen), sharing))
        a, g = term_scale(view, len(chosen))
        assert close(dense(block), expected, 1e-10, scale=1e-3 * a * g)


@pytest.mark.parametrize("case", MODELS, ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"structure": EKFAC()},
        {"curvature": ExactFisher()},
        {"structure": Kronecker("reduce"), "curvature": ExactFisher()},
    ],
    ids=repr,
)
def test_networks_are_as_if_the_others_were_not_there(case, more):
    """No layer of these mixes samples, so the factors are those of a batch of the chosen ones."""
    n, found, most = 30, [], Subsample(0.75)  # EKFAC's basis needs more samples than dimensions
    for statistics in (most, None):
        model = case.model()
        kfac = KFAC(model, statistics=statistics, factor_decay=0.5, **ALWAYS, **more)
        for step in range(2):
            some = slice(None) if statistics else torch.from_numpy(most(step, 0, n))
            model.zero_grad()
            losses(case, model(*(x[some] for x in case.data(n, step)))).mean().backward()
            kfac.step()
        found.append([dense(block) for block in kfac.blocks])
    for one, other in zip(*found, strict=True):
        assert close(one, other, 1e-10, scale=1e-6)


@pytest.mark.parametrize("kind", ["lstm_proj", "gru"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("structure", list(recurrent_cases.STRUCTURES))
def test_recurrent_layers(kind, packed, structure):
    torch.manual_seed(0)
    rnn = recurrent_cases.make(kind, batch_first=True)
    xs = recurrent_cases.sequences() if packed else recurrent_cases.batch()
    chosen = SHARE(0, 0, recurrent_cases.SAMPLES)
    net = recurrent_cases.Net(rnn)
    made = recurrent_cases.STRUCTURES[structure]
    kfac, _ = recurrent_cases.step(net, xs, statistics=SHARE, structure=made)
    pairs = recurrent_cases.oracle(rnn, [xs[i] for i in chosen])
    for block in kfac.blocks:
        expected = recurrent_cases.expected(pairs[block.name.removeprefix("rnn.")], structure)
        assert close(dense(block), expected, 1e-10)


class Rows(nn.Module):
    """Beside samples there are rows that are no multiple of them, as windows or regions are."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x)[:-1].tanh())


def test_rows_that_are_no_samples_all_enter_at_less_weight():
    """Then G is the mean that all samples have."""
    found = {}
    for statistics in (None, SHARE):
        torch.manual_seed(0)
        model, x = Rows().double(), torch.randn(6, 3, dtype=torch.float64)
        kfac = KFAC(model, statistics=statistics, **ALWAYS)
        model(x).square().sum(1).mean().backward()
        kfac.step()
        found[statistics] = {b.name: dense(b) for b in kfac.blocks}
    assert close(found[SHARE]["second"], found[None]["second"], 1e-12)
    assert not close(found[SHARE]["first"], found[None]["first"], 1e-2)


class TokensFirst(nn.Module):
    """Samples in front of the model, tokens in front of a layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("tokens", [4, 6, 12])
def test_samples_on_another_axis(tokens):
    torch.manual_seed(0)
    model, x = TokensFirst().double(), torch.randn(8, tokens, 3, dtype=torch.float64)
    found = []
    for statistics, some in ((SHARE, slice(None)), (None, SHARE(0, 0, 8))):
        kfac = KFAC(model, statistics=statistics, **ALWAYS)
        model(x[some]).pow(4).sum((1, 2)).mean().backward()
        kfac.step()
        found.append(dense(kfac.blocks[0]))
        kfac.detach()
    assert close(*found, 1e-10)


def test_micro_batches_are_one_batch():
    """Samples are numbered through all of them."""
    found = []
    for parts in ([12], [4, 4, 4], [5, 7]):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2).double(), torch.randn(12, 3, dtype=torch.float64)
        kfac = KFAC(model, statistics=0.25, **ALWAYS)
        for part in x.split(parts):
            (model(part).square().sum(1).sum() / 12).backward()
            with torch.no_grad():
                model(part)  # an evaluation takes no numbers
        kfac.step()
        found.append(dense(kfac.blocks[0]))
    assert close(found[0], found[1], 1e-12)
    assert close(found[0], found[2], 1e-12)


def test_the_mean_over_steps_is_that_of_all_samples():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(10, 3, dtype=torch.float64)

    def factor(statistics, steps):
        # Factors alone are looked at, and decomposed once.
        settings = {**ALWAYS, "refresh_every": 10**6}
        kfac = KFAC(model, statistics=statistics, factor_decay=1 - 1e-9, **settings)
        for _ in range(steps):
            model.zero_grad()
            model(x).pow(4).sum(1).mean().backward()
            kfac.step()
        kfac.detach()
        return kfac.blocks[0].forms["G"].dense(kfac.blocks[0].kept()["G"])

    whole = factor(None, 1)
    assert (factor(0.3, 1500) - whole).norm() < 0.05 * whole.norm()
    assert (factor(0.3, 1) - whole).norm() > 0.2 * whole.norm()


def test_a_stated_number_of_samples():
    """``step(samples=...)``: the share of them is that of those that were counted."""
    found = []
    for said in (None, 8, 16):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2).double(), torch.randn(8, 3, dtype=torch.float64)
        kfac = KFAC(model, statistics=0.25, **ALWAYS)
        (model(x).square().sum() / (said or 8)).backward()
        kfac.step(samples=said)
        found.append(dense(kfac.blocks[0]))
    assert close(found[0], found[1], 1e-12)
    # As many gradients, and half of the samples without one.
    assert close(found[0], 2 * found[2], 1e-12)


def count_rows(monkeypatch):
    rows = []
    plain = Triangle.add_rows

    def counting(self, kept, a):
        rows.append(a.shape[-2])
        return plain(self, kept, a)

    monkeypatch.setattr(Triangle, "add_rows", counting)
    return rows


@pytest.mark.parametrize(("statistics", "share"), [(None, 1), (0.25, 4), (16, 4)])
def test_fewer_rows_are_multiplied(monkeypatch, statistics, share):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    kfac = KFAC(model, statistics=statistics, **ALWAYS)
    rows = count_rows(monkeypatch)
    model(torch.randn(64, 7, 5)).square().sum().backward()
    kfac.step()
    assert rows == [64 * 7 // share] * 4  # A and G of both


def test_layers_of_one_input_still_share_their_factor(monkeypatch):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(5, 4), nn.Linear(5, 3)

        def forward(self, x):
            return torch.cat([self.q(x), self.k(x)], -1)

    model = Heads()
    kfac = KFAC(model, statistics=0.25, **ALWAYS)
    rows = count_rows(monkeypatch)
    model(torch.randn(64, 5)).square().sum().backward()
    kfac.step()
    assert rows == [16] * 3


@pytest.mark.parametrize("how", ["plain", "autocast", "packed"])
def test_what_is_kept_for_the_backward_pass(how):
    """Beside what autograd has saved: nothing, or the chosen samples where it has copies."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    kfac = KFAC(model, statistics=0.25, **ALWAYS)
    kept = []
    kfac.capture.on_pair = lambda use, x, g, this: (
        kept.append(x),
        kfac.statistics.add(use, x, g, this),
    )
    around = {
        "plain": nullcontext(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "packed": torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
    }[how]
    x = torch.randn(64, 5)
    with around:
        loss = model(x).float().square().mean()
    loss.backward()
    if how == "plain":
        assert kept[1].data_ptr() == x.data_ptr()  # of the first layer: no copy
    else:
        assert all(isinstance(one, Cut) for one in kept)
        assert [one.x.numel() for one in kept] == [16 * 6, 16 * 5]
    kfac.step()
    assert all(torch.isfinite(dense(block)).all() for block in kfac.blocks)


def test_early_cuts_change_nothing():
    found = []
    for packed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        kfac = KFAC(model, statistics=0.25, structure=Full(), **ALWAYS)
        x = torch.randn(12, 2, 5, dtype=torch.float64)
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
        with hooks if packed else nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        kfac.step()
        found.append([dense(block) for block in kfac.blocks])
    for one, other in zip(*found, strict=True):
        assert close(one, other, 1e-12)


def test_drawn_targets_are_those_of_the_whole_batch():
    """Monte-Carlo draws are of all samples, so that a share of them has the same vectors."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4).double(), torch.randn(12, 3, dtype=torch.float64)
    y = torch.randint(4, (12,))
    kfac = KFAC(
        model, statistics=0.25, structure=Full(), curvature=MonteCarloFisher(seed=3), **ALWAYS
    )
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    generator = MonteCarloFisher(seed=3).generator("cpu")
    (v,) = MonteCarloFisher(seed=3).vectors(model(x).detach(), generator=generator)
    rows = torch.cat([x, torch.ones(12, 1)], 1)
    samples = torch.einsum("ni,nj->nij", v, rows)
    assert close(dense(kfac.blocks[0]), fisher(samples[Subsample(0.25)(0, 0, 12)]), 1e-10)


def test_goes_on_with_the_same_samples():
    def run(model, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward()
            optimizer.step()

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        return model, NaturalMuon(model, statistics=0.25, update_every=2, refresh_every=2)

    model, optimizer = made()
    run(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, range(3, 7))
    other, second = made()
    other.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    run(other, second, range(3, 7))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
