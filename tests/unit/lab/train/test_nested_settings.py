"""Settings that nest reach KFAC, the file that is written, and the steps that are taken."""

import itertools
import tomllib

import pytest
import torch
from torch import nn

from natgrad import EKFAC, Diagonal, Full, Kronecker, Spectral, UnitWise
from natgrad.comm import Alone
from natgrad.curvature.subsample import Subsample
from natgrad.errors import SettingError
from natgrad.lab.train import Settings, optimizers, toml, train
from natgrad.lab.train.task_losses import Classes
from natgrad.lab.train.training import Training
from natgrad.lengths import Dogleg, Rms
from natgrad.schedules import Drift, GrowingInterval, LevenbergMarquardt
from unit.lab.train import digit_runs as runs

NESTED = {
    "update_every": {"each": {"A": 4, "G": {"two-phase": {"first": 1, "then": 2}}}},
    "refresh_every": "drift(tolerance=0.2, at_most=50)",
    "damping": {"levenberg-marquardt": {"start": 0.3}},
    "structure": "ekfac",
    "norm_structure": "diagonal",
    "inverse": {"eigen": {}},
    "statistics": {"subsample": {"amount": 0.5, "seed": 7}},
    "geometry": "euclidean(power=0.5)",
    "second_pass": {"sam": {"rho": 0.1}},
}


def kfac_of(settings, model=None):
    model = model or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    inner = optimizers.optimizer(settings, model, lambda step: 0.1)
    return optimizers.preconditioner(settings, model, inner, Classes(2), 20.0)


def structures(kfac):
    return [type(block.structure) for block in kfac.blocks]


def test_a_written_file_nests_and_reads_back(tmp_path):
    settings = runs.settings(**NESTED)
    written = toml.written(settings)
    tables = tomllib.loads(written)
    assert tables["kfac"]["update_every"] == NESTED["update_every"]
    assert tables["kfac"]["refresh_every"] == {"drift": {"tolerance": 0.2, "at_most": 50}}
    assert tables["optimizer"]["second_pass"] == NESTED["second_pass"]
    file = tmp_path / "settings.toml"
    file.write_text(written, encoding="utf-8")
    assert Settings(**toml.read(file)) == settings
    assert settings.statistics == "subsample(amount=0.5, seed=7)"


def test_they_reach_kfac():
    kfac = kfac_of(runs.settings(**NESTED))
    assert kfac.refresh_clocks.clocks["A"].interval == Drift(0.2, 50)
    assert kfac.update_clocks.clocks["A"].interval == 4
    assert kfac.update_clocks.clocks["G"].interval.steps_per_epoch == 20.0
    assert kfac.settings.damping == LevenbergMarquardt(0.3)
    assert structures(kfac) == [EKFAC, Diagonal, EKFAC]
    assert kfac.capture.chooser.subsample == Subsample(0.5, 7)
    assert kfac.team.motion.geometry.power == 0.5


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, [Kronecker, UnitWise, Kronecker]),
        ({"norm_structure": "block"}, [Kronecker, Full, Kronecker]),
        ({"norm_structure": "diagonal"}, [Kronecker, Diagonal, Kronecker]),
        ({"structure": "diagonal"}, [Diagonal, UnitWise, Diagonal]),
    ],
)
def test_structures_of_norm_layers_and_of_others(others, expected):
    assert structures(kfac_of(runs.settings(**others))) == expected


def test_precisions_widths_and_lengths():
    settings = runs.settings(
        factor_dtype="bfloat16",
        wire_dtype="float21",
        max_dim=3,
        geometry="spectral(power=0.25)",
        length="rms",
    )
    kfac = kfac_of(settings, nn.Sequential(nn.Linear(40, 3), nn.Linear(3, 2)))
    assert {block.dtype for block in kfac.blocks} == {torch.bfloat16}
    assert kfac.team.factor_wire.per_word == 3
    assert kfac.blocks[0].structure.input_block == 3
    assert kfac.team.motion.geometry == Spectral(0.25)
    assert kfac.team.motion.length == Rms()
    whole = kfac_of(runs.settings(max_dim=0), nn.Sequential(nn.Linear(40, 3)))
    assert whole.blocks[0].structure.input_block is None


def test_a_dogleg_hangs_on_the_optimizer():
    kfac = kfac_of(runs.settings(optimizer="adamw", length="dogleg(most=1.5)"))
    assert kfac.team.motion.length == Dogleg(1.5)
    assert kfac.attachment is not None
    assert kfac_of(runs.settings(length="graft")).attachment is None


