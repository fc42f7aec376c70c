"""What a layer costs on a step that updates nothing: `python -m benchmarks.idle`.

    (seconds of forward and backward with K-FAC - without it) / layers

on a deep stack of tiny layers, whose time is nearly all Python and dispatch. Hooks that stay
installed show here; hooks that are gone between updates do not.
"""

import argparse

import torch
from torch import nn

from benchmarks.networks import tiny_stack
from benchmarks.page import add_output, report
from benchmarks.timing import Row, Table, interleave
from benchmarks.workloads import Trainer, Workload, library, naive


def hooks(model: nn.Module) -> int:
    """Hooks on modules and parameters, of every kind torch has."""
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_post_accumulate_grad_hooks",
    )
    owners: list[object] = [*model.modules(), *model.parameters()]
    return sum(len(getattr(owner, kind, None) or ()) for owner in owners for kind in kinds)


def idle_table(layers: int = 200, repeats: int = 200) -> Table:
    workload = Workload(lambda: tiny_stack(layers), 8, (8,), classes=8)
    trainers = {
        "plain": Trainer(workload),
        "natgrad": Trainer(workload, library("stale", "eigen")),
        "naive": Trainer(workload, naive("stale", "eigen")),
    }
    for trainer in trainers.values():
        trainer()  # step 0 updates; every later one is stale
    # One thread: tiny products gain nothing from a second one, and waiting for it is noise.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = interleave({name: t.backward for name, t in trainers.items()}, repeats, burst=2)
    torch.set_num_threads(threads)
    table = Table(f"Idle cost: forward and backward of {layers} Linear(8, 8), stale, one thread")
    for name, goal in (("natgrad", 1.0), ("naive", None)):
        microseconds = (times[name].minimum - times["plain"].minimum) / layers * 1e6
        table.rows.append(Row(f"{name}, a layer", microseconds, "us", goal))
        count = hooks(trainers[name].model) - hooks(trainers["plain"].model)
        table.rows.append(Row(f"{name}, hooks on the model", count, goal=0 if goal else None))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=200)
    add_output(parser)
    arguments = parser.parse_args()
    report([idle_table(arguments.layers, arguments.repeats)], arguments)


if __name__ == "__main__":
    main()
