"""Trains a plain model over MPI and in one process, to be run by mpirun; rank 0 prints how far the
weights are apart, relative to the largest of a tensor, for every way of doing it; then runs the
script that the arguments name."""

import json
import runpy
import sys
import traceback
import warnings
from pathlib import Path

import torch
from mpi4py.MPI import COMM_WORLD

import natgrad
from distributed.training import METHODS, Run, alone, backward, network, weights

RANK, RANKS = COMM_WORLD.Get_rank(), COMM_WORLD.Get_size()
PLACEMENTS = {
    "mem": natgrad.MemOpt(),
    "comm": natgrad.CommOpt(),
    "scatter": natgrad.ReduceScatter(),
}


def distance(run: Run, placement: natgrad.placement.Placement) -> float:
    model = network(run.network)
    settings = {**run.kfac, "placement": placement, "group": natgrad.comm.MPI()}
    kfac, optimizer = Run(run.network, "plain", settings).make(model)
    for step in range(run.steps):
        optimizer.zero_grad()
        backward(run, model, step, RANK, RANKS)
        kfac.step()
        optimizer.step()
    assert kfac.traffic().sent["gradients"] > 0, "nobody else averages them"
    found, expected = weights(model), alone(run, RANKS)
    return max(float((found[n] - w).abs().max() / w.abs().max()) for n, w in expected.items())


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    found = {}
    for name, placement in PLACEMENTS.items():
        for method, settings in METHODS.items():
            run = Run("mlp", "plain", settings)
            found[f"{name} {method}"] = distance(run, placement)
        uneven = Run("mlp", "plain", batches=tuple(range(2, 2 + RANKS)))
        found[f"{name} uneven"] = distance(uneven, placement)
    worst = [max(both) for both in zip(*COMM_WORLD.allgather(list(found.values())), strict=True)]
    if RANK == 0:
        print(json.dumps(dict(zip(found, worst, strict=True))), flush=True)


if __name__ == "__main__":
    try:
        main()
        del sys.argv[0]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        COMM_WORLD.Abort(1)  # the others would wait forever
