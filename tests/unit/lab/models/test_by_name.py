"""Networks by name have the published sizes; others are found by their import path."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from natgrad.errors import SettingError
from natgrad.lab.models.by_name import NAMED as ALL
from natgrad.lab.models.by_name import NamedNetwork
from natgrad.lab.names import NETWORKS
from unit.cli import nets

NAMED = {name: one for name, one in ALL.items() if one.alone is not None}
SIZES = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "alexnet": 60_965_224,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet8": 75_290,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "mlp": 784 * 1024 + 2 * 1024 * 1024 + 10 * 1024 + 3 * 1024 + 10,
    "transformer": 12 * (12 * 768**2 + 13 * 768) + 10 * 768 + 10,
    "small-transformer": 4 * (12 * 256**2 + 13 * 256) + 10 * 256 + 10,
    "small-mlp": 64 * 16 + 16 * 10 + 16 + 10,
    "small-cnn": 9 * 4 + 9 * 4 * 8 + 32 * 10 + 4 + 8 + 10,
}


@pytest.mark.parametrize("name", NAMED)
def test_named_networks_have_the_published_sizes_and_need_no_memory(name):
    parameters = list(NAMED[name].without_weights().parameters())
    assert sum(p.numel() for p in parameters) == SIZES[name]
    assert all(p.is_meta for p in parameters)


@pytest.mark.parametrize("name", NAMED)
def test_named_networks_run(name):
    network = NAMED[name]
    output = network.without_weights()(torch.empty(2, *network.sample, device="meta"))
    assert output.shape == (2, 1000 if network.sample == (3, 224, 224) else 10)


def test_a_small_one_runs_with_numbers():
    network = NAMED["resnet20"]
    output = network()(torch.randn(2, *network.sample))
    assert torch.isfinite(output).all()


def test_a_network_that_reads_numbers_is_built_with_them():
    model = NETWORKS["unit.cli.nets:Reads"].without_weights()
    assert not model.layer.weight.is_meta
    assert model.scale == 2


class Written(TorchDispatchMode):
    """The operations that write to a tensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_weight_is_filled_where_there_are_no_numbers():
    """torch would load its compiler for the first embedding, which takes longer than a plan."""

    def build():
        layers = [nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)]
        model = nn.Sequential(*layers, nn.Conv1d(4, 2, 1))
        nn.init.trunc_normal_(model[1].weight)
        nn.init.xavier_uniform_(tensor=model[-1].weight)
        return model

    with Written() as written:
        model = NamedNetwork("several", alone=build).without_weights()
    assert written.names == []
    assert model[0].weight.is_meta
    with Written() as written:
        build()
    assert len(written.names) > 8  # with numbers, all of them


def test_attributes_of_attributes():
    assert isinstance(NETWORKS["unit.cli.nets:Holder.inner"](), nets.Shared)


def test_the_current_folder_is_looked_into(tmp_path, monkeypatch):
    (tmp_path / "my_own_networks.py").write_text("import torch\nlayer = lambda: torch.nn.ReLU()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    assert isinstance(NETWORKS["my_own_networks:layer"](), torch.nn.ReLU)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet51", f"There is no network 'resnet51': name one of {', '.join(ALL)}, or a "),
        ("unit.cli.nets:", "There is no network 'unit.cli.nets:': name one of "),
        (
            "unit.cli.nowhere:f",
            "Network 'unit.cli.nowhere:f' cannot be imported (No module named "
            "'unit.cli.nowhere'): name a function that Python finds from here, as module:function.",
        ),
        (
            "unit.cli.nets:nothing",
            "Network 'unit.cli.nets:nothing' cannot be imported (module 'unit.cli.nets' has no "
            "attribute 'nothing'): name a function that Python finds from here, as "
            "module:function.",
        ),
        (
            "unit.cli.nets:NUMBER",
            "Network 'unit.cli.nets:NUMBER' is of type int but must be a function that returns a "
            "torch.nn.Module: name one as module:function.",
        ),
        (
            "unit.cli.nets:with_argument",
            "Network 'unit.cli.nets:with_argument' could not be built (TypeError: "
            "with_argument() missing 1 required positional argument: 'width'): name a function "
            "that takes no arguments and returns a torch.nn.Module.",
        ),
        (
            "unit.cli.nets:no_network",
            "Network 'unit.cli.nets:no_network' gives an object of type int but must give a "
            "torch.nn.Module: name a function that returns one.",
        ),
    ],
)
def test_errors(name, message):
    with pytest.raises(SettingError) as error:
        NETWORKS[name].without_weights()
    assert str(error.value).startswith(message)
