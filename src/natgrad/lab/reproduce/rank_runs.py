"""Runs on several processes, each of which torchrun starts once for all of them.

    torchrun --nproc-per-node 4 -m natgrad.lab.reproduce.rank_runs FOLDER

trains with every ``NAME.toml`` in the folder, in a process group that all of them share, and writes
``NAME.json``: the tests of each run, by step.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from natgrad.comm.torchrun import joined
from natgrad.errors import NatgradError
from natgrad.lab.train import toml
from natgrad.lab.train.logs import read
from natgrad.lab.train.loop import train
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.state import write_text

Tests = dict[str, list[float]]  # "steps", and each metric


def on_processes(count: int, runs: Mapping[str, Settings]) -> dict[str, Tests]:
    """The tests of all runs, on so many processes of this machine, one thread each.

    Arguments:
        count: of processes, at least 1.
        runs: settings by name.
    """
    with TemporaryDirectory() as folder:
        for name, settings in runs.items():
            write_text(Path(folder) / f"{name}.toml", toml.written(settings))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run(
            [sys.executable, *launcher, "-m", __name__, folder],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            raise NatgradError(
                f"Runs on {count} processes ended with code {done.returncode} "
                f"({(lines or done.stderr.splitlines() or [''])[0].strip()}): try natgrad train "
                "with the same settings to see why."
            )
        return {
            name: json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8"))
            for name in runs
        }


def main(folder: Path) -> None:
    """Called on every rank.

    Arguments:
        folder: with the settings, and for the results, which the first rank writes.
    """
    with joined() as (comm, _):
        for path in sorted(folder.glob("*.toml")):
            out = folder / path.stem
            train(Settings(**toml.read(path)), out)
            if comm.rank == 0:
                write_text(path.with_suffix(".json"), json.dumps(_tests(read(out), comm.size)))


def _tests(lines: list[dict[str, Any]], processes: int) -> dict[str, Any]:
    found: dict[str, Any] = {"processes": processes, "steps": []}
    for line in lines:
        if line["kind"] == "test":
            found["steps"].append(line["step"])
            for name in ("accuracy", "loss"):
                found.setdefault(name, []).append(round(line[name], 6))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
