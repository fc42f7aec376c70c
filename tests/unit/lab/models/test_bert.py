"""BERT is that of transformers, with K-FAC's blocks in the right places and of the right size."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oracles
from cases import Case
from natgrad import KFAC, MeanLoss, UnitWise
from natgrad.errors import SettingError
from natgrad.lab.models import BERT_BASE, BERT_LARGE, Bert, BertSize, bert
from natgrad.lab.schemes import LAMB, parameter_groups
from oracles import close
from training_loops import factors

TINY = BertSize(layers=1, heads=2, width=4)
WORDS, LENGTH, GUESSED = 11, 6, 2


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


def masked(n, words=WORDS, length=LENGTH):
    """Pieces of which none is padding, and as many to guess in every sample."""
    x = torch.randint(1, words, (n, length))
    targets = torch.full_like(x, -100)
    targets[:, 1 : 1 + GUESSED] = torch.randint(words, (n, GUESSED))
    return x, targets


def loss_of(output, targets):
    """The mean over all that is guessed."""
    return F.cross_entropy(output.float().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("size", "expected"), [(BERT_BASE, 109_514_298), (BERT_LARGE, 335_174_458)], ids=["12", "24"]
)
def test_sizes(transformers, size, expected):
    with torch.device("meta"):
        model = bert(30522, size)
    width = size.width
    embedding = (30522 + 512 + 2 + 2) * width
    layers = size.layers * (12 * width**2 + 13 * width)
    head = width**2 + 3 * width + 30522
    assert embedding + layers + head == expected
    assert sum(p.numel() for p in model.parameters()) == expected


def test_it_is_that_of_transformers(transformers):
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(3)
    theirs = transformers.BertForMaskedLM(config).eval()
    torch.manual_seed(3)
    ours = bert(WORDS, BertSize(2, 2, 4), context=LENGTH).eval()
    x, _ = masked(3)
    assert ours(x).shape == (3, LENGTH, WORDS)
    assert torch.equal(ours(x), theirs(x).logits)
    assert torch.equal(Bert(theirs)(x[:, :4]), theirs(x[:, :4]).logits)
    mask = torch.ones_like(x)
    mask[0, 4:] = 0
    named = {"input_ids": x, "attention_mask": mask}
    assert torch.equal(ours(named), theirs(**named).logits)
    assert not torch.equal(ours(named), ours(x))


def test_dropout(transformers):
    model, (x, _) = bert(WORDS, TINY, dropout=0.5), masked(2)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.5}
    assert not torch.equal(model(x), model(x))
    without = bert(WORDS, TINY, dropout=0.0)
    assert torch.equal(without(x), without(x))


def views(model, x, targets):
    """Kronecker views of all layers, of the sum of a sample's losses, from one after the other."""
    case = Case("bert", lambda: model, lambda n: (x,))
    views = {}
    for one, wanted in zip(x.split(1), targets.split(1), strict=True):
        found = oracles.record(model, (one,))
        # The head has a bias of its own, which its decoder adds.
        calls = [c for c in found.calls if type(c.module).__name__ != "BertLMPredictionHead"]
        total = F.cross_entropy(found.out.flatten(0, 1), wanted.flatten(), reduction="sum")
        gs = torch.autograd.grad(total, [call.out for call in calls])
        for call, g in zip(calls, gs, strict=True):
            for view in oracles.views_of(case, model, call, g, 1):
                known = views.setdefault(view.name, view)
                if known is not view:
                    known.uses += view.uses
                    known.transposed += view.transposed
    return {name: joined(view) for name, view in views.items()}


def joined(view):
    """As if all samples had come at once."""

    def whole(uses):
        a, g, used = zip(*((use.a, use.g, use.used) for use in uses), strict=True)
        return [oracles.Use(torch.cat(a, 1), torch.cat(g, 1), torch.cat(used))]

    uses, transposed = (whole(some) if some else [] for some in (view.uses, view.transposed))
    return replace(view, uses=uses, transposed=transposed)


