"""`natgrad train` and `natgrad compare` on what a user has written: model, data, …"""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from natgrad.errors import SettingError
from natgrad.lab.compare import Comparison
from natgrad.lab.compare.contender import contender_of
from natgrad.lab.train import Settings, tasks
from natgrad.lab.train.toml import read
from unit.lab.train.digit_runs import assert_same

OWN = "unit.cli.own_task"
TASK = (
    *("--network", f"{OWN}:build", "--data", f"{OWN}:datasets", "--batch-size", "32"),
    *("--lr", "0.05", "--log-every", "1"),
)


@pytest.fixture(autouse=True)
def _no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def settings(**others) -> Settings:
    usual = {"data": f"{OWN}:tensors", "network": f"{OWN}:build", "steps": 2, "batch_size": 32}
    return Settings(**{**usual, **others})


@pytest.mark.parametrize("optimizer", [f"{OWN}:Signs", f"{OWN}:light_sgd"])
def test_a_run_goes_on_bit_for_bit(natgrad, tmp_path, optimizer):
    """With K-FAC in front of the optimizer, and noise that data draw by themselves."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    task = (*TASK, "--optimizer", optimizer)
    assert natgrad("train", *task, "--steps", "9", "--out", str(whole)).code == 0
    assert natgrad("train", *task, "--steps", "4", "--out", str(parts)).code == 0
    said = natgrad("train", "--resume", "--steps", "9", "--out", str(parts))
    assert said.code == 0, said.err
    assert_same(whole, parts)


def test_the_file_of_a_run_makes_it_again(natgrad, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    task = (*TASK, "--optimizer", f"{OWN}:Signs", "--no-kfac")
    assert natgrad("train", *task, "--steps", "5", "--out", str(one)).code == 0
    values = tomllib.loads((one / "settings.toml").read_text(encoding="utf-8"))
    assert values["task"]["network"] == f"{OWN}:build"
    assert values["task"]["data"] == f"{OWN}:datasets"
    assert values["optimizer"]["optimizer"] == f"{OWN}:Signs"
    again = natgrad("train", "--settings", str(one / "settings.toml"), "--out", str(other))
    assert again.code == 0, again.err
    assert_same(one, other)


def test_the_loss_falls_and_accuracy_is_told(natgrad, tmp_path):
    said = natgrad("train", *TASK, "--steps", "60", "--out", str(tmp_path / "run"))
    assert said.code == 0, said.err
    accuracy = float(said.out.split("accuracy ")[1].split("%")[0])
    assert accuracy > 80  # of three classes


def test_a_loss_of_ones_own(natgrad, tmp_path):
    task = ("--network", f"{OWN}:one_output", "--data", f"{OWN}:numbers", "--loss", f"{OWN}:square")
    rest = ("--steps", "40", "--batch-size", "48", "--lr", "0.1", "--kl-clip", "0.1")
    rest = (*rest, "--out", str(tmp_path / "run"))
    said = natgrad("train", *task, *rest)
    assert said.code == 0, said.err
    assert float(said.out.split("test loss ")[1].split(";")[0]) < 3  # of about 7 at first


def test_a_network_by_name_fits_data_of_ones_own():
    found = tasks.task(settings(network="mlp", width=5))
    model = found.network()
    assert [tuple(p.shape) for p in model.parameters()][::2] == [(5, 6), (5, 5), (3, 5)]
    assert found.shapes.inputs == (6,)
    assert found.shapes.classes == 3


def test_a_network_that_takes_shapes():
    model = tasks.task(settings(network=f"{OWN}:build_for")).network()
    assert model.weight.shape == (3, 6)


def test_data_from_the_current_folder(natgrad, tmp_path, monkeypatch):
    text = "import torch\n\ndef data():\n    x = torch.randn(40, 6)\n"
    text += "    return (x, (x.sum(1) > 0).long()), (x, (x.sum(1) > 0).long())\n"
    (tmp_path / "my_own_data_set.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    flags = ("--data", "my_own_data_set:data", "--network", "mlp", "--width", "4", "--steps", "2")
    said = natgrad("train", *flags, "--batch-size", "8", "--out", "run")
    assert said.code == 0, said.err


def test_samples_draw_the_same_whoever_asks():
    rows = tasks.task(settings(data=f"{OWN}:datasets")).train
    drawn = torch.tensor([[0.25], [0.75]], dtype=torch.float64).numpy()
    before = torch.get_rng_state()
    inputs, targets = rows.take([3, 5], drawn)
    again, _ = rows.take([5], drawn[1:])
    assert torch.equal(inputs[1:], again)
    assert not torch.equal(inputs, rows.take([3, 5], drawn[::-1])[0])
    assert torch.equal(before, torch.get_rng_state())
    assert targets.dtype == torch.int64


@pytest.mark.slow
class TestCompared:
    FLAGS = (*TASK[:6], "--steps", "4", "--trials", "1", "--seeds", "1")
    NAMES = f"sgd,{OWN}:Signs,kfac-{OWN}:light_sgd,{OWN}:NAMED"

    def test_all_of_it(self, natgrad, tmp_path):
        out = tmp_path / "compared"
        said = natgrad("compare", *self.FLAGS, "--optimizers", self.NAMES, "--out", str(out))
        assert said.code == 0, said.err
        found = Comparison.read(out)
        names = ["SGD", "Signs", "K-FAC, light_sgd", "Signs, named"]
        assert [one.name for one in found.entries] == names
        assert [one.runs[0].lr for one in found.entries] == [0.1, 0.01, 0.01, 0.5]
        assert not any(run.said for one in found.entries for run in one.runs)
        kfac = read(out / found.entries[2].runs[0].folder / "settings.toml")
        assert (kfac["kfac"], kfac["optimizer"]) == (True, f"{OWN}:light_sgd")

    def test_going_on_with_another(self, natgrad, tmp_path):
        out = tmp_path / "compared"
        first = (*self.FLAGS, "--optimizers", f"{OWN}:Signs", "--rates", f"{OWN}:Signs=0.02")
        assert natgrad("compare", *first, "--out", str(out)).code == 0
        before = Comparison.read(out).entries[0]
        more = ("--optimizers", f"{OWN}:Signs,{OWN}:light_sgd")
        said = natgrad("compare", "--resume", *more, "--out", str(out))
        assert said.code == 0, said.err
        entries = Comparison.read(out).entries
        assert [one.key for one in entries] == [
            "unit-cli-own-task-signs",
            "unit-cli-own-task-light-sgd",
        ]
        assert entries[0].runs[0].final == before.runs[0].final
        assert entries[0].runs[0].lr == 0.02

    def test_what_cannot_be_made_is_refused_before_anything_runs(self, natgrad, tmp_path):
        names = f"sgd,{OWN}:no_optimizer"
        said = natgrad(
            "compare", *self.FLAGS, "--optimizers", names, "--out", str(tmp_path / "none")
        )
        assert said.code == 2
        assert said.err.splitlines()[-1] == (
            f"natgrad: Optimizer '{OWN}:no_optimizer' gives an object of type int but must give a "
            "torch.optim.Optimizer: name a function that returns one."
        )
        assert not Path(tmp_path / "none").exists()

    def test_kfac_before_any_optimizer(self):
        one = contender_of("kfac-lamb")
        assert (one.key, one.name, one.lr) == ("kfac-lamb", "K-FAC, LAMB", 0.01)
        assert one.settings == {"optimizer": "lamb", "kfac": True}


ALLOWED = (
    "a pair of tensors (inputs, targets), a data set with len and samples (input, target), or a "
    "DataLoader over one"
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"data": "nowhere:data"},
            "Data set 'nowhere:data' cannot be imported (No module named 'nowhere'): name a "
            "function that Python finds from here, as module:function.",
        ),
        (
            {"data": f"{OWN}:NUMBER"},
            f"Data '{OWN}:NUMBER' is of type int but must be a function that returns training and "
            "test data: name one as module:function.",
        ),
        (
            {"data": f"{OWN}:missing_disk"},
            f"Data '{OWN}:missing_disk' could not be built (OSError: the disk is gone): name a "
            "function that takes no arguments and returns training and test data.",
        ),
        (
            {"data": f"{OWN}:one_data_set"},
            f"Data '{OWN}:one_data_set' give an object of type Tensor but must give two, training "
            f"and test data, each of them {ALLOWED}: return such a pair.",
        ),
        (
            {"data": f"{OWN}:uneven"},
            f"The training data of '{OWN}:uneven' must be {ALLOWED}, with as many inputs as "
            "targets, but what was returned is of type tuple of Tensor, Tensor: return one of "
            "these.",
        ),
        (
            {"data": f"{OWN}:none_at_all"},
            f"The training data of '{OWN}:none_at_all' must be {ALLOWED}, with as many inputs as "
            "targets, but what was returned has no samples: return one of these.",
        ),
        (
            {"data": f"{OWN}:single_values"},
            f"Data '{OWN}:single_values' give batches of type Tensor but must give pairs of "
            "tensors (inputs, targets): return samples (input, target), or a DataLoader "
            "with a collate_fn that makes such pairs.",
        ),
        (
            {"folder": "somewhere"},
            f"folder is where data are, but {OWN}:tensors come from your own function: leave it "
            "out.",
        ),
        (
            {"loss": "instances", "metric": "loss"},
            f"The data {OWN}:tensors are batches of tensors but loss instances is for those of "
            "coco: name another loss, or other data.",
        ),
        (
            {"data": f"{OWN}:unlabelled", "mixup": 0.2},
            f"mixup mixes classes but the data {OWN}:unlabelled do not say how many there are: "
            "give the training data an attribute classes, a number or their names.",
        ),
        (
            {"erasing": 0.5},
            f"erasing is for images [channels, height, width] but inputs of the data {OWN}:tensors "
            "have shape [6]: leave it out.",
        ),
        (
            {"network": f"{OWN}:build_from_two"},
            f"Network '{OWN}:build_from_two' could not be built (TypeError: build_from_two() "
            "missing 2 required positional arguments: 'first' and 'second'): name a function that "
            "takes no arguments, or the shapes of the task, and returns a torch.nn.Module.",
        ),
        (
            {"network": "convnet"},
            "network convnet takes images [channels, height, width] but the data are inputs of "
            "shape [6]: name another network, or other data.",
        ),
    ],
)
def test_what_does_not_fit(values, message):
    with pytest.raises(SettingError) as error:
        tasks.task(settings(**values)).network()
    assert str(error.value) == message


def test_a_loss_that_is_no_number():
    found = tasks.task(settings(loss=f"{OWN}:squares", data=f"{OWN}:numbers"))
    with pytest.raises(SettingError) as error:
        found.objective.loss(torch.zeros(2, 1), torch.zeros(2, 1))
    assert str(error.value) == (
        f"The loss {OWN}:squares gives shape [2, 1] but must give one number, the mean over "
        "samples, as a tensor: return that."
    )


def test_targets_of_ones_own_loss_cannot_be_drawn():
    with pytest.raises(SettingError) as error:
        replace(settings(), loss=f"{OWN}:square", fisher="exact")
    assert str(error.value) == (
        f"fisher is exact but nobody knows how targets of the loss {OWN}:square are drawn: leave "
        "it out, or name another loss."
    )
