"""Weights and data are read from files, and nothing in them is run."""

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from natgrad.cli.checkpoints import load_into, pair
from natgrad.errors import SettingError


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": state, "optimizer": {"lr": 0.1}},
        lambda state: {"model_state_dict": state},
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {f"_orig_mod.module.{name}": value for name, value in state.items()},
    ],
    ids=["plain", "model", "state_dict", "model_state_dict", "ddp", "compiled"],
)
def test_a_checkpoint(tmp_path, wrap):
    torch.save(wrap(net(1).state_dict()), tmp_path / "a.pt")
    model = net(0)
    assert not same(model, net(1))
    load_into(model, tmp_path / "a.pt")
    assert same(model, net(1))


def test_safetensors_if_they_are_there(tmp_path, monkeypatch):
    stub = types.ModuleType("safetensors.torch")
    stub.load_file = lambda file: net(1).state_dict()
    monkeypatch.setitem(sys.modules, "safetensors", types.ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", stub)
    model = net(0)
    load_into(model, tmp_path / "a.safetensors")
    assert same(model, net(1))

    def broken(file):
        raise KeyError("header")

    stub.load_file = broken
    with pytest.raises(SettingError, match=r"a\.safetensors cannot be read \(KeyError: 'header'\)"):
        load_into(model, tmp_path / "a.safetensors")


def test_without_safetensors(tmp_path, monkeypatch):
    for name in ("safetensors", "safetensors.torch"):  # one may have been imported already
        monkeypatch.setitem(sys.modules, name, None)
    file = tmp_path / "a.safetensors"
    with pytest.raises(SettingError) as error:
        load_into(net(), file)
    assert str(error.value) == (
        f"{file} needs the package safetensors, which is not installed: pip install safetensors."
    )


class Harm:
    """What a pickle may do to its reader."""

    def __reduce__(self):
        return exec, ("raise AssertionError('code was run')",)


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"model": Harm()}, tmp_path / "a.pt")
    for read in (lambda: load_into(net(), tmp_path / "a.pt"), lambda: pair(tmp_path / "a.pt")):
        with pytest.raises(SettingError, match="cannot be read without running code that is insi"):
            read()
    np.savez(tmp_path / "a.npz", inputs=np.array([Harm()], dtype=object), targets=np.zeros(1))
    with pytest.raises(SettingError, match="cannot be read"):
        pair(tmp_path / "a.npz")


def fails(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(SettingError) as error:
        load_into(net(), tmp_path / "a.pt")
    return str(error.value).replace(str(tmp_path / "a.pt"), "FILE")


def test_other_weights(tmp_path):
    state = net().state_dict()
    lacking = {"weight": state["weight"]}
    assert fails(tmp_path, lacking) == (
        "--checkpoint FILE lacks 'bias', which the model has: give a checkpoint of this model."
    )
    wide = {**state, "weight": torch.zeros(2, 4)}
    assert fails(tmp_path, wide) == (
        "--checkpoint FILE has 'weight' of shape [2, 4] but the model's has [2, 3]: give a "
        "checkpoint of this model."
    )
    more = {**state, "scale": torch.zeros(1)}
    assert fails(tmp_path, more) == (
        "--checkpoint FILE has 'scale', which the model has not: give a checkpoint of this model."
    )
    for other in (torch.zeros(2), {"epoch": 3}, [1, 2]):
        assert fails(tmp_path, other) == (
            "--checkpoint FILE holds no state_dict, by itself or as 'model': write one with "
            "torch.save(model.state_dict(), path)."
        )


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "a.pt").write_text("not at all")
    with pytest.raises(SettingError, match="cannot be read"):
        load_into(net(), tmp_path / "a.pt")
    with pytest.raises(SettingError, match="there is no such file"):
        load_into(net(), tmp_path / "b.pt")
    with pytest.raises(SettingError, match="cannot be read"):
        load_into(net(), tmp_path)


@pytest.mark.parametrize("names", [("inputs", "targets"), ("x", "y"), ("images", "labels")])
@pytest.mark.parametrize("ending", ["npz", "pt"])
def test_inputs_and_targets(tmp_path, names, ending):
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    file = tmp_path / f"a.{ending}"
    if ending == "npz":
        np.savez(file, **{names[0]: x.numpy(), names[1]: y.numpy()})
    else:
        torch.save(dict(zip(names, (x, y), strict=True)), file)
    found = pair(file)
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], y)


def test_a_pair(tmp_path):
    torch.save((torch.ones(2, 3), torch.zeros(2)), tmp_path / "a.pt")
    assert pair(tmp_path / "a.pt")[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"a": torch.ones(2), "b": torch.ones(2)},
            "FILE holds the names ['a', 'b'] but must hold the tensors 'inputs' and 'targets': "
            "write such a file.",
        ),
        (
            torch.ones(3),
            "FILE holds no pair but must hold the tensors 'inputs' and 'targets': write such a "
            "file.",
        ),
        (
            (torch.ones(3, 1), torch.ones(2)),
            "FILE holds 3 inputs and 2 targets but must hold as many of both, and some: write a "
            "row for each sample.",
        ),
        (
            (torch.ones(0, 1), torch.ones(0)),
            "FILE holds 0 inputs and 0 targets but must hold as many of both, and some: write a "
            "row for each sample.",
        ),
    ],
)
def test_what_is_no_data(tmp_path, content, sentence):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(SettingError) as error:
        pair(tmp_path / "a.pt")
    assert str(error.value).replace(str(tmp_path / "a.pt"), "FILE") == sentence
