"""Optimizers of another library: what they are given, and that their runs go on bit for bit."""

import sys

import pytest
import torch
from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.models import GPT
from natgrad.lab.schemes import Lookahead, third_party
from natgrad.lab.train import optimizers, train
from unit.lab.train import digit_runs as runs

NAMES = ("muon", "soap", "shampoo", "adabound")
OF_OTHERS = ("schedulefree", "torch-muon")
ALL = (*NAMES, *OF_OTHERS)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_library(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    settings = runs.settings(optimizer=name, kfac=False)
    with pytest.raises(SettingError) as caught:
        optimizers.optimizer(settings, nn.Linear(3, 2), lambda step: 0.1)
    assert str(caught.value) == (
        f"optimizer {name} needs pytorch_optimizer, which is not installed: pip install "
        "'natgrad[optimizers]'."
    )


@pytest.mark.parametrize("name", ALL)
def test_going_on(name, tmp_path):
    pytest.importorskip("pytorch_optimizer")
    settings = {"optimizer": name, "kfac": False, "lr": 1e-2, "checkpoint_every": 100}
    train(runs.settings(**settings, steps=24), tmp_path / "whole")
    train(runs.settings(**settings, steps=13), tmp_path / "parts")
    train(runs.settings(**settings, steps=24), tmp_path / "parts", resume=True)
    runs.assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("name", ALL)
def test_the_loss_falls(name, tmp_path):
    pytest.importorskip("pytorch_optimizer")
    rates = {"muon": 3e-2, "shampoo": 1.0, "torch-muon": 3e-2}
    settings = runs.settings(
        optimizer=name, kfac=False, lr=rates.get(name, 1e-2), steps=60, mixup=0.0, erasing=0.0
    )
    outcome = train(settings, tmp_path)
    assert outcome.metrics["loss"] < 1.2  # of 2.3 at first


def test_muon_takes_matrices_that_are_no_embeddings():
    pytest.importorskip("pytorch_optimizer")
    model = GPT(11, 8, layers=1, heads=2, width=8)
    settings = runs.settings(optimizer="muon", kfac=False, weight_decay=0.1)
    made = optimizers.optimizer(settings, model, lambda step: 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    assert embedded
    seen = []
    for group in made.param_groups:
        assert group["lr"] == settings.lr
        for p in group["params"]:
            seen.append(names[id(p)])
            assert group["use_muon"] == (p.ndim >= 2 and id(p) not in embedded), names[id(p)]
            assert group["weight_decay"] == (0.1 if p.ndim >= 2 else 0.0), names[id(p)]
    assert sorted(seen) == sorted(names.values())


def test_muon_without_biases():
    pytest.importorskip("pytorch_optimizer")
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))]}]
    made = third_party.muon(groups, 0.02, 0.95, nn.Linear(1, 1))
    assert [group["use_muon"] for group in made.param_groups] == [True]


@pytest.mark.parametrize("name", NAMES)
def test_momentum_and_weight_decay_reach_them(name):
    pytest.importorskip("pytorch_optimizer")
    settings = runs.settings(optimizer=name, kfac=False, momentum=0.7, weight_decay=0.125)
    made = optimizers.optimizer(settings, nn.Linear(3, 2), lambda step: 0.1)
    for group in made.param_groups:
        if group["weight_decay"]:  # biases have none
            assert group["weight_decay"] == 0.125
        if name == "soap":
            assert group["betas"] == (0.7, 0.95)
        elif name == "adabound":
            assert group["betas"] == (0.7, 0.999)
        elif name == "shampoo" or group["use_muon"]:
            assert group["momentum"] == 0.7
    assert any(group["weight_decay"] for group in made.param_groups)


def test_muon_of_hidden_layers_leaves_head_and_embeddings_to_adamw():
    pytest.importorskip("pytorch_optimizer")
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    settings = runs.settings(optimizer="muon-hidden", kfac=False)
    made = optimizers.optimizer(settings, model, lambda step: 0.1)
    by_muon = {id(p) for g in made.param_groups if g["use_muon"] for p in g["params"]}
    assert by_muon == {id(model[1].weight)}


