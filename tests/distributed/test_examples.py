"""The examples on several processes run under torchrun, and who does what changes no result."""

import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.distributed


def torchrun(name, ranks, *options):
    """What rank 0 prints, and its last line."""
    pytest.importorskip("sklearn")
    # Standalone: at a port that is free, so that tests may run beside each other.
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / f"{name}.py", *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stdout.splitlines()[-1]


def example(name, options):
    """What this rank prints. Its group is there already."""
    import torch.distributed as dist

    path = EXAMPLES / f"{name}.py"
    there = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with (
        warnings.catch_warnings(),
        patch.dict(os.environ, there),
        patch.object(sys, "argv", [str(path), *options]),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        patch.object(dist, "init_process_group"),
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as printed,  # tables ask for its encoding
        redirect_stdout(printed),
    ):
        warnings.simplefilter("default")  # as under torchrun
        runpy.run_path(str(path), run_name="__main__")
        printed.seek(0)
        return printed.read()


def again(world, name, ranks, *options):
    """As torchrun(), which has started one example, but in processes that have imported torch: for
    them the import takes longer than the training. All examples start and end by `ranks.py`."""
    pytest.importorskip("sklearn")
    printed, *silent = world.run(example, name, [str(option) for option in options], ranks=ranks)
    assert not any(silent)
    return printed, printed.splitlines()[-1]


def accuracy(line, steps):
    found = re.fullmatch(rf"step {steps}: test loss [\d.]+, accuracy ([\d.]+)%", line)
    assert found, line
    return float(found[1])


def sent(printed, purpose):
    """Whether the table of traffic has bytes of that purpose."""
    return re.search(rf"^  {purpose} +[\d.]+ [KM]iB", printed, re.MULTILINE) is not None


@pytest.mark.slow
def test_ddp_and_resuming(world, tmp_path):
    """12 steps and 12 more, with another placement, are 24 steps."""
    printed, straight = torchrun("ddp", 2, "--steps", 24, "--placement", "comm")
    assert accuracy(straight, 24) > 60
    assert "\nPlan CommOpt()\n" in printed
    assert sent(printed, "factors")
    assert not sent(printed, "gradients")

    file = tmp_path / "run.pt"
    first, _ = again(world, "ddp", 2, "--steps", 12, "--placement", "mem", "--checkpoint", file)
    assert sent(first, "gradients")
    second, resumed = again(world, "ddp", 2, "--steps", 24, "--checkpoint", file)
    assert second.startswith("going on at step 12\n")
    assert resumed == straight


@pytest.mark.slow
def test_fsdp(world):
    """Each rank keeps about half of the inverses, and all of them where all ranks do."""
    printed, line = again(world, "fsdp", 2, "--steps", 20)
    assert accuracy(line, 20) > 80
    assert "\nPlan MemOpt()\n" in printed
    table = printed[printed.index("\nMemory\n") :]
    rows = re.findall(r"^ +\d +(.+iB)$", table, re.MULTILINE)
    assert len(rows) == 2
    for row in rows:
        sizes = [float(n) * {"K": 1, "M": 1024}[u] for n, u in re.findall(r"(\S+) (.)iB", row)]
        _, inverses, _, replicated = sizes
        assert 0.4 < inverses / replicated < 0.6
    _, other = again(world, "fsdp", 2, "--steps", 20, "--placement", "comm")
    assert other == line


@pytest.mark.slow
def test_tensor_parallel(world):
    printed, line = again(world, "tensor_parallel", 4, "--steps", 20)
    assert accuracy(line, 20) > 80
    assert "\nPlan Hybrid(1/2)\n" in printed
    _, other = again(world, "tensor_parallel", 4, "--steps", 20, "--placement", "mem")
    assert other == line


@pytest.mark.parametrize(
    ("ranks", "found"), [(None, "was not started by torchrun"), (6, "is one of 6")]
)
def test_another_number_of_processes_is_refused(monkeypatch, ranks, found):
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("ranks", EXAMPLES / "ranks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["examples/tensor_parallel.py"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit) as error:
        module.start(needed=4)
    assert error.value.code == (
        f"tensor_parallel.py needs 4 processes, or a multiple of that, but {found}: run torchrun "
        "--nproc-per-node=4 examples/tensor_parallel.py"
    )
