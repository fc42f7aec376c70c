"""Training on several processes is that of one, and goes on with another number of them."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from natgrad.errors import CheckpointError, SettingError
from natgrad.train import loop, train
from natgrad.train.logs import read
from natgrad.train.state import Checkpoints
from natgrad.train.toml import written
from unit.train import runs

pytestmark = pytest.mark.distributed

EXACT = {"precision": "float64", "mixup": 0.4, "erasing": 0.5}


def on_ranks(settings, folder, resume=False):
    """On each of the ranks, whose processes are new, or in this one."""
    with runs.made_up_digits():
        return train(settings, folder, resume=resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Eight steps in one process."""
    folder = tmp_path_factory.mktemp("whole")
    on_ranks(runs.settings(**EXACT), folder)
    return folder


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (2, 1), (2, 4)], ids=["1 to 2", "2 to 1", "2 to 4"]
)
def test_going_on_with_another_number_of_processes(world, whole, tmp_path, before, after):
    for ranks, steps, resume in ((before, 5, False), (after, 8, True)):
        settings = runs.settings(**EXACT, steps=steps, micro_batch=20 if ranks == 2 else 0)
        if ranks == 1:
            on_ranks(settings, tmp_path, resume)
        else:
            outcomes = world.run(on_ranks, settings, tmp_path, resume, ranks=ranks)
            assert {outcome.step for outcome in outcomes} == {steps}
            assert all(outcome.metrics == outcomes[0].metrics for outcome in outcomes)
    runs.assert_close(whole, tmp_path)
    one, other = (
        [line["loss"] for line in read(folder) if line["kind"] == "train"]
        for folder in (whole, tmp_path)
    )
    assert one == pytest.approx(other, rel=1e-9)


def test_two_processes_go_on_bit_for_bit(world, tmp_path):
    world.run(on_ranks, runs.settings(), tmp_path / "whole", ranks=2)
    world.run(on_ranks, runs.settings(steps=5), tmp_path / "parts", ranks=2)
    world.run(on_ranks, runs.settings(), tmp_path / "parts", True, ranks=2)
    runs.assert_same(tmp_path / "whole", tmp_path / "parts")


def uneven(folder):
    with pytest.raises(SettingError) as error:
        train(runs.settings(), folder)
    return str(error.value)


def test_processes_must_divide_the_batch(world, tmp_path):
    for said in world.run(uneven, tmp_path, ranks=3):
        assert said == (
            "batch_size is 64 but 3 processes must divide it: pass another number of samples, or "
            "of processes."
        )


def full(folder):
    """The disk of one rank, which is not the first, is full from step 6 on."""
    import torch.distributed as dist

    saved = Checkpoints.save

    def fails(self, step, state, share):
        if step == 6 and dist.get_rank() == 1:
            os.fsync = no_space
        saved(self, step, state, share)

    def no_space(*args):
        raise OSError(28, "No space left on device")

    Checkpoints.save = fails
    with pytest.raises(CheckpointError) as error:
        on_ranks(runs.settings(), folder)
    return str(error.value)


def test_a_full_disk_of_one_rank_is_told_by_all(world, tmp_path):
    for said in world.run(full, tmp_path, ranks=2):
        assert said == (
            f"The checkpoint of step 6 could not be written to {tmp_path / 'checkpoints'} (No "
            "space left on device), and that of step 3 is intact: make room, or name another "
            "folder with --out."
        )
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000003"]


def taken(folder):
    with pytest.raises(SettingError) as error:
        train(runs.settings(), folder)
    return str(error.value)


def test_all_ranks_hear_of_a_folder_that_is_taken(world, tmp_path):
    on_ranks(runs.settings(steps=1), tmp_path)
    for said in world.run(taken, tmp_path, ranks=2):
        assert said.startswith(f"The folder {tmp_path} has a run of 1 steps already")


def interrupted(folder):
    """Only one of the ranks gets the signal."""
    import torch.distributed as dist

    step = loop.Training.step

    def signalled(self, number, batches):
        if number == 4 and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        return step(self, number, batches)

    loop.Training.step = signalled
    return on_ranks(runs.settings(**EXACT), folder)


def test_a_signal_to_one_rank_stops_all(world, whole, tmp_path):
    for outcome in world.run(interrupted, tmp_path, ranks=2):
        assert (outcome.step, outcome.signal) == (5, signal.SIGTERM)
    world.run(on_ranks, runs.settings(**EXACT), tmp_path, True, ranks=2)
    runs.assert_close(whole, tmp_path)


@pytest.mark.slow
def test_torchrun_is_interrupted_and_one_process_goes_on(tmp_path):
    """The command itself, from start to end."""
    pytest.importorskip("sklearn")
    settings = runs.settings(**EXACT, steps=60)
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(written(settings), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["-m", "natgrad", "train", "--settings", str(file), "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, *launcher, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline and len(read(folder)) < 4:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    stopped = runs.checkpoint(folder)["step"]
    assert 4 <= stopped < 60, err
    assert f"Stopped by SIGTERM after step {stopped} of 60" in out
    train(settings, folder, resume=True)
    train(settings, tmp_path / "whole")
    runs.assert_close(tmp_path / "whole", folder, 1e-8)  # rounding grows with the steps
    assert torch.isfinite(torch.tensor([line["loss"] for line in read(folder)])).all()
