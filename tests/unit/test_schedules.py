"""Schedules against values by hand and the naive recursion."""

import math
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from natgrad.errors import SettingError
from natgrad.kfac.clocks import Clock
from natgrad.schedules import (
    BatchInterval,
    CoupledMomentum,
    Doubling,
    Drift,
    GrowingInterval,
    LevenbergMarquardt,
    PolynomialDecay,
    StepDecay,
    TwoPhaseInterval,
    WarmupDamping,
)

# Large-batch ResNet-50: batch, γ₀, γ_target, t_warm, p, e_start, e_end, η₀, m₀, and what the
# damping rule leaves of the target at t_warm, 1 + 99 (1 - 4 / t_warm)^t_warm in decimal arithmetic.
ROWS = [
    (4096, 2.5e-2, 2.5e-4, 313, 11, 1, 53, 8.18e-3, 0.997, 2.7671),
    (8192, 2.5e-2, 2.5e-4, 157, 8, 1, 53.5, 1.25e-2, 0.993, 2.7216),
    (16384, 2.5e-2, 2.5e-4, 79, 8, 1, 53.5, 2.5e-2, 0.985, 2.6328),
    (32768, 2.0e-2, 2.0e-4, 59, 3.5, 1.5, 49.5, 3.0e-2, 0.97, 2.5731),
    (65536, 1.5e-2, 1.5e-4, 40, 2.9, 2, 64.5, 4.0e-2, 0.95, 2.4633),
    (131072, 1.0e-2, 1.0e-4, 30, 2.9, 3, 107.6, 7.0e-2, 0.93, 2.3527),
]
IMAGES = 1_281_167
DECAY = PolynomialDecay(start=0.07, begin=3, end=107.6, power=2.9, steps_per_epoch=10)


class TestWarmupDamping:
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
    def test_rows(self, row):
        _, start, target, warm_steps, *_, left = row
        schedule = WarmupDamping(start, target, warm_steps)
        damping, alpha = start, 2 * 2 / warm_steps  # log10(100) = 2
        for step in range(3 * warm_steps):
            assert schedule(step) == pytest.approx(damping, rel=1e-12)
            damping = (1 - alpha) * damping + alpha * target
        assert schedule(warm_steps) / target == pytest.approx(left, abs=5e-5)
        assert schedule(100 * warm_steps) == pytest.approx(target)

    def test_nothing_to_warm_up(self):
        assert WarmupDamping(1e-3, 1e-3, 10)(5) == 1e-3

    def test_shortest_warm_up(self):
        schedule = WarmupDamping(1e-1, 1e-3, 4)
        assert [schedule(step) for step in range(3)] == [1e-1, 1e-3, 1e-3]

    def test_errors(self):
        with pytest.raises(SettingError) as error:
            WarmupDamping(1e-4, 1e-2, 30)
        assert str(error.value) == (
            "WarmupDamping.start is 0.0001 but must be at least the target 0.01: "
            "damping falls during warm-up, so swap the two."
        )
        with pytest.raises(SettingError) as error:
            WarmupDamping(1e-2, 1e-4, 3)
        assert str(error.value) == (
            "WarmupDamping.warm_steps is 3 but must be at least 4 to go from 0.01 to 0.0001 "
            "without overshooting: pass more steps."
        )
        with pytest.raises(SettingError, match=r"WarmupDamping.target is 0 but must be finite and"):
            WarmupDamping(1e-2, 0, 30)
        with pytest.raises(SettingError, match=r"WarmupDamping.warm_steps is 0 but must be"):
            WarmupDamping(1e-2, 1e-4, 0)


