"""K-FAC over MPI alone gives the weights of one process."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"

pytestmark = pytest.mark.distributed


def mpirun(script, *options):
    """What rank 0 of 2 prints, or a skip that says what is missing."""
    command = shutil.which("mpirun")
    if command is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (pip install 'natgrad[mpi]')")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    if "Open MPI" in version.stdout:  # which else refuses root, and more ranks than cores
        command = [command, "--allow-run-as-root", "--oversubscribe"]
    else:
        command = [command]
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, "-n", "2", sys.executable, str(script), *options],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_weights_are_those_of_one_process():
    """Three placements, three methods and uneven batches; K-FAC averages the gradients itself."""
    distances = json.loads(mpirun(HERE / "mpi_ranks.py"))
    assert len(distances) == 12
    for way, distance in distances.items():
        assert distance < 1e-10, way


def test_example():
    pytest.importorskip("sklearn")
    printed = mpirun(EXAMPLES / "mpi.py", "--steps", "20")
    *_, last = printed.splitlines()
    found = re.fullmatch(r"step 20: test loss [\d.]+, accuracy ([\d.]+)%", last)
    assert found, last
    assert float(found[1]) > 70
    assert "Plan Auto: " in printed
    assert re.search(r"^ *gradients +[\d.]+ [KM]iB", printed, re.MULTILINE)
