"""Schedule-free optimizers: judged at the average, trained elsewhere, and undisturbed by tests."""

import sys

import pytest
import torch
from torch import nn

from natgrad.comm import alone
from natgrad.errors import SettingError
from natgrad.lab.schemes import averaged_weights
from natgrad.lab.train import optimizers, train
from natgrad.lab.train.training import Training
from unit.lab.train import digit_runs as runs

pytest.importorskip("schedulefree")
SETTINGS = {"optimizer": "schedulefree", "kfac": False, "lr": 1e-2, "schedule": "polynomial"}


def trained(model, steps):
    """The optimizer after so many steps, and by hand the average that it should be judged at."""
    torch.manual_seed(1)
    settings = runs.settings(**SETTINGS)
    made = optimizers.optimizer(settings, model, lambda step: 0.01)
    start = [p.detach().clone() for p in model.parameters()]
    mean, points = [p.clone() for p in start], [p.clone() for p in start]
    squares = [torch.zeros_like(p) for p in start]
    for step in range(1, steps + 1):
        averaged_weights.to_training(made)
        made.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        made.step()
        for x, z, v, g in zip(mean, points, squares, grads, strict=True):
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            z.sub_(0.01 * g / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
            x.lerp_(z, 1 / step)
    return made, mean


def test_what_is_tested_is_the_average_of_all_points():
    """x = mean of z_1 … z_t with z <- z - lr g / sqrt(v) (Defazio et al. 2024)."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    made, mean = trained(model, 7)
    before = [p.detach().clone() for p in model.parameters()]
    with averaged_weights.while_tested(made, model):
        for p, x in zip(model.parameters(), mean, strict=True):
            torch.testing.assert_close(p.detach(), x, rtol=1e-4, atol=1e-6)
    for p, y, x in zip(model.parameters(), before, mean, strict=True):
        assert torch.equal(p, y)  # bit for bit
        assert not torch.allclose(y, x, rtol=1e-4, atol=1e-6)
    made.step()  # it is in training mode again


def test_others_have_one_set_of_weights():
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged_weights.to_training(sgd)
    assert averaged_weights.training_weights(sgd) is None
    with averaged_weights.while_tested(sgd, model):
        pass


def test_batch_norm_is_measured_at_the_average():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    made, _ = trained(model, 5)
    kept = {name: b.clone() for name, b in model.named_buffers()}
    batches = [torch.randn(16, 3), 2 + torch.randn(16, 3)]

    def calibrate():
        assert not torch.is_grad_enabled()
        model.train()
        for x in batches:
            model(x)

    with averaged_weights.while_tested(made, model, calibrate):
        hidden = [model[0](x) for x in batches]
        mean = torch.stack([h.mean(0) for h in hidden]).mean(0)
        variance = torch.stack([h.var(0) for h in hidden]).mean(0)
        torch.testing.assert_close(model[1].running_mean, mean)
        torch.testing.assert_close(model[1].running_var, variance)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, kept[name])
    assert model[1].momentum == 0.1


def test_the_rate_does_not_fall():
    settings = runs.settings(**SETTINGS, warmup_share=0.5)
    rates = [optimizers.rate(settings, 10.0, 8)(step) for step in range(8)]
    assert rates[4:] == [0.01] * 4
    assert rates[0] < rates[1] < rates[3] < 0.01


@pytest.mark.parametrize("every", [1, 3, 100])
def test_tests_and_checkpoints_change_no_weight(every, tmp_path):
    """However often there are any, and wherever a run was interrupted."""
    whole = runs.settings(**SETTINGS, steps=9)
    often = runs.settings(**SETTINGS, steps=9, evaluate_every=every)
    train(whole, tmp_path / "whole")
    first = runs.settings(**SETTINGS, steps=4, evaluate_every=every)
    # The run lasts longer than its first part: what ends it is not the schedule.
    train(first, tmp_path / "parts")
    train(often, tmp_path / "parts", resume=True)
    one, other = (runs.checkpoint(tmp_path / name) for name in ("whole", "parts"))
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name
    for a, b in zip(one["trained"], other["trained"], strict=True):
        assert torch.equal(a, b)
    assert any(
        not torch.equal(a, b) for a, b in zip(one["trained"], one["model"].values(), strict=False)
    )


def test_a_run_is_judged_at_the_average(monkeypatch):
    seen = []
    evaluate = Training.evaluate

    def noted(self, data):
        seen.append(self.optimizer.param_groups[0]["train_mode"])
        return evaluate(self, data)

    monkeypatch.setattr(Training, "evaluate", noted)
    settings = runs.settings(**SETTINGS, steps=2, evaluate_every=1, fit_samples=8)
    run = Training(settings, alone.Alone(), torch.device("cpu"))
    for step, batches in run.batches(0):
        run.step(step, batches)
        with run.tested():
            run.evaluate(run.task.test)
    assert seen == [False, False]


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(SettingError) as caught:
        optimizers.optimizer(runs.settings(**SETTINGS), nn.Linear(3, 2), lambda step: 0.1)
    assert str(caught.value) == (
        "optimizer schedulefree needs schedulefree, which is not installed: pip install "
        "'natgrad[optimizers]'."
    )
