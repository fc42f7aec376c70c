"""Comparisons on a network, a loss and data that are objects and not names."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.compare import Comparison, Contender, compare_own, own_task, trial

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
DATA = ((X[:40], X[:40, :2]), (X[40:], X[40:, :2]))
BRIEF = {"steps": 4, "batch_size": 10, "trials": 1, "seeds": 1, "threads": 1}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(trial.gc, "collect", lambda: 0)


def build():
    return nn.Linear(4, 2)


class Half(torch.optim.SGD):
    """Twice its rate is SGD's."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr / 2)

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] /= 2
        return super().step(closure)


def ends(found):
    return {one.key: one.runs[0].final for one in found.entries}


def test_objects_are_compared_and_gone_on_with(tmp_path):
    sgd = Contender("plain", "SGD", "", {"optimizer": "sgd", "momentum": 0.0}, 0.1)
    mine = {"Plain": sgd, "Half": Half, "Function": lambda p, lr: torch.optim.SGD(p, lr=lr)}
    rates = {"half": 0.2, "Function": 0.1}
    first = compare_own(build, F.mse_loss, DATA, mine, folder=tmp_path, rates=rates, **BRIEF)
    assert [one.name for one in first.entries] == ["Plain", "Half", "Function"]
    final = ends(first)
    assert final["plain"] == pytest.approx(final["half"], rel=1e-5)
    assert final["plain"] == pytest.approx(final["function"], rel=1e-5)
    again = compare_own(
        build, F.mse_loss, DATA, mine, folder=tmp_path, rates=rates, resume=True, **BRIEF
    )
    assert again == first == Comparison.read(tmp_path)


def test_names_of_losses_and_optimizers(tmp_path):
    labels = tuple((x, y[:, 0].gt(0).long()) for x, y in DATA)
    found = compare_own(
        lambda shapes: nn.Linear(shapes.inputs[0], shapes.classes),
        "cross-entropy",
        labels,
        ["sgd", "naturalmuon"],
        folder=tmp_path,
        **BRIEF,
    )
    assert [one.name for one in found.entries] == ["SGD", "NaturalMuon"]
    assert "test_accuracy" in found.entries[0].runs[0].curve.values
    assert found.target_from == "what SGD ends with"


def test_objects_stand_for_one_thread_and_one_comparison(tmp_path):
    finals = {}

    def one(name, factor):
        net = lambda: nn.Linear(4, 2, bias=factor > 1)  # noqa: E731
        loss = lambda output, target: factor * F.mse_loss(output, target)  # noqa: E731
        found = compare_own(net, loss, DATA, ["sgd"], folder=tmp_path / name, **BRIEF)
        finals[name] = ends(found)["sgd"]

    threads = [threading.Thread(target=one, args=pair) for pair in (("a", 1.0), ("b", 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = dict(finals)
    one("a2", 1.0)
    one("b2", 2.0)
    assert (finals["a2"], finals["b2"]) == (alone["a"], alone["b"])
    with pytest.raises(AttributeError, match="has no attribute 'build'"):
        own_task.build  # noqa: B018


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"step": 3}, "no argument step: pass fields of ComparisonSetup or Settings"),
        ({"network": "mlp"}, "no argument network: pass fields"),
        (
            {"rates": {"adam": 0.1}},
            "a learning rate of 'adam' but no such optimizer: name one of sgd",
        ),
        ({"optimizers": ["adan"]}, "There is no optimizer 'adan': name some of"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, others, said):
    with pytest.raises(SettingError, match=said):
        compare_own(
            build,
            F.mse_loss,
            DATA,
            **{"optimizers": ["sgd"], "folder": tmp_path, **BRIEF, **others},
        )
