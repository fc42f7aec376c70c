"""K-FAC under DeepSpeed gives the weights that it gives under DDP, or says why it cannot."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from natgrad.comm.layouts import gradients_are_local
from natgrad.integrations.deepspeed import KFAC

HERE = Path(__file__).parent


class Engine(nn.Module):
    """What K-FAC uses of a DeepSpeedEngine, on one process. Like ZeRO, it takes gradients off the
    parameters: at the last micro-batch of a step or, from stage 2 on, at every one."""

    def __init__(self, module, optimizer, micro=1, **config):
        super().__init__()
        self.module, self.optimizer = module, optimizer
        self.data_parallel_group = None
        self.micro, self.passes, self.taken = micro, 0, {}
        self.config = {"stage": 1, "offload": None, "fp16": False, "managed": True, "clip": 0.0}
        self.config |= config

    def zero_optimization_stage(self):
        return self.config["stage"]

    def zero_offload_optimizer(self):
        return self.config["offload"]

    def fp16_enabled(self):
        return self.config["fp16"]

    def managed_gradient_accumulation(self):
        return self.config["managed"]

    def gradient_clipping(self):
        return self.config["clip"]

    def is_gradient_accumulation_boundary(self):
        return self.passes % self.micro == 0

    def forward(self, x):
        return self.module(x)

    def backward(self, loss):
        (loss / self.micro).backward()
        first = self.is_gradient_accumulation_boundary()
        self.passes += 1
        if self.is_gradient_accumulation_boundary() or self.config["stage"] > 1:
            before = {} if first or self.config["stage"] < 2 else self.taken
            self.taken = {p: p.grad + before.get(p, 0) for p in self.module.parameters()}
            self.module.zero_grad()


class Pipeline(Engine):
    def train_batch(self):
        raise NotImplementedError


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator)
    return x, torch.randint(3, (8,), generator=generator)


@pytest.fixture
def taken(monkeypatch):
    """The two functions of DeepSpeed that reach a gradient which is not in ``.grad``."""
    engines = []
    utils = types.ModuleType("deepspeed.utils")

    def get(p):
        return engines[-1].taken[p].clone()

    def put(p, value):
        assert p.grad is None, "DeepSpeed would write to .grad, and not to its own copy"
        engines[-1].taken[p] = value

    utils.safe_get_full_grad, utils.safe_set_full_grad = get, put
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    return engines


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_fetched_and_brought_back(taken, stage):
    model, optimizer = network()
    kfac = natgrad.KFAC(model, optimizer)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    kfac.step()
    expected = [p.grad for p in model.parameters()]

    model, optimizer = network()
    engine = Engine(model, optimizer, micro=2, stage=stage)
    taken.append(engine)
    kfac = KFAC(engine)
    assert not gradients_are_local(engine)
    assert [block.name for block in kfac.blocks] == ["0", "2"]
    for half in (slice(4), slice(4, 8)):
        x, y = batch(0)
        engine.backward(F.cross_entropy(engine(x[half]), y[half]))
        kfac.step()
    assert kfac.steps == 1
    assert all(p.grad is None for p in model.parameters())
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(engine.taken[p], gradient)


def test_a_step_that_fails_leaves_no_gradients_behind(taken, monkeypatch):
    model, optimizer = network()
    engine = Engine(model, optimizer)
    taken.append(engine)
    kfac = KFAC(engine)
    x, y = batch(0)
    engine.backward(F.cross_entropy(engine(x), y))
    before = {p: gradient.clone() for p, gradient in engine.taken.items()}

    def fails(_, samples=None):
        assert all(p.grad is not None for p in model.parameters())
        raise natgrad.errors.CaptureError("no statistics")

    monkeypatch.setattr(natgrad.KFAC, "step", fails)
    with pytest.raises(natgrad.errors.CaptureError, match="no statistics"):
        kfac.step()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(engine.taken[p], gradient) for p, gradient in before.items())


def test_learning_rates_are_those_of_the_copies(taken):
    """ZeRO's optimizer has flat copies of the parameters; the KL clip asks for the originals."""
    clipped = []
    for flat in (False, True):
        model, optimizer = network()
        if flat:
            optimizer = types.SimpleNamespace(
                bit16_groups=[list(model.parameters())],
                param_groups=[{"params": [torch.zeros(51)], "lr": 0.1}],
            )
        engine = Engine(model, optimizer)
        taken.append(engine)
        kfac = KFAC(engine, kl_clip=1e-6)
        x, y = batch(0)
        engine.backward(F.cross_entropy(engine(x), y))
        kfac.step()
        clipped.append([engine.taken[p] for p in model.parameters()])
    torch.testing.assert_close(clipped[1], clipped[0])
    assert sum(g.norm() ** 2 for g in clipped[0]).sqrt() < 1  # 20 without the clip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"stage": 3},
            "ZeRO has stage 3, which takes parameters off the model between its calls, but K-FAC "
            "needs them there: use stage 2 or lower, or fully_shard() of PyTorch.",
        ),
        (
            {"offload": "cpu"},
            "ZeRO has offload_optimizer, which moves gradients away before K-FAC can see them: "
            "leave it out, or use fully_shard() of PyTorch.",
        ),
        (
            {"fp16": True},
            "DeepSpeed has fp16 on, whose loss scale K-FAC would take for curvature: use bf16.",
        ),
        (
            {"managed": False},
            "DeepSpeed has managed_gradient_accumulation=False, which adds up gradients only in "
            "engine.step(), after K-FAC: leave it out and set gradient_accumulation_steps.",
        ),
    ],
)
def test_what_cannot_be_done_is_said(config, message):
    with pytest.raises(natgrad.errors.SettingError) as error:
        KFAC(Engine(*network(), **config))
    assert str(error.value) == message


