"""Warm-up and schedulers by hand."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from natgrad.errors import SettingError
from natgrad.lab.schemes import LinearWarmup, PolynomialDecay, StepDecay, relative, steps_of


def test_resnet_32_by_hand():
    """Rate 0.1 · N, five epochs of warm-up from 0.1, a tenth at epochs 35, 75 and 90; N = 4."""
    decay = StepDecay(0.4, 0.1, steps_of((35, 75, 90), steps_per_epoch=98))
    assert decay.at == (3430, 7350, 8820)
    rate = LinearWarmup(decay, steps=5 * 98, start=1 / 4)
    expected = {0: 0.1, 245: 0.25, 490: 0.4, 3429: 0.4, 3430: 0.04, 7350: 0.004, 8820: 0.0004}
    for step, value in expected.items():
        assert rate(step) == pytest.approx(value, rel=1e-12)


def test_from_zero_before_a_falling_rate():
    rate = LinearWarmup(PolynomialDecay(8.0, 0, 4, 1, steps_per_epoch=2), steps=4)
    # 8 (1 - t/8), times t/4 up to step 4.
    assert [rate(t) for t in range(6)] == [0.0, 7 / 4, 6 * 2 / 4, 5 * 3 / 4, 4.0, 3.0]


@pytest.mark.parametrize(
    "schedule",
    [
        PolynomialDecay(0.07, 3, 107.6, 2.9, steps_per_epoch=1),
        StepDecay(0.3, 0.1, (3, 7)),
        LinearWarmup(lambda step: 0.3, steps=4, start=0.1),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_beside_torch(schedule):
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    scheduler = LambdaLR(optimizer, relative(schedule, to=0.25))
    for step in range(12):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(schedule(step), rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_a_scheduler_resumes(tmp_path):
    def start():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.25)
        rate = LinearWarmup(StepDecay(0.3, 0.1, (3, 7)), steps=2)
        return optimizer, LambdaLR(optimizer, relative(rate, to=0.25))

    rates = {}
    for interrupted in (False, True):
        optimizer, scheduler = start()
        rates[interrupted] = []
        for step in range(10):
            if interrupted and step == 5:
                torch.save([optimizer.state_dict(), scheduler.state_dict()], tmp_path / "state.pt")
                optimizer, scheduler = start()
                states = torch.load(tmp_path / "state.pt", weights_only=True)
                scheduler.load_state_dict(states[1])
                optimizer.load_state_dict(states[0])
            rates[interrupted].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    assert rates[True] == rates[False]


def test_steps_of():
    assert steps_of((1.5, 2), 9.77) == (15, 20)
    assert steps_of([], 10) == ()


def test_errors():
    with pytest.raises(SettingError) as error:
        LinearWarmup(0.1, 5)
    assert str(error.value) == (
        "LinearWarmup.then is 0.1 but must be a function of the step: pass a schedule such as "
        "natgrad.schedules.StepDecay, or lambda step: 0.1."
    )
    with pytest.raises(SettingError, match=r"LinearWarmup.steps is 0 but must be a whole number"):
        LinearWarmup(lambda step: 0.1, 0)
    with pytest.raises(SettingError, match=r"LinearWarmup.start is 1 but must be in \[0, 1\)"):
        LinearWarmup(lambda step: 0.1, 5, start=1)
    with pytest.raises(SettingError) as error:
        relative(0.1, to=0.1)
    assert str(error.value) == (
        "schedule is 0.1 but must be a function of the step: pass one such as "
        "natgrad.schedules.PolynomialDecay."
    )
    with pytest.raises(SettingError) as error:
        relative(lambda step: 0.1, to=0)
    assert str(error.value) == (
        "to is 0 but must be finite and above 0: pass the learning rate of the optimizer."
    )
    with pytest.raises(SettingError, match="schedule is -1 at step 3 but must be finite and at l"):
        relative(lambda step: -1, to=1)(3)
    with pytest.raises(SettingError, match="steps_per_epoch is 0 but must be finite and above 0"):
        steps_of((1,), 0)
    with pytest.raises(SettingError, match="An epoch is -1 but must be finite and at least 0"):
        steps_of((-1,), 10)
