"""Ranks that die, or are late: nobody waits forever, and a restarted run is the undisturbed one."""

import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from distributed import elastic
from distributed.resuming import Training, run
from distributed.test_parity import assert_same
from distributed.training import EACH, batch, network
from kfac_keywords import grouped
from natgrad.comm import CommunicationError
from training_loops import assert_equal

PATIENCE = 6.0  # seconds that a collective waits
TESTS = Path(__file__).parents[1]
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Impatient:
    """A training in a group that soon gives up waiting."""

    def __init__(self, layout, **settings):
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.model = network("mlp")
        if layout == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model, process_group=group)
        if layout == "fsdp":
            mesh = DeviceMesh.from_group(group, "cpu")
            for child in (*(m for m in self.model if isinstance(m, nn.Linear)), self.model):
                fully_shard(child, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        settings = {"update_every": 1, "refresh_every": 1, "group": group, **settings}
        self.kfac = natgrad.KFAC(self.model, self.optimizer, **grouped(**settings))

    def backward(self, step):
        self.optimizer.zero_grad()
        x, y = batch("mlp", step, EACH * self.ranks)
        mine = slice(self.rank * EACH, (self.rank + 1) * EACH)
        F.cross_entropy(self.model(x[mine]), y[mine]).backward()

    def step(self, step):
        self.backward(step)
        self.kfac.step()
        self.optimizer.step()


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def killed(layout, placement, stage, victim):
    """The type of what ends each rank that is left, and after how many seconds."""
    training = Impatient(layout, placement=placement)
    kfac = training.kfac
    training.step(0)
    if training.rank == victim:
        if stage == "backward":
            middle = [m for m in training.model.modules() if isinstance(m, nn.Tanh)][1]
            middle.register_full_backward_hook(die)
        elif stage == "before the step":
            kfac.step = die
        elif stage == "between steps":
            die()
        else:
            owner, name = {
                "update": (kfac.reducer, "finish"),
                "refresh": (kfac.refreshing, "_decompose"),
                "sharing": (kfac.refreshing, "_share"),
                "apply": (kfac.gradients, "collect"),
                "giving back": (kfac.gradients, "give_back"),
            }[stage]
            setattr(owner, name, die)
    start = time.monotonic()
    try:
        for step in range(1, 4):
            training.step(step)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


INSIDE = ["before the step", "update", "refresh", "sharing", "apply", "giving back"]
OUTSIDE = ["backward", "between steps"]


class TestKilled:
    @pytest.mark.parametrize(
        ("layout", "stage", "victim"),
        # Each rank dies in every stage and in every layout.
        [
            (layout, stage, (turn + index) % 3)
            for turn, layout in enumerate(["plain", "ddp", "fsdp"])
            for index, stage in enumerate([*INSIDE, *OUTSIDE])
        ],
    )
    def test_the_others_end(self, world, layout, stage, victim):
        found = world.run(
            killed, layout, natgrad.MemOpt(), stage, victim, ranks=3, lost=[victim], timeout=60
        )
        for name, text, seconds in (one for rank, one in enumerate(found) if rank != victim):
            assert seconds < PATIENCE + 3
            if stage in INSIDE:
                assert name == "CommunicationError"
            if name == "CommunicationError":
                assert text.endswith("look at what the other ranks say.")
            else:  # DDP or FSDP saw it first, in a collective of its own
                assert name in ("RuntimeError", "DistBackendError")

    @pytest.mark.parametrize("stage", ["update", "apply"])
    @pytest.mark.parametrize("placement", [natgrad.CommOpt(), natgrad.ReduceScatter()], ids=str)
    def test_under_every_placement(self, world, placement, stage):
        """Where nothing is sent in between, at the next step at the latest."""
        found = world.run(killed, "plain", placement, stage, 1, ranks=2, lost=[1], timeout=60)
        name, _, seconds = found[0]
        assert name == "CommunicationError"
        assert seconds < PATIENCE + 3


def skipped(layout):
    """One rank leaves a step out. Every rank says how it ended."""
    training = Impatient(layout, placement=natgrad.MemOpt())
    start = time.monotonic()
    try:
        for step in range(4):
            if training.rank == 1 and step == 2:
                training.backward(step)
                continue
            training.step(step)
        if training.rank == 1:  # the others have one step more to do
            time.sleep(PATIENCE + 1)
    except Exception as error:
        return isinstance(error, CommunicationError), time.monotonic() - start
    return None, time.monotonic() - start


class TestLate:
    @pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
    def test_a_step_left_out_by_one_rank_ends_by_the_timeout(self, world, layout):
        found = world.run(skipped, layout, ranks=2, timeout=60)
        assert all(seconds < 3 * PATIENCE for _, seconds in found)
        assert any(told for told, _ in found)

    @pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
    def test_a_slow_rank_changes_nothing(self, world, layout):
        places = ["forward", "before the step", "refresh"]
        calls = {where: (layout, where, 1) for where in places}
        found = world.each(slow, {"nowhere": (layout, "forward", None), **calls}, ranks=3)
        for where in places:
            for result in found[where]:
                assert_equal(result, found["nowhere"][0], where)


def slow(layout, where, sleeper):
    training = Training.here(run(layout, update_every=1, refresh_every=1))
    kfac = training.kfac
    owner, name = {
        "forward": (training.model, "forward"),
        "before the step": (kfac, "step"),
        "refresh": (kfac.refreshing, "_decompose"),
    }[where]
    original = getattr(owner, name)

    def late(*args, **kwargs):
        time.sleep(0.1)
        return original(*args, **kwargs)

    if training.rank == sleeper:
        setattr(owner, name, late)
    return training.steps(0, 4).weights()


def by_the_command(folder, ranks, *options, restarts=2):
    """The weights of every rank at the end of a run under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    torchrun += [f"--max-restarts={restarts}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {
        **os.environ,
        **ELASTIC,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [*torchrun, elastic.__file__, str(folder), *map(str, options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(file) for file in sorted(folder.glob("weights*"))]


def by_its_agent(folder, ranks, *options, restarts=2):
    """The same by the agent that torchrun starts, in this process, with ranks that are forked: the
    command needs a new Python for itself and for each start of a rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    with patch.dict(os.environ, ELASTIC), signals_given_back(), warnings.catch_warnings():
        warnings.simplefilter("default")  # as under torchrun
        elastic_launch(config, elastic.main)([str(folder), *map(str, options)])
    return [torch.load(file) for file in sorted(folder.glob("weights*"))]


@contextmanager
def signals_given_back():
    """The agent takes them and keeps them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def undisturbed(layout):
    return Training.here(run(layout)).steps(0, 7).weights()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
class TestRestarted:
    @pytest.mark.parametrize(
        ("launched", "layout", "deaths"),
        [
            (by_its_agent, "ddp", [("update", 1, 4), ("save", 0, 5)]),
            (by_the_command, "fsdp", [("apply", 0, 5)]),
        ],
    )
    def test_a_run_ends_with_the_weights_of_an_undisturbed_one(
        self, world, tmp_path, launched, layout, deaths
    ):
        """After each of ``deaths`` all ranks start again, from the last checkpoint."""
        options = [word for death in deaths for word in ("--die", *death)]
        found = launched(tmp_path, 2, "--layout", layout, *options)
        assert len(list(tmp_path.glob("killed*"))) == len(deaths)
        starts = sorted((tmp_path / "log").read_text().split("\n"))[1:]
        from_steps = [0, *[4] * len(deaths)]
        assert starts == [f"rank {r} from step {s}" for r in (0, 1) for s in from_steps]
        for weights, expected in zip(found, world.run(undisturbed, layout, ranks=2), strict=True):
            assert_equal(weights, expected)

    def test_on_fewer_ranks(self, tmp_path):
        """torchrun gives up; another one is started with the ranks that are left."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        with pytest.raises(ChildFailedError):
            by_its_agent(tmp_path, 3, "--die", "update", 2, 4, restarts=0)
        assert len(list(tmp_path.glob("killed*"))) == 1
        found = by_its_agent(tmp_path, 2)
        assert len(found) == 2
        expected = Training(run()).steps(0, 7).weights()
        for weights in found:
            assert_same(weights, expected)
