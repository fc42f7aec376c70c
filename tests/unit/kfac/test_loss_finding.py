"""The scale of the loss is found: however it is written, one damping means the same."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad import KFAC, ExactFisher, MeanLoss, MonteCarloFisher, NaturalMuon, Relative, SumLoss
from natgrad.curvature import Categorical
from natgrad.kfac.settings import DAMPING, RELATIVE_DAMPING

N, T, C = 8, 64, 17
DTYPE = torch.float64


def network():
    torch.manual_seed(0)
    layers = (nn.Embedding(C, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, C))
    return nn.Sequential(*layers).to(DTYPE)


def data(step=0, samples=N, length=T):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(C, (samples, length), generator=generator)
    return x, (7 * x + 3) % C


def cross_entropy(z, y, **more):
    return F.cross_entropy(z.flatten(0, -2), y.flatten(), **more)


def padded(y):
    """Between 5 and T of T tokens count, in each sample as many as its number says."""
    length = torch.linspace(5, T, len(y)).long()
    return y.masked_fill(torch.arange(T) >= length[:, None], -100)


def stepped(written, *, steps=1, model=None, batches=None, **settings):
    """The preconditioned gradients of every step, the first ones as they were, and the KFAC."""
    model = network() if model is None else model
    kfac = KFAC(model, **{"kl_clip": None, **settings})
    found, raw = [], []
    for step in range(steps):
        model.zero_grad()
        x, y = data(step) if batches is None else batches[step]
        written(model, x, y).backward()
        raw.append([p.grad.clone() for p in model.parameters()])
        kfac.step()
        found.append([p.grad.clone() for p in model.parameters()])
    return found, raw[0], kfac


def same(one, other, rtol=1e-9):
    return all(
        torch.allclose(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))
        for first, second in zip(one, other, strict=True)
        for a, b in zip(first, second, strict=True)
    )


def mean(model, x, y):
    return cross_entropy(model(x), y)


def total(model, x, y):
    return cross_entropy(model(x), y, reduction="sum")


def test_plain_classification_is_what_it_was():
    torch.manual_seed(1)
    batches = [(torch.randn(49, 5, dtype=DTYPE), torch.randint(4, (49,))) for _ in range(3)]

    def written(model, x, y):
        return F.cross_entropy(model(x), y)

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).to(DTYPE)

    settings = {"steps": 3, "batches": batches, "update_every": 2}
    found, _, kfac = stepped(written, model=model(), **settings)
    expected, *_ = stepped(written, model=model(), **settings, loss=MeanLoss(), damping=0.01)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert kfac.settings.found == ("mean", 1.0, 49, 49)
    assert kfac.settings.at(0).damping == DAMPING == 0.01


def test_a_mean_over_tokens_does_not_switch_curvature_off():
    found, raw, _ = stepped(mean)
    cosines = [
        F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in zip(found[0], raw, strict=True)
    ]
    assert sum(float(c) < 0.99 for c in cosines) >= 4
    assert same(found, stepped(mean, loss=MeanLoss(T))[0])


@pytest.mark.parametrize(
    ("written", "weight"),
    [
        (total, N * T),
        (lambda m, x, y: cross_entropy(m(x), y, reduction="sum") / N, T),
        (lambda m, x, y: 3 * mean(m, x, y), 3.0),
        (lambda m, x, y: 1e-3 * mean(m, x, y), 1e-3),
    ],
    ids=["sum", "mean of sums", "times three", "a thousandth"],
)
def test_however_it_is_written(written, weight):
    """Also on steps that update nothing, with another number of tokens."""
    batches = [data(step, samples) for step, samples in enumerate((8, 5, 3, 8))]
    settings = {"steps": 4, "batches": batches, "update_every": 3}
    found, _, kfac = stepped(written, **settings)
    assert same(found, stepped(mean, **settings)[0], 1e-6)
    assert kfac.settings.found.kind == "other"
    assert kfac.settings.found.first == pytest.approx(weight)
    assert kfac.settings.terms_per_sample == pytest.approx(T)


def gradient_factors(kfac):
    return [block.running["G"].mean for block in kfac.blocks if "G" in block.running]


@pytest.mark.parametrize("loss", [mean, total], ids=["mean", "sum"])
def test_padding_is_not_counted(loss):
    """G is that of the tokens with a target, as if each were a sample."""
    x, y = data()
    y = padded(y)
    there = y != -100
    _, _, kfac = stepped(loss, batches=[(x, y)])
    _, _, alone = stepped(mean, batches=[(x[there][:, None], y[there][:, None])])
    for one, other in zip(gradient_factors(kfac), gradient_factors(alone), strict=True):
        assert torch.allclose(one, other, rtol=1e-9)
    # A constant number of terms for each sample would be far off.
    with pytest.warns(UserWarning, match="says that the loss is a mean over 512 terms"):
        _, _, constant = stepped(mean, batches=[(x, y)], loss=MeanLoss(T))
    ratio = gradient_factors(constant)[0].norm() / gradient_factors(alone)[0].norm()
    assert float(ratio) == pytest.approx(T * N / int(there.sum()))


def accumulated(divide):
    """Four micro-batches, each divided as ``divide(labels of it, all labels)`` says."""

    def written(model, x, y):
        parts = list(zip(x.chunk(4), y.chunk(4), strict=True))
        losses = [cross_entropy(model(a), b, reduction="sum") / divide(b, y) for a, b in parts]
        for loss in losses[:-1]:
            loss.backward()
        return losses[-1]

    return written


def test_micro_batches_are_one_batch():
    x, y = data()
    written = accumulated(lambda part, _: 4 * part.numel())
    assert same(stepped(written, batches=[(x, y)])[0], stepped(mean, batches=[(x, y)])[0])
    # Divided by the terms of all of them, which differ, as Hugging Face's Trainer does.
    y = padded(y)
    written = accumulated(lambda _, whole: (whole != -100).sum())
    assert same(stepped(written, batches=[(x, y)])[0], stepped(mean, batches=[(x, y)])[0])
    # Each a mean of its own: weights differ, but are known.
    written = accumulated(lambda part, _: 4 * (part != -100).sum())
    _, _, kfac = stepped(written, batches=[(x, y)])
    counts = [int((part != -100).sum()) for part in y.chunk(4)]
    assert kfac.settings.found.kind == "mean"
    assert kfac.settings.found.terms == pytest.approx(16 / sum(1 / n for n in counts))


def test_micro_batches_that_nobody_divided_are_a_sum_of_means():
    x, y = data()
    written = accumulated(lambda part, _: part.numel())
    found, _, kfac = stepped(written, batches=[(x, y)])
    assert kfac.settings.found.first == pytest.approx(4)
    assert same(found, stepped(mean, batches=[(x, y)])[0])


@pytest.mark.parametrize("given", [True, False])
def test_a_scaler_is_no_weight(given):
    model, x, y = network().float(), *data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kfac = KFAC(model, optimizer, kl_clip=None, scaler=scaler if given else None)
    scaler.scale(mean(model, x, y)).backward()
    if given:
        kfac.step()
        assert kfac.settings.found == ("mean", 1.0, N * T, N)
        expected, *_ = stepped(mean, model=network().float(), batches=[(x, y)])
        assert same([[p.grad for p in model.parameters()]], expected, 1e-4)
    else:
        with pytest.warns(UserWarning, match="1,024 times a mean, .* pass KFAC.*scaler=scaler"):
            kfac.step()


def test_terms_without_a_gradient_may_be_very_sure():
    """Of a classifier whose softmax has rounded to 0 and 1, the other samples say how many."""

    class Sure(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            sure = torch.zeros(N, T, 1, dtype=DTYPE)
            sure[:4] = 2000.0
            return self.inner(x) + sure * F.one_hot((7 * x + 3) % C, C)

    _, _, kfac = stepped(mean, model=Sure())
    assert kfac.settings.found == ("mean", 1.0, N * T, N)


def squares(model, x, y):
    return (model(x) - F.one_hot(y, C)).square().mean()


def test_the_damping_of_an_unknown_loss():
    """Relative, unless the optimizer goes as far as gradients are long."""
    found, _, kfac = stepped(squares, steps=2)
    assert kfac.settings.unknown
    assert kfac.settings.at(0).damping == RELATIVE_DAMPING
    assert same(found, stepped(squares, steps=2, loss=MeanLoss(), damping=Relative(0.1))[0])
    given, _, kfac = stepped(squares, steps=2, damping=0.01)
    assert same(given, stepped(squares, steps=2, loss=MeanLoss(), damping=0.01)[0])
    assert kfac.settings.at(0).damping == 0.01


@pytest.mark.parametrize(
    "name", ["SGD", "ASGD", "Adam", "AdamW", "Adadelta", "RMSprop", "Rprop", "Muon"]
)
def test_the_damping_of_an_unknown_loss_by_the_optimizer(name):
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).to(DTYPE)
    kfac = KFAC(model, getattr(torch.optim, name)(model.parameters(), lr=0.1))
    model(torch.ones(2, 4, dtype=DTYPE)).square().mean().backward()
    kfac.step()
    expected = DAMPING if name in ("SGD", "ASGD") else RELATIVE_DAMPING
    assert kfac.settings.at(1).damping == expected
    assert not kfac.settings.unscaled


def test_the_damping_follows_the_optimizer():
    """Not one step is taken with what was right for another."""
    model = nn.Sequential(nn.Linear(4, 3)).to(DTYPE)
    kfac = KFAC(model, torch.optim.Adam(model.parameters(), lr=0.1), update_every=1)
    settings = {"kl_clip": None, "loss": MeanLoss(), "damping": DAMPING, "update_every": 1}
    other = KFAC(copy.deepcopy(model), **settings)
    for optimizer in (None, torch.optim.SGD(model.parameters(), lr=1e-9)):
        if optimizer is not None:
            kfac.optimizer = optimizer
        for each in (kfac, other):
            each.model.zero_grad()
            each.model(torch.eye(4, dtype=DTYPE)).square().mean().backward()
            each.step()
    found, expected = ([p.grad for p in each.model.parameters()] for each in (kfac, other))
    assert same([found], [expected])


def test_what_was_once_known_stays_known():
    model = network()
    kfac = KFAC(model, kl_clip=None, update_every=1)
    for written in (squares, mean, squares):
        model.zero_grad()
        written(model, *data()).backward()
        kfac.step()
        known = kfac.settings.found is not None
        assert kfac.settings.unknown == (not known)
        assert known == (written is mean or kfac.steps == 3)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Wrapped(nn.Module):
    """Models as people write them: what they return, and how."""

    def __init__(self, returns):
        super().__init__()
        self.inner, self.returns = network(), returns

    def forward(self, x, y=None):
        z = self.inner(x)
        loss = None if y is None else cross_entropy(z, y)
        return self.returns(loss, z)


@pytest.mark.parametrize(
    ("returns", "loss", "known"),
    [
        (Output, lambda out, y: out.loss, True),
        (lambda loss, z: (z, loss), lambda out, y: out[1], True),
        (lambda loss, z: {"loss": loss, "logits": z}, lambda out, y: out["loss"], True),
        (lambda loss, z: z, lambda out, y: cross_entropy(out, y), True),
        (lambda loss, z: loss, lambda out, y: out, False),
        (lambda loss, z: z, lambda out, y: cross_entropy(out.mul_(1.0), y), False),
        (lambda loss, z: 2 * z, lambda out, y: cross_entropy(out / 2, y), False),
    ],
    ids=["logits", "tuple", "dict", "output", "loss alone", "overwritten", "scaled"],
)
@pytest.mark.filterwarnings("ignore:.*gave no statistics")  # of what is overwritten
def test_what_a_model_returns(returns, loss, known):
    model, (x, y) = Wrapped(returns), data()
    kfac = KFAC(model, kl_clip=None)
    loss(model(x, y), y).backward()
    kfac.step()
    assert (kfac.settings.found is not None) == known
    assert kfac.settings.unknown != known


def test_two_losses_of_one_output_are_unknown():
    model, (x, y) = network(), data()
    kfac = KFAC(model, kl_clip=None)
    z = model(x)
    cross_entropy(z, y).backward(retain_graph=True)
    cross_entropy(z, y).backward()
    kfac.step()
    assert kfac.settings.unknown


@pytest.mark.parametrize("curvature", [ExactFisher, MonteCarloFisher])
def test_drawn_targets_are_terms(curvature):
    """Whatever the loss: their vectors carry no weight of it."""
    fisher = curvature(likelihood=Categorical(class_axis=-1))
    batches = [data(length=3)]
    settings = {"curvature": fisher, "batches": batches}
    expected, *_ = stepped(mean, **settings, loss=MeanLoss(3))
    for written in (mean, total):
        found, _, kfac = stepped(written, **settings)
        assert same(found, expected)
        assert not kfac.settings.unknown


@pytest.mark.parametrize(
    ("written", "loss", "sentence"),
    [
        (mean, MeanLoss(), r"a mean over 8 terms .* a mean over 512 terms: .* 64 times too small"),
        (total, MeanLoss(T), r"a mean over 512 terms .* it is a sum of 512 terms: .* too large"),
        (mean, SumLoss(T), r"a sum over 512 terms .* it is a mean over 512 terms: .* too small"),
        (
            lambda m, x, y: 3 * mean(m, x, y),
            MeanLoss(T),
            r"3 times a mean over 512 terms: the curvature is 9 times too large",
        ),
    ],
)
def test_the_users_word_is_checked(written, loss, sentence):
    with pytest.warns(UserWarning, match=sentence):
        _, _, kfac = stepped(written, loss=loss)
    assert kfac.settings.found is None  # and obeyed
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        for step in range(1, 4):
            written(kfac.model, *data(step)).backward()
            kfac.step()
    assert not kfac.finding.checks_left
    assert not kfac.capture.reads


def test_a_sample_may_be_one_term_if_the_user_says_so():
    """Sums over tokens, with the damping of a whole sequence: without a warning."""
    stepped(lambda m, x, y: cross_entropy(m(x), y, reduction="sum") / N, loss=MeanLoss())
    stepped(total, loss=SumLoss())


def test_where_the_scale_does_not_matter_nothing_is_read():
    model = network()
    optimizer = NaturalMuon(model, loss=MeanLoss())
    mean(model, *data()).backward()
    assert not optimizer.kfac.capture.reads
    optimizer.step()
    assert optimizer.kfac.settings.found is None


def test_a_state_goes_on():
    model = network()
    kfac = KFAC(model, kl_clip=None, update_every=3)
    total(model, *data()).backward()
    kfac.step()
    state = kfac.state_dict()
    other = KFAC(network(), kl_clip=None, update_every=3)
    other.load_state_dict(state)
    assert other.settings.found == kfac.settings.found
    x, y = data(1, 3)
    grads = []
    for one in (kfac, other):
        one.model.zero_grad()
        total(one.model, x, y).backward()
        one.step()
        grads.append([p.grad for p in one.model.parameters()])
    assert same([grads[0]], [grads[1]])
    del state["loss"]  # of a natgrad before
    other.load_state_dict(state)
    assert other.settings.found is None
    _, _, unknown = stepped(squares)
    other.load_state_dict(unknown.state_dict())
    assert other.settings.unknown


def test_an_empty_batch_and_one_without_targets_say_nothing():
    x, y = data()
    nothing = torch.full_like(y, -100)
    model = network()
    kfac = KFAC(model, kl_clip=None, update_every=1)
    for labels in (nothing, y):
        model.zero_grad()
        cross_entropy(model(x), labels, reduction="sum").backward()
        kfac.step()
        assert not kfac.settings.unknown
        assert (kfac.settings.found is not None) == (labels is y)


class CastsItsLogits(nn.Module):
    """As under accelerate and Trainer: the loss is computed inside, logits are returned in another
    precision, so that no gradient comes to what is returned."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits.to(torch.float32)}