def test_other_engines_are_refused():
    model, optimizer = network()
    for engine, message in (
        (
            model,
            "engine is a Sequential but must be a DeepSpeedEngine: pass the first of what "
            "deepspeed.initialize() returned.",
        ),
        (
            Engine(model, None),
            "The DeepSpeed engine has no optimizer, but K-FAC prepares gradients for one: name one "
            "in the configuration, or pass it to deepspeed.initialize().",
        ),
        (
            Pipeline(model, optimizer),
            "The DeepSpeed engine is a pipeline, whose train_batch() leaves no room for K-FAC "
            "before the optimizer's step: use a model without PipelineModule, or PyTorch's "
            "pipelining with KFAC(stage, distributed=Distributed(group=...)).",
        ),
    ):
        with pytest.raises(natgrad.errors.SettingError) as error:
            KFAC(engine)
        assert str(error.value) == message


def test_clipping_is_warned_of():
    message = (
        r"^DeepSpeed has gradient_clipping=1\.0 \(its default is 1\.0\), which will cut the norm "
        r"of preconditioned gradients, and that norm means nothing: set it to 0\.0, as kl_clip "
        r"bounds the step\.$"
    )
    with pytest.warns(UserWarning, match=message):
        KFAC(Engine(*network(), clip=1.0))


@pytest.mark.peers
@pytest.mark.distributed
@pytest.mark.slow
def test_weights_are_those_of_ddp():
    """ZeRO stages 0, 1 and 2 of the real engine on two ranks, with accumulation and two learning
    rates; in bfloat16 as near as its eight bits allow. Its first call compiles for minutes."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (pip install deepspeed)")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    paths = [str(Path(natgrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [*command, str(HERE / "deepspeed_ranks.py"), "0", "1", "2", "1-bf16", "2-bf16"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = next(line for line in run.stdout.splitlines() if line.startswith("distances "))
    distances = json.loads(found.removeprefix("distances "))
    assert distances.pop("plain") > 0.1
    assert distances.keys() == {"0", "1", "2", "1-bf16", "2-bf16"}
    for name, distance in distances.items():
        assert distance < (0.03 if name.endswith("bf16") else 1e-5), name
    said = next(line for line in run.stdout.splitlines() if line.startswith("refused "))
    assert json.loads(said.removeprefix("refused "))["stage 3"].startswith("ZeRO has stage 3, ")
