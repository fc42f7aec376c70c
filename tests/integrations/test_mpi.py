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


@pytest.fixture(scope="module")
def printed():
    """The comparison in the first line, and behind it the example: by two processes that are
    started once."""
    pytest.importorskip("sklearn")
    first, _, rest = mpirun(HERE / "mpi_ranks.py", EXAMPLES / "mpi.py", "--steps", "20").partition(
        "\n"
    )
    return first, rest


def test_weights_are_those_of_one_process(printed):
    """Three placements, three methods and uneven batches; K-FAC averages the gradients itself."""
    distances = json.loads(printed[0])
    assert len(distances) == 12
    for way, distance in distances.items():
        assert distance < 1e-10, way


def test_example(printed):
    _, shown = printed
    *_, last = shown.splitlines()
    found = re.fullmatch(r"step 20: test loss [\d.]+, accuracy ([\d.]+)%", last)
    assert found, last
    assert float(found[1]) > 70
    assert "Plan Auto: " in shown
    assert re.search(r"^ *gradients +[\d.]+ [KM]iB", shown, re.MULTILINE)