def test_factors_are_those_of_the_sums(transformers):
    """Of a loss that is the mean over masked pieces; the embedding and its transpose are one."""
    model = bert(WORDS, TINY, context=LENGTH, dropout=0.0).double()
    x, targets = masked(3)
    expected = views(model, x, targets)
    kfac = KFAC(
        model, kl_clip=None, update_every=1, refresh_every=1, loss=MeanLoss(GUESSED), damping=0.1
    )
    F.cross_entropy(model(x).flatten(0, 1), targets.flatten()).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    kfac.step()
    after = {name: p.grad for name, p in model.named_parameters()}
    # The head's bias is none of the embedding's, and has a diagonal of its own.
    (bias,) = {block.name for block in kfac.blocks} - set(expected)
    assert set(expected) < {block.name for block in kfac.blocks}
    (name,) = (name for name in before if name.endswith("predictions.bias"))
    sums = F.cross_entropy(model(x).transpose(1, 2), targets, reduction="none").sum(1)
    each = [torch.autograd.grad(one, model.get_parameter(name), retain_graph=True) for one in sums]
    diagonal = torch.stack([g for (g,) in each]).square().mean(0) / GUESSED
    assert bias.endswith("predictions.decoder.bias")
    assert close(after[name], before[name] / (diagonal + 0.1))
    blocks = [block for block in kfac.blocks if block.name != bias]
    kronecker = [block for block in blocks if not isinstance(block.structure, UnitWise)]
    assert len(kronecker) == 3 + 6 + 1  # embeddings, a layer, and the head's own
    for block in kronecker:
        view = expected[block.name]
        A, G = oracles.kronecker(view, 3, "expand")
        G = G / GUESSED  # the mean over all that is guessed, not over samples
        merged = block.structure.matrices(block.kept(), block.forms)
        a, g = oracles.term_scale(view, 3)
        assert close(block.forms["A"].dense(merged["A"]), A, scale=a), block.name
        assert close(block.forms["G"].dense(merged["G"]), G, scale=g), block.name
        solved = oracles.solve(oracles.kronecker_block(A, G), 0.1, view.matrix(before))
        assert close(view.matrix(after), solved), block.name


def test_what_is_covered(transformers):
    model = bert(WORDS, TINY)
    kfac, (x, targets) = KFAC(model, kl_clip=None), masked(3)
    loss_of(model(x), targets).backward()
    kfac.step()
    states = {row[0].removeprefix("model."): row[2:] for row in kfac.coverage().rows}
    assert states["cls.predictions.bias"][1] == "Diagonal()"  # a bias of a tied weight
    assert {state for *_, state in states.values()} == {"preconditioned"}
    words = states["bert.embeddings.word_embeddings.weight"]
    assert words[:2] == ("Embedding + Linear", "Kronecker(sharing='expand')")
    assert not any("decoder" in name for name in states)


def test_micro_batches_add_up(transformers):
    x, targets = masked(4)

    def found(parts):
        torch.manual_seed(0)
        model = bert(WORDS, TINY, context=LENGTH, dropout=0.0).double()
        optimizer = LAMB(parameter_groups(model, 0.01), lr=0.01)
        kfac = KFAC(model, optimizer, loss=MeanLoss(GUESSED), update_every=1, refresh_every=1)
        for _ in range(2):
            optimizer.zero_grad()
            for inputs, wanted in zip(x.split(parts), targets.split(parts), strict=True):
                output = model(inputs).flatten(0, 1)
                share = len(inputs) / len(x)
                (F.cross_entropy(output, wanted.flatten()) * share).backward()
            kfac.step()
            optimizer.step()
        return factors(kfac), dict(model.named_parameters())

    whole, parts = found([4]), found([1, 3])
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], msg=name, rtol=1e-6, atol=1e-9)


def test_it_learns_under_autocast_with_lamb(transformers):
    model = bert(WORDS, BertSize(2, 2, 8), context=LENGTH, dropout=0.0)
    optimizer = LAMB(parameter_groups(model, 0.01), lr=0.1)
    kfac = KFAC(model, optimizer, loss=MeanLoss(GUESSED), update_every=2, refresh_every=4)
    x, targets = masked(8)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        assert output.dtype == torch.bfloat16
        loss = loss_of(output, targets)
        loss.backward()
        kfac.step()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
    assert all(block.ready for block in kfac.blocks)
    assert all(torch.isfinite(value).all() for value in factors(kfac).values())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SettingError) as error:
        bert(WORDS, TINY)
    assert str(error.value) == (
        "BERT needs transformers, which is not installed: pip install 'natgrad[train]'."
    )


def test_transformers_that_do_not_import(monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, name):
            if name.startswith("Bert"):
                raise RuntimeError("operator torchvision::nms does not exist\nTraceback …")
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "transformers", Broken("transformers"))
    with pytest.raises(SettingError) as error:
        bert(WORDS, TINY)
    assert str(error.value) == (
        "BERT could not be imported from transformers (operator torchvision::nms does not exist): "
        "repair or remove the package that fails, or pip install 'natgrad[train]' in a new "
        "environment."
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BertSize(1, 3, 8),
            "A BERT has 1 layers, 3 heads and width 8 but each must be at least 1, and heads "
            "divide the width: pass such numbers.",
        ),
        (
            lambda: BertSize(0, 1, 8),
            "A BERT has 0 layers, 1 heads and width 8 but each must be at least 1, and heads "
            "divide the width: pass such numbers.",
        ),
        (
            lambda: bert(0, TINY),
            "A BERT has vocabulary 0 and context 512 but each must be at least 1: pass such "
            "numbers.",
        ),
    ],
    ids=["heads", "layers", "vocabulary"],
)
def test_sizes_that_cannot_be(make, message):
    with pytest.raises(SettingError) as error:
        make()
    assert str(error.value) == message


def test_a_window_that_is_too_long(transformers):
    with pytest.raises(SettingError) as error:
        bert(WORDS, TINY, context=4)(torch.ones(2, 6, dtype=torch.int64))
    assert str(error.value) == "A BERT of context 4 was given 6 tokens: give it at most 4."