def test_soap_with_a_basis_of_every_step():
    pytest.importorskip("pytorch_optimizer")
    for name, every in (("soap", 10), ("soap-1", 1)):
        settings = runs.settings(optimizer=name, kfac=False)
        made = optimizers.optimizer(settings, nn.Linear(3, 2), lambda step: 0.1)
        assert {group["precondition_frequency"] for group in made.param_groups} == {every}


def test_bounds_close_on_a_hundred_times_the_rate():
    pytest.importorskip("pytorch_optimizer")
    for name, largest in (("adabound", False), ("amsbound", True)):
        settings = runs.settings(optimizer=name, kfac=False, lr=0.02)
        made = optimizers.optimizer(settings, nn.Linear(3, 2), lambda step: 0.1)
        for group in made.param_groups:
            assert (group["lr"], group["final_lr"], group["ams_bound"]) == (0.02, 2.0, largest)


@pytest.mark.parametrize(
    ("name", "kind", "inside", "amsgrad"),
    [
        ("adam", torch.optim.Adam, None, False),
        ("amsgrad", torch.optim.Adam, None, True),
        ("radam", torch.optim.RAdam, None, None),
        ("lookahead", Lookahead, torch.optim.SGD, None),
        ("lookahead-adam", Lookahead, torch.optim.Adam, False),
    ],
)
def test_those_of_torch(name, kind, inside, amsgrad):
    settings = runs.settings(optimizer=name, kfac=False, momentum=0.7, weight_decay=0.1)
    made = optimizers.optimizer(settings, nn.Linear(3, 2), lambda step: 0.1)
    assert type(made) is kind
    if inside is not None:
        assert type(made.optimizer) is inside
    for group in made.param_groups:
        assert group["lr"] == settings.lr
        assert group.get("momentum", group.get("betas", (0,))[0]) == 0.7
        assert group.get("amsgrad") == amsgrad
    assert {group["weight_decay"] for group in made.param_groups} == {0.1, 0.0}


def test_muon_by_torch_steps_kernels_as_matrices():
    """As torch.optim.Muon steps them itself, and AdamW the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 5))
    kernel, weight = (m.weight.detach().clone().flatten(1) for m in (model[0], model[2]))
    matrices = [nn.Parameter(kernel), nn.Parameter(weight)]
    vectors = [nn.Parameter(m.bias.detach().clone()) for m in (model[0], model[2])]
    decay = {"weight_decay": 0.3}
    muon = torch.optim.Muon(matrices, 0.05, momentum=0.8, adjust_lr_fn="match_rms_adamw", **decay)
    adamw = torch.optim.AdamW(vectors, 0.05, betas=(0.9, 0.95), weight_decay=0.0)
    settings = runs.settings(
        optimizer="torch-muon", kfac=False, lr=0.1, momentum=0.8, weight_decay=0.3
    )
    made = optimizers.optimizer(settings, model, lambda step: 0.1)
    for group in made.param_groups:
        group["lr"] = 0.05  # as a schedule sets it
    for _ in range(3):
        made.zero_grad()
        model(torch.randn(4, 2, 4, 4)).square().sum().backward()
        for own, one in zip(matrices, (model[0], model[2]), strict=True):
            own.grad = one.weight.grad.flatten(1)
        for own, one in zip(vectors, (model[0], model[2]), strict=True):
            own.grad = one.bias.grad.clone()
        for each in (muon, adamw, made):
            each.step()
    for own, one in zip(matrices, (model[0], model[2]), strict=True):
        assert torch.equal(own.view_as(one.weight), one.weight)
    for own, one in zip(vectors, (model[0], model[2]), strict=True):
        assert torch.equal(own, one.bias)


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_acts_times_the_learning_rate(name):
    """As in the others of a comparison: without a gradient a weight shrinks by lr * decay."""
    pytest.importorskip("pytorch_optimizer")
    layer = nn.Linear(3, 2, bias=False)
    before = layer.weight.detach().clone()
    settings = runs.settings(optimizer=name, kfac=False, lr=0.1, weight_decay=0.5)
    made = optimizers.optimizer(settings, layer, lambda step: 0.1)
    for _ in range(2):  # the first step of SOAP only looks
        layer.weight.grad = torch.zeros_like(layer.weight)
        made.step()
    steps = 1 if name == "soap" else 2
    torch.testing.assert_close(layer.weight.detach(), before * 0.95**steps, rtol=1e-4, atol=1e-6)