def test_numbers_are_as_before():
    kfac = kfac_of(runs.settings(refresh_every="30", statistics=0.5, ramp=True))
    assert kfac.refresh_clocks.clocks["G"].interval.at_most == 30
    kfac = kfac_of(runs.settings(refresh_every="growing", damping="relative"))
    assert kfac.refresh_clocks.clocks["G"].interval == GrowingInterval(20.0)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"refresh_every": 0}, "refresh_every is 0 but must be a whole number of at least 1: "),
        ({"refresh_every": 2.5}, "refresh_every is 2.5 but must be a whole number of at least 1"),
        ({"damping": -1}, "damping is -1 but must be finite and above 0: pass such a number."),
        ({"inverse": 3}, "inverse is 3 but must be text: name one of eigen, cholesky, low-rank, "),
        ({"inverse": ""}, "There is no inverse '': name one of eigen, cholesky, low-rank, or "),
        ({"length": "longest"}, "There is no length 'longest': name one of rms, output-change, "),
        ({"second_pass": "sam(rho=0)"}, "SAM.rho is 0 but must be finite and above 0"),
        ({"factor_dtype": "int8"}, "factor_dtype is 'int8' but must be one of "),
        (
            {"damping": "relative", "damping_target": 1e-4, "damping_steps": 10},
            "damping is relative but damping_target makes it fall as well: leave one of the two ",
        ),
    ],
)
def test_one_sentence_for_what_is_wrong(others, message):
    with pytest.raises(SettingError) as error:
        runs.settings(**others)
    assert str(error.value).startswith(message)


def weights(training):
    return torch.cat([p.detach().flatten() for p in training.network.parameters()])


def stepped(steps=2, **others):
    """Weights before each of some steps and after them, and the samples that they saw."""
    settings = runs.settings(precision="float64", erasing=0.0, kfac=False, **others)
    training = Training(settings, Alone(), torch.device("cpu"))
    seen, mix = [], training._mixed
    training._mixed = lambda *one: seen.append(mix(*one)) or seen[-1]
    before = [weights(training)]
    for step, batches in training.batches(0):
        training.step(step, batches)
        before.append(weights(training))
        if step + 1 == steps:
            return training, before, seen


def gradient(training, at, samples):
    """∇L at any weights, of samples as they were mixed, by one graph for all of them."""
    torch.nn.utils.vector_to_parameters(at, training.network.parameters())
    total = sum(len(micro) for micro, *_ in samples)
    loss = sum(training._loss(x, y) * (len(micro) / total) for micro, x, y in samples)
    found = torch.autograd.grad(loss, list(training.network.parameters()))
    return torch.cat([one.flatten() for one in found])


def test_sharpness_aware_steps():
    """With mixup, which must mix a batch once, and micro-batches, whose gradients come first."""
    rho, lr = 0.3, 0.05
    training, points, seen = stepped(
        second_pass=f"sam(rho={rho})", micro_batch=32, lr=lr, momentum=0.0
    )
    assert len(seen) == 4
    for step, (before, after) in enumerate(itertools.pairwise(points)):
        samples = seen[2 * step : 2 * step + 2]
        first = gradient(training, before, samples)
        uphill = gradient(training, before + rho * first / first.norm(), samples)
        torch.testing.assert_close(after, before - lr * uphill, rtol=1e-9, atol=1e-12)


def test_steps_with_a_penalty_on_the_gradient():
    lr, tau, h = 0.05, 0.4, 1e-4
    training, (before, after), seen = stepped(
        1, second_pass=f"gradient-norm(tau={tau}, h={h})", lr=lr, momentum=0.0, mixup=0.0
    )
    first = gradient(training, before, seen)
    there = gradient(training, before + h * first / first.norm(), seen)
    expected = first + tau / 2 * first.norm() * (there - first) / h
    torch.testing.assert_close(after, before - lr * expected, rtol=1e-6, atol=1e-9)


def test_damping_follows_the_loss():
    """Each step is compared with what the quadratic model has said, on the batch of the step."""
    settings = runs.settings(
        damping="levenberg-marquardt(start=10.0, every=2, decay=0.9)", kl_clip=0.0, steps=9, lr=1.0
    )
    training = Training(settings, Alone(), torch.device("cpu"))
    found = [training.kfac.settings.at(0).damping]
    for step, batches in training.batches(0):
        training.step(step, batches)
        found.append(training.kfac.settings.at(step).damping)
    assert found[0] == 10.0
    ratios = [round(after / before, 6) for before, after in itertools.pairwise(found)]
    assert set(ratios) <= {1.0, round(0.9**2, 6), round(0.9**-2, 6)}
    assert {step for step, ratio in enumerate(ratios) if ratio != 1} <= set(range(0, 9, 2))
    assert len(set(found)) > 2


def test_a_nested_run_goes_on_bit_for_bit(tmp_path):
    nested = {
        "refresh_every": "drift(tolerance=0.05)",
        "damping": "levenberg-marquardt(start=1.0, every=2)",
        "second_pass": "sam",
        "norm_structure": "diagonal",
        "checkpoint_every": 100,
    }
    train(runs.settings(**nested, steps=8), tmp_path / "whole")
    train(runs.settings(**nested, steps=5), tmp_path / "parts")
    train(runs.settings(**nested, steps=8), tmp_path / "parts", resume=True)
    runs.assert_same(tmp_path / "whole", tmp_path / "parts")
