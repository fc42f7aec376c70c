"""Contenders share the task and nothing else, and K-FAC is as it stands."""

import copy
from dataclasses import asdict, fields, replace
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch import nn

import natgrad
from natgrad.errors import SettingError
from natgrad.lab.compare import CONTENDERS, Contender
from natgrad.lab.compare.contender import OPTIMIZER_SETTINGS, neutral, preset_contender
from natgrad.lab.names import OPTIMIZERS
from natgrad.lab.schemes import optimizers_by_name as module
from natgrad.lab.train import PRESETS, Settings, optimizers
from natgrad.lab.train.task_losses import Classes

SHARED = {one.name for one in fields(Settings)} - set(OPTIMIZER_SETTINGS) - {"seed"}


def test_those_that_were_asked_for():
    assert list(CONTENDERS) == [
        "sgd",
        "adamw",
        "schedulefree",
        "muon",
        "muon-hidden",
        "torch-muon",
        "soap",
        "soap-1",
        "shampoo",
        "lamb",
        "kfac",
        "kfac-adamw",
        "naturalmuon",
    ]
    assert all(key == one.key for key, one in CONTENDERS.items())


@pytest.mark.parametrize("key", CONTENDERS)
def test_nothing_of_one_optimizer_leaks_into_another(key):
    one, usual = CONTENDERS[key], Settings(steps=1)
    for preset in PRESETS.values():
        told = one.settings_for(preset.settings, 0.5, 7)
        assert (told.lr, told.seed) == (0.5, 7)
        assert all(getattr(told, name) == getattr(preset.settings, name) for name in SHARED)
        for name in set(OPTIMIZER_SETTINGS) - {"lr", "kfac", *one.settings}:
            assert getattr(told, name) == getattr(usual, name)
        assert told.kfac == key.startswith("kfac")


@pytest.mark.parametrize("name", PRESETS)
def test_the_one_of_the_preset_is_what_train_does(name):
    task = PRESETS[name].settings
    one = preset_contender(task)
    assert one.settings_for(task, task.lr, task.seed) == task
    assert one.lr == task.lr
    assert one.key == "preset"


def test_the_name_of_the_one_of_the_preset():
    task = Settings(steps=1, optimizer="adamw", kfac=False, momentum=0.8, lr=7.0)
    one = preset_contender(task)
    assert one.settings == {"optimizer": "adamw", "momentum": 0.8}
    assert one.name == "AdamW (preset)"
    assert preset_contender(replace(task, kfac=True)).name == "K-FAC, AdamW (preset)"


def test_every_optimizer_has_a_name():
    for name in Settings.__dataclass_fields__["optimizer"].metadata["words"]:
        one = preset_contender(Settings(steps=1, optimizer=name, kfac=False))
        assert one.name == f"{OPTIMIZERS[name].title} (preset)"
    titles = [one.title for one in OPTIMIZERS.entries().values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("key", ["kfac", "kfac-adamw"])
@pytest.mark.parametrize("name", ["digits-cnn", "cifar10-resnet32", "imagenet-resnet50-bs4096"])
def test_kfac_is_as_it_stands(name, key):
    """Whatever a preset says: the same steps as those of the two lines, bit for bit."""
    told = CONTENDERS[key].settings_for(PRESETS[name].settings, 0.01, 0)
    one = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    other = copy.deepcopy(one)
    inner = optimizers.optimizer(told, one, lambda step: 0.01)
    kfac = optimizers.preconditioner(told, one, inner, Classes(3))
    plain = {"kfac": torch.optim.SGD, "kfac-adamw": torch.optim.AdamW}[key]
    options = {"momentum": 0.9} if key == "kfac" else {}
    outer = plain(other.parameters(), lr=0.01, weight_decay=told.weight_decay, **options)
    assert told.weight_decay == 0 or len(inner.param_groups) > 1
    for group in inner.param_groups:  # biases have none in training
        group["weight_decay"] = told.weight_decay
    stands = natgrad.KFAC(other, outer)
    for _ in range(12):
        x, y = torch.randn(16, 5), torch.randint(3, (16,))
        for model, preconditioner, optimizer in ((one, kfac, inner), (other, stands, outer)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            preconditioner.step()
            optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


PACKAGES = {
    "schedulefree": "schedulefree",
    **dict.fromkeys(("muon", "muon-hidden", "soap", "soap-1", "shampoo"), "pytorch_optimizer"),
}


@pytest.mark.parametrize("key", PACKAGES)
def test_a_library_that_is_not_installed(monkeypatch, key):
    monkeypatch.setattr(module, "find_spec", lambda name: ModuleSpec(name, None))
    assert all(one.missing() == "" for one in CONTENDERS.values())
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert CONTENDERS[key].missing() == (
        f"{CONTENDERS[key].name} comes with {PACKAGES[key]}, which is not installed: pip install "
        "'natgrad[optimizers]'."
    )
    assert [k for k, one in CONTENDERS.items() if one.missing()] == list(PACKAGES)


def test_a_library_that_was_taken_away(monkeypatch):
    def gone(name):
        raise ValueError(f"{name}.__spec__ is None")

    monkeypatch.setattr(module, "find_spec", gone)
    assert CONTENDERS["soap"].missing()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"key": "../AdamW"},
            "The key of a contender is '../AdamW' but must be small letters and digits with single "
            "dashes between them, as it names a folder: write one such as my-adamw.",
        ),
        (
            {"lr": 0.0},
            "The learning rate of mine is 0.0 but must be finite and above 0: pass such a number.",
        ),
        (
            {"settings": {"batch_size": 8}},
            "The contender mine has a batch_size of its own, which all must share: leave it out, "
            "or set it for the task.",
        ),
        (
            {"settings": {"lr": 0.1}},
            "The contender mine has a lr of its own, which all must share: leave it out, or set it "
            "for the task.",
        ),
    ],
)
def test_contenders_that_cannot_be(values, message):
    usual = {"key": "mine", "name": "Mine", "about": "", "settings": {}, "lr": 0.1}
    with pytest.raises(SettingError) as error:
        Contender(**{**usual, **values})
    assert str(error.value) == message


def test_a_neutral_task_has_the_rest():
    task = PRESETS["imagenet-resnet50-bs4096"].settings
    before, after = asdict(task), asdict(neutral(task))
    assert {name for name in before if before[name] != after[name]} <= set(OPTIMIZER_SETTINGS)
    assert not neutral(task).kfac