class TestPolynomialDecay:
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
    def test_rows(self, row):
        batch, _, _, _, power, begin, end, start, *_ = row
        steps_per_epoch = IMAGES / batch
        schedule = PolynomialDecay(start, begin, end, power, steps_per_epoch)
        assert schedule(0) == schedule(int(begin * steps_per_epoch)) == start
        step = round(30 * steps_per_epoch)
        epoch = step / steps_per_epoch
        expected = start * (1 - (epoch - begin) / (end - begin)) ** power
        assert schedule(step) == pytest.approx(expected, rel=1e-12)
        assert schedule(math.ceil(end * steps_per_epoch)) == 0.0
        assert schedule(10**6) == 0.0

    def test_by_hand(self):
        schedule = PolynomialDecay(start=8.0, begin=1, end=5, power=2, steps_per_epoch=10)
        # Half way, at epoch 3, a quarter is left; a quarter of the way, 9/16.
        assert [schedule(step) for step in (0, 10, 20, 30, 50)] == [8.0, 8.0, 4.5, 2.0, 0.0]
        assert schedule.factor(30) == 0.25

    def test_errors(self):
        with pytest.raises(SettingError) as error:
            PolynomialDecay(0.1, begin=5, end=5, power=2, steps_per_epoch=10)
        assert str(error.value) == (
            "PolynomialDecay.end is 5 but must be above begin, 5: "
            "pass the epoch at which the rate reaches 0."
        )
        with pytest.raises(SettingError, match=r"PolynomialDecay.steps_per_epoch is 0 but must be"):
            PolynomialDecay(0.1, 1, 5, 2, steps_per_epoch=0)
        with pytest.raises(SettingError, match=r"PolynomialDecay.begin is -1 but must be finite"):
            PolynomialDecay(0.1, -1, 5, 2, 10)


class TestCoupledMomentum:
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
    def test_rows(self, row):
        batch, _, _, _, power, begin, end, rate, start, _ = row
        lr = PolynomialDecay(rate, begin, end, power, IMAGES / batch)
        momentum = CoupledMomentum(start, lr)
        assert momentum(0) == pytest.approx(start)
        for step in (100, 500, 900):
            assert momentum(step) == pytest.approx(start / rate * lr(step), rel=1e-12)

    def test_beside_a_scheduler(self):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=DECAY.start, momentum=0.93)
        scheduler = LambdaLR(optimizer, DECAY.factor)
        momentum = CoupledMomentum(0.93, DECAY)
        (group,) = optimizer.param_groups
        for step in range(200):
            assert group["lr"] == pytest.approx(DECAY(step))
            assert group["momentum"] == pytest.approx(momentum(step))
            weight.grad = torch.ones(2)
            optimizer.step()
            scheduler.step()
            momentum.couple(optimizer)
        assert group["momentum"] < 0.6

    def test_errors(self):
        with pytest.raises(SettingError) as error:
            CoupledMomentum(0.9, 0.1)
        assert str(error.value) == (
            "CoupledMomentum.lr is 0.1 but must be a function of the step: "
            "pass the schedule of the learning rate, such as PolynomialDecay."
        )
        with pytest.raises(SettingError, match=r"CoupledMomentum.lr is 0.0 at step 0 but must be"):
            CoupledMomentum(0.9, lambda step: step / 10)
        with pytest.raises(SettingError, match=r"CoupledMomentum.start is 1 but must be in \[0, 1"):
            CoupledMomentum(1, DECAY)

    def test_optimizer_without_momentum(self):
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
        with pytest.raises(SettingError) as error:
            CoupledMomentum(0.93, DECAY).couple(optimizer)
        assert str(error.value) == (
            "CoupledMomentum needs parameter groups with a 'momentum', which group 0 of Adam does "
            "not have: use torch.optim.SGD."
        )

    def test_group_whose_momentum_would_diverge(self):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.7)
        with pytest.raises(SettingError) as error:
            CoupledMomentum(0.93, DECAY).couple(optimizer)
        assert str(error.value) == (
            "The momentum of parameter group 0 is 9.3 for its lr 0.7 but must be in [0, 1): give "
            "the group a learning rate in step with CoupledMomentum.lr, which starts at 0.07."
        )


