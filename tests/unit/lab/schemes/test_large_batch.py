"""The six settings literally, and what their equations give at several steps."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import natgrad
from natgrad.errors import SettingError
from natgrad.lab.schemes import (
    LARGE_BATCH,
    DisplacementMomentum,
    WeightRescaling,
    large_batch,
    large_batch_table,
    normalized_layers,
    soft_cross_entropy,
)

# As printed: BS, α_mixup, γ⁰, γ_target, ρ_BN, t_warmup, p_decay, e_start, e_end, η⁰, m⁰; then
# epochs and iterations, of which those of 8,192 are printed as 5,434.
PRINTED = """
4096   0.4 2.5e-2 2.5e-4 16.0 313 11.0 1   53    8.18e-3 0.997  35 10948
8192   0.4 2.5e-2 2.5e-4 16.0 157 8.0  1   53.5  1.25e-2 0.993  35 5474
16384  0.4 2.5e-2 2.5e-4 32.0 79  8.0  1   53.5  2.5e-2  0.985  35 2737
32768  0.6 2.0e-2 2.0e-4 16.0 59  3.5  1.5 49.5  3.0e-2  0.97   45 1760
65536  0.6 1.5e-2 1.5e-4 16.0 40  2.9  2   64.5  4.0e-2  0.95   60 1173
131072 1.0 1.0e-2 1.0e-4 8.0  30  2.9  3   107.6 7.0e-2  0.93   100 978
"""
ROWS = [[float(cell) for cell in line.split()] for line in PRINTED.strip().splitlines()]
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: str(int(row[0])))


@rows
def test_printed_numbers(row):
    setting = large_batch(int(row[0]))
    assert [*dataclasses.astuple(setting), setting.steps()] == row


@rows
def test_damping(row):
    """Eqs. 13 and 14, step by step."""
    damping = large_batch(int(row[0])).damping_schedule()
    start, target, warm = row[2], row[3], row[5]
    alpha = 2 * math.log10(start / target) / warm
    value = start
    for step in range(1000):
        assert damping(step) == pytest.approx(value, rel=1e-10)
        value = (1 - alpha) * value + alpha * target


def test_damping_by_hand():
    """Batches of 131,072: α = 2 · 2 / 30, so 9.9e-3 above the target fall by 13/15 a step."""
    damping = large_batch(131_072).damping_schedule()
    assert damping(0) == 1e-2
    assert damping(1) == pytest.approx(1e-4 + 9.9e-3 * 13 / 15)
    assert damping(2) == pytest.approx(1e-4 + 9.9e-3 * 169 / 225)
    assert damping(30) == pytest.approx(2.3527e-4, rel=1e-4)


@rows
def test_learning_rate_and_momentum(row):
    """Eqs. 15 and 16 at whole epochs."""
    setting = large_batch(int(row[0]))
    power, begin, end, lr, momentum = row[6:11]
    images = 10 * setting.batch
    rate, coupled = setting.lr_schedule(images), setting.momentum_schedule(images)
    for epoch in range(0, int(row[11]) + 1):
        part = (1 - (max(epoch, begin) - begin) / (end - begin)) ** power
        assert rate(10 * epoch) == pytest.approx(lr * part, rel=1e-12)
        assert coupled(10 * epoch) == pytest.approx(momentum * part, rel=1e-12)
    assert rate(setting.epochs * 10) > 0
    assert rate(math.ceil(end * 10)) == 0


def test_learning_rate_by_hand():
    """Batches of 4,096: half way, in epoch 27, 2^-11 is left."""
    setting = large_batch(4096)
    assert setting.lr_schedule(4096)(27) == pytest.approx(8.18e-3 / 2048)
    assert setting.momentum_schedule(4096)(27) == pytest.approx(0.997 / 2048)
    assert setting.lr_schedule()(312) == 8.18e-3  # an epoch is of 312.8 steps
    assert setting.lr_schedule()(313) < 8.18e-3


def test_interval_by_hand():
    """Eq. 20 after 500 steps, and eq. 21."""
    interval = large_batch(32_768).interval()
    epoch = 1_281_167 / 32_768
    expected = {0: 1, 499: 1, 500: 11, 15: 16, 20: 20, 44: 20}
    for step, value in expected.items():
        assert interval(step if step in (0, 499, 500) else math.ceil(step * epoch)) == value
    phases = natgrad.schedules.TwoPhaseInterval(epoch)
    assert [phases(math.floor(13 * epoch)), phases(math.ceil(13 * epoch))] == [1, 20]


def test_schemes():
    setting = large_batch(65_536)
    mixup, erasing = setting.mixup(), setting.erasing()
    assert (mixup.alpha, mixup.classes) == (0.6, 1000)
    assert (erasing.probability, erasing.area, erasing.aspect) == (0.5, (0.02, 0.25), (0.3, 1.0))
    generator = torch.Generator()
    assert setting.mixup(10, generator).generator is setting.erasing(generator).generator


def test_tables():
    table = large_batch_table()
    assert [column.name for column in table.columns] == [
        "BS", "α_mixup", "γ⁰", "γ_target", "ρ_BN", "t_warmup", "p_decay", "e_start", "e_end", "η⁰",
        "m⁰", "epochs", "steps",
    ]  # fmt: skip
    assert table.rows[5] == (
        "131,072", "1", "0.01", "0.0001", "8", "30", "2.9", "3", "107.6", "0.07", "0.93", "100",
        "978",
    )  # fmt: skip
    for row, setting in zip(table.rows, LARGE_BATCH, strict=True):
        assert setting.describe().column("value") == row
        assert setting.describe().column("symbol") == tuple(c.name for c in table.columns)
    assert large_batch(8192).describe().title == "ResNet-50 on ImageNet, batches of 8,192"


def test_all_of_it_in_one_loop():
    """Eqs. 9 to 18 around a small network, with numbers for batches of 64."""
    setting = dataclasses.replace(
        large_batch(131_072), damping=1.0, target_damping=1e-2, lr=1e-2, end=20
    )
    images = 4 * setting.batch
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 4),
    )
    lr = setting.lr_schedule(images)
    sgd = torch.optim.SGD(model.parameters(), lr=lr.start)
    optimizer = DisplacementMomentum(sgd, setting.momentum_schedule(images))
    scheduler = LambdaLR(optimizer, lr.factor)
    kfac = natgrad.KFAC(model, optimizer, **setting.kfac())
    generator = torch.Generator().manual_seed(0)
    mixup, erasing = setting.mixup(4, generator), setting.erasing(generator)
    y = torch.arange(64) % 4
    x = torch.randn(64, 1, 8, 8) + torch.randn(4, 1, 8, 8)[y]
    rescaling = WeightRescaling(normalized_layers(model, x).values())
    with torch.no_grad():
        first = F.cross_entropy(model(x), y)
    for _ in range(40):
        inputs, targets = mixup(x, y)
        optimizer.zero_grad()
        soft_cross_entropy(model(erasing(inputs)), targets).backward()
        kfac.step()
        optimizer.step()
        rescaling.step()
        scheduler.step()
    assert float(model[0].weight.detach().norm()) == pytest.approx(4.0)
    assert optimizer.param_groups[0]["displacement_momentum"] == pytest.approx(
        setting.momentum_schedule(images)(39)
    )
    with torch.no_grad():
        assert F.cross_entropy(model(x), y) < 0.8 * first


def test_they_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LARGE_BATCH[0].lr = 1.0
    assert {setting: setting.batch for setting in LARGE_BATCH}[large_batch(4096)] == 4096


def test_errors():
    with pytest.raises(SettingError) as error:
        large_batch(1024)
    assert str(error.value) == (
        "batch is 1024 but there are settings for 4096, 8192, 16384, 32768, 65536, 131072 only: "
        "pass one of these, or change one with dataclasses.replace()."
    )
    for field, match in (
        ("batch", "LargeBatch.batch is 0 but must be a whole number of at least 1"),
        ("epochs", "LargeBatch.epochs is 0 but must be a whole number"),
        ("mixup_alpha", "LargeBatch.mixup_alpha is 0 but must be finite and above 0"),
        ("norm_damping", "LargeBatch.norm_damping is 0 but must be"),
        ("damping", "WarmupDamping.start is 0 but must be"),
        ("lr", "PolynomialDecay.start is 0 but must be"),
    ):
        with pytest.raises(SettingError, match=match):
            dataclasses.replace(large_batch(4096), **{field: 0})
    with pytest.raises(SettingError, match=r"CoupledMomentum.start is 1 but must be in \[0, 1\)"):
        dataclasses.replace(large_batch(4096), momentum=1)