@pytest.mark.parametrize("curvature", [None, MonteCarloFisher()], ids=["given", "drawn"])
def test_logits_that_were_cast(curvature):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    model = CastsItsLogits()
    kfac = KFAC(model, kl_clip=None, curvature=curvature)
    model(x, y)["loss"].backward()
    kfac.step()
    assert not kfac.settings.unknown
    assert all(block.ready for block in kfac.blocks)
    if curvature is None:
        plain = nn.Linear(4, 3, dtype=torch.float64)
        plain.load_state_dict(model.layer.state_dict())
        its = KFAC(plain, kl_clip=None)
        F.cross_entropy(plain(x), y).backward()
        its.step()
        assert torch.equal(plain.weight.grad, model.layer.weight.grad)


@pytest.mark.parametrize("passes", [1, 2])
def test_pixels_of_a_sample_are_one_prediction(passes):
    """An autoencoder's mean over samples of sums over pixels: as `MeanLoss()` says it, though each
    pixel has a weight of its own; also in micro-batches."""
    torch.manual_seed(0)
    x = (torch.rand(12, 6) > 0.5).to(DTYPE)
    found = []
    for loss in (None, MeanLoss()):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)).to(DTYPE)
        kfac = KFAC(model, kl_clip=None, loss=loss)
        for part in x.chunk(passes):
            total = F.binary_cross_entropy_with_logits(model(part), part, reduction="sum")
            (total / len(x)).backward()
        kfac.step()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
