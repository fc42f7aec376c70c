"""Training on several processes is that of one, and goes on with another number of them."""

import os
import signal
from unittest.mock import patch

import pytest
import torch

from natgrad.comm import Alone
from natgrad.errors import CheckpointError, DataError, SettingError
from natgrad.lab import data
from natgrad.lab.train import loop, train
from natgrad.lab.train.logs import read
from natgrad.lab.train.state import Checkpoints
from natgrad.lab.train.training import Training
from unit.lab.train import digit_runs as runs

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


def two_folders(folder):
    """Each rank has its own, and they differ."""
    import torch.distributed as dist

    with pytest.raises(CheckpointError) as error:
        on_ranks(runs.settings(), folder / str(dist.get_rank()), True)
    return str(error.value)


def test_ranks_go_on_from_one_step(world, tmp_path):
    for rank, steps in ((0, 2), (1, 3)):
        on_ranks(runs.settings(steps=steps), tmp_path / str(rank))
    for rank, said in enumerate(world.run(two_folders, tmp_path, ranks=2)):
        assert said == (
            f"The ranks find checkpoints of different steps in {tmp_path / str(rank)} (2, 3): name "
            "a folder that all of them reach."
        )


def without_data(folder, missing):
    """On some of the ranks."""
    import torch.distributed as dist

    def digits():
        raise DataError("There are no digits here: bring some.")

    with runs.made_up_digits():
        if dist.get_rank() in missing:
            data.digits = digits
        with pytest.raises(DataError) as error:
            train(runs.settings(), folder)
    return str(error.value), error.value.everywhere


@pytest.mark.parametrize(("missing", "who"), [((0, 1), ""), ((1,), "rank 1: ")])
def test_data_that_are_missing_are_missed_by_all(world, tmp_path, missing, who):
    for said in world.run(without_data, tmp_path, missing, ranks=2):
        assert said == (f"{who}There are no digits here: bring some.", True)


def normed(folder=None):
    """A network with batch norm; on ranks, or in this process with what they have saved."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 3, 8, 8), generator=draw).to(torch.uint8)
    images[1::2] //= 4  # so that averages differ
    scale = data.Normalise((0.5,) * 3, (0.25,) * 3)
    some = data.Images(images, torch.arange(64) % 10, tuple("0123456789"), scale)
    others = {"data": "cifar10", "network": "resnet8", "steps": 2, "batch_size": 8, "kfac": False}
    settings = runs.settings(**EXACT, **others)
    with (
        runs.made_up_digits(),
        patch.object(data, "cifar10", lambda folder: data.Split(some, some)),
    ):
        if folder is not None:
            return train(settings, folder).metrics
        return Training(settings, Alone(), torch.device("cpu"))


def test_the_model_that_is_saved_is_tested(world, tmp_path):
    """Batch norm's averages are those of the first rank."""
    told = world.run(normed, tmp_path, ranks=2)
    alone = normed()
    alone.network.load_state_dict(runs.weights(tmp_path))
    assert told[0] == told[1] == pytest.approx(alone.evaluate(alone.task.test), rel=1e-9)


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
@pytest.mark.timeout(600)
def test_torchrun_is_interrupted_and_one_process_goes_on(tmp_path):
    """The command itself, from start to end."""
    pytest.importorskip("sklearn")
    folder = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    # Workers get the signal, too.
    with runs.command(runs.settings(**EXACT, steps=5000, workers=1), folder, *launcher) as process:
        runs.wait_for(process, folder, 4, 240)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=200)
    stopped = runs.checkpoint(folder)["step"]
    assert 4 <= stopped < 5000, err
    assert f"Stopped by SIGTERM after step {stopped} of 5000" in out, err
    settings = runs.settings(**EXACT, steps=stopped + 5)
    train(settings, folder, resume=True)
    train(settings, tmp_path / "whole")
    runs.assert_close(tmp_path / "whole", folder, 1e-8)  # rounding grows with the steps
    assert torch.isfinite(
        torch.tensor([line["loss"] for line in read(folder) if "loss" in line])
    ).all()
