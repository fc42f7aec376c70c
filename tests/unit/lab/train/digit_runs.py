"""A small run on real digits with everything random on, that tests train, interrupt and resume."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

import forked
from natgrad.lab import data
from natgrad.lab.train import Settings
from natgrad.lab.train.logs import read
from natgrad.lab.train.toml import written


def settings(**others) -> Settings:
    values = {
        "network": "convnet",
        "width": 4,
        "mixup": 0.4,
        "erasing": 0.5,
        "batch_size": 64,
        "steps": 8,
        "lr": 0.02,
        "schedule": "constant",
        "update_every": 2,
        "refresh_every": 4,
        "ramp": False,
        "evaluate_every": 100,
        "checkpoint_every": 3,
        "log_every": 1,
    }
    return Settings(**{**values, **others})


def options(settings: Settings, folder: Path) -> list[str]:
    file = folder.with_suffix(".toml")
    file.write_text(written(settings), encoding="utf-8")
    return ["train", "--settings", str(file), "--out", str(folder)]


def forked_command(settings: Settings, folder: Path) -> AbstractContextManager[forked.Process]:
    """`natgrad train` in a process that has imported torch."""
    return forked.started(forked.command, *options(settings, folder))


@contextmanager
def command(settings: Settings, folder: Path, *launcher: str) -> Iterator[subprocess.Popen]:
    """`natgrad train` in a process of its own, which does not live longer than the test."""
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "natgrad", *options(settings, folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # which a launcher passes on
            try:
                process.communicate(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def wait_for(
    process: subprocess.Popen | forked.Process, folder: Path, lines: int, seconds: float
) -> None:
    """Until the log of the process has so many steps."""
    deadline = time.monotonic() + seconds
    while sum(line["kind"] == "train" for line in read(folder)) < lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def checkpoint(folder: Path) -> dict:
    """The last one."""
    last = max((folder / "checkpoints").glob("step-*"))
    return torch.load(last / "state.pt", weights_only=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint(folder)["model"]


def assert_same(one: Path, other: Path) -> None:
    """Bit for bit, and after as many steps."""
    assert checkpoint(one)["step"] == checkpoint(other)["step"]
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_close(one: Path, other: Path, tolerance: float = 1e-10) -> None:
    assert checkpoint(one)["step"] == checkpoint(other)["step"]
    left, right = weights(one), weights(other)
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=tolerance, rtol=tolerance)


@contextmanager
def made_up_digits() -> Iterator[None]:
    """Random images in place of the real ones, which take seconds to import in a new process."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(17, (300, 1, 8, 8), generator=draw).to(torch.uint8)
    labels = torch.randint(10, (300,), generator=draw)
    scale = data.Normalise((0.5,), (0.3,), full=16.0)
    some = data.Images(images, labels, tuple("0123456789"), scale)
    with pytest.MonkeyPatch.context() as patched:
        # This entry alone: what is imported meanwhile cannot be imported again.
        patched.setitem(sys.modules, "torch.utils.tensorboard", None)
        patched.setattr(data, "digits", lambda: data.Split(some, some))
        yield