class TestIntervals:
    def test_growing(self):
        schedule = GrowingInterval(steps_per_epoch=100)
        epochs = [0, 4, 5, 9, 10, 15, 19, 20, 45]
        assert [schedule(100 * e) for e in epochs] == [1, 1, 6, 6, 11, 16, 16, 20, 20]
        assert schedule(499) == 1

    def test_growing_waits_for_the_first_steps(self):
        # Batch 131,072: 500 steps are 51 epochs, so the interval jumps from 1 to its longest.
        schedule = GrowingInterval(steps_per_epoch=IMAGES / 131072)
        assert [schedule(step) for step in (0, 300, 499, 500)] == [1, 1, 1, 20]

    def test_two_phases(self):
        schedule = TwoPhaseInterval(steps_per_epoch=39)
        assert [schedule(step) for step in (0, 13 * 39 - 1, 13 * 39)] == [1, 1, 20]

    @pytest.mark.parametrize(
        ("processes", "interval"), [(16, 2000), (32, 1000), (64, 500), (128, 250), (256, 125)]
    )
    def test_batch(self, processes, interval):
        assert BatchInterval(batch=32 * processes)(0) == interval

    def test_doubling_covers_the_start_and_ends_at_its_limit(self):
        clock, due = Clock(Doubling(10)), []
        for step in range(60):
            if clock.due(step):
                clock.mark(step)
                due.append(step)
        assert due == [0, 1, 2, 4, 8, 16, 26, 36, 46, 56]
        with pytest.raises(SettingError, match=r"Doubling.at_most is 0 but must be a whole number"):
            Doubling(0)

    def test_batch_is_rounded_and_at_least_one(self):
        assert BatchInterval(batch=3, interval=10, reference=2)(0) == 7
        assert BatchInterval(batch=10**9)(0) == 1

    def test_errors(self):
        with pytest.raises(SettingError, match=r"GrowingInterval.steps_per_epoch is -1 but must"):
            GrowingInterval(-1)
        with pytest.raises(SettingError, match=r"GrowingInterval.every is 0 but must be a whole"):
            GrowingInterval(10, every=0)
        with pytest.raises(SettingError, match=r"GrowingInterval.after is -1 but must be a whole"):
            GrowingInterval(10, after=-1)
        with pytest.raises(SettingError, match=r"TwoPhaseInterval.then is 2.5 but must be a whole"):
            TwoPhaseInterval(10, then=2.5)
        with pytest.raises(SettingError, match=r"TwoPhaseInterval.epoch is nan but must be finite"):
            TwoPhaseInterval(10, epoch=math.nan)
        with pytest.raises(SettingError, match=r"BatchInterval.batch is 0 but must be a whole"):
            BatchInterval(0)


class TestStepDecay:
    def test_damping(self):
        schedule = StepDecay(1e-2, factor=0.5, at=[10, 20])
        assert [schedule(step) for step in (0, 9, 10, 19, 20)] == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3]

    def test_interval(self):
        schedule = StepDecay(2, factor=2, at=(4, 12))
        assert [schedule(step) for step in (0, 4, 12)] == [2, 4, 8]

    def test_never(self):
        assert StepDecay(1e-2, 0.5, at=())(10**6) == 1e-2

    def test_errors(self):
        with pytest.raises(SettingError) as error:
            StepDecay(1e-2, 0.5, at=(20, 10))
        assert str(error.value) == (
            "StepDecay.at is (20, 10) but must be increasing: sort the steps, each once."
        )
        with pytest.raises(SettingError) as error:
            StepDecay(1e-2, 0.5, at=10)
        assert str(error.value) == (
            "StepDecay.at is 10 but must be a sequence of steps: pass a tuple."
        )
        with pytest.raises(SettingError, match=r"A step of StepDecay.at is 1.5 but must be"):
            StepDecay(1e-2, 0.5, at=(1.5,))
        with pytest.raises(SettingError, match=r"StepDecay.factor is 0 but must be finite"):
            StepDecay(1e-2, 0, at=(10,))


@pytest.mark.parametrize(
    "schedule",
    [
        WarmupDamping(1e-2, 1e-4, 30),
        DECAY,
        CoupledMomentum(0.93, DECAY),
        GrowingInterval(10),
        TwoPhaseInterval(10),
        StepDecay(1e-2, 0.5, [10]),
        BatchInterval(512),
        Drift(0.1),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_schedules_are_values(schedule):
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(pickle.loads(pickle.dumps(schedule)))


@pytest.mark.parametrize(
    ("ratio", "moves"),
    [
        (0.76, "down"),
        (0.75, "stays"),
        (0.5, "stays"),
        (0.25, "stays"),
        (0.24, "up"),
        (0.21, "up"),
        (-1.0, "up"),
        (float("nan"), "up"),
        (float("inf"), "down"),
    ],
)
def test_levenberg_marquardt_moves_beyond_a_quarter_and_three_quarters(ratio, moves):
    rule = LevenbergMarquardt(decay=0.5, every=2)
    expected = {"down": 0.25, "stays": 1.0, "up": 4.0}[moves]
    assert rule.next(1.0, ratio) == expected
