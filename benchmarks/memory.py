"""Peak memory of one training process: `python -m benchmarks.memory resnet32 natgrad eigen`.

Runs steps of every kind with one method (sgd, natgrad or naive) and prints the most bytes the
process ever held. The difference to sgd's is what the method costs; workspaces of the
decompositions and pages the allocator keeps are in it.
"""

import argparse

import torch

from benchmarks.timing import peak_megabytes, peak_resident_bytes
from benchmarks.workloads import INVERSES, METHODS, WORKLOADS, Trainer


def over_sgd(model: str, method: str, inverse: str, threads: int, repeats: int) -> float:
    """Peak MB of training with the method less that of SGD, each in processes of its own."""

    def peak(name: str) -> float:
        arguments = (model, name, inverse, "--threads", str(threads))
        return peak_megabytes("benchmarks.memory", *arguments, repeats=repeats)

    return peak(method) - peak("sgd")


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
