"""Peak memory of one training process: `python -m benchmarks.memory resnet32 natgrad eigen`.

Runs steps that update and refresh with one method (sgd, natgrad or naive) and prints the most
bytes the process ever held. The difference to sgd's is what the method costs, workspaces of the
decompositions included. glibc's malloc keeps much of what is freed, differently from run to run;
with `EXACT` in the environment large blocks are given back at once, and what is left is memory
that was really in use, the same in every run.
"""

import argparse

import torch

from benchmarks.timing import Row, peak_megabytes, peak_resident_bytes
from benchmarks.workloads import INVERSES, METHODS, WORKLOADS, Trainer

EXACT = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def memory_rows(
    model: str, inverse: str, threads: int, repeats: int, goal: float | None
) -> list[Row]:
    """Peak MB of natgrad and of the textbook less that of SGD, each in processes of its own."""

    def peak(method: str, environment: dict[str, str]) -> float:
        arguments = (model, method, inverse, "--threads", str(threads))
        return peak_megabytes(
            "benchmarks.memory", *arguments, repeats=repeats, environment=environment
        )

    rows = []
    allocators: dict[str, dict[str, str]] = {"in use": EXACT, "with what malloc keeps": {}}
    for label, environment in allocators.items():
        plain = peak("sgd", environment)
        for method, limit in (("natgrad", goal), ("naive", None)):
            over = peak(method, environment) - plain
            rows.append(Row(f"{model}, {inverse}, {method}: {label}", over, "MB", limit))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=WORKLOADS)
    parser.add_argument("method", choices=("sgd", *METHODS))
    parser.add_argument("inverse", choices=INVERSES, nargs="?", default="eigen")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    method = None
    if arguments.method != "sgd":
        method = METHODS[arguments.method]("both", arguments.inverse)
    train = Trainer(WORKLOADS[arguments.model], method)
    for _ in range(arguments.steps):
        train()
    print(peak_resident_bytes())


if __name__ == "__main__":
    main()
