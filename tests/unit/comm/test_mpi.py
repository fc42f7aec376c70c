"""MPI: the contract on processes that mpirun starts."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from natgrad.comm import MPI
from natgrad.errors import SettingError
from unit.comm.contract import CONTRACT

HERE = Path(__file__).parent


def mpirun():
    """The command that starts processes, or a skip that says what is missing."""
    command = shutil.which("mpirun")
    if command is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (pip install mpi4py)")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    open_mpi = "Open MPI" in version.stdout
    return [command, *(["--allow-run-as-root", "--oversubscribe"] if open_mpi else [])]


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_contract(ranks):
    command = [*mpirun(), "-n", str(ranks), sys.executable, str(HERE / "mpi_ranks.py")]
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    checks = [check.__name__ for check in CONTRACT]
    assert run.stdout.split() == [*checks, "sub_groups", "wrong_settings", "own_messages"]


def test_mpi4py_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(SettingError) as error:
        MPI()
    message = str(error.value)
    assert message.startswith("MPI() needs mpi4py, which cannot be imported (")
    assert message.endswith(
        "): install an MPI library and run pip install 'natgrad[mpi]', or use ProcessGroups()."
    )
