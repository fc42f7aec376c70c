"""The input factor of 3x3 convolutions against unfold: `python -m benchmarks.conv_factor`.

One stride-1 convolution of C channels on images of a given size is trained on steps that update;
printed is how often natgrad's stage A fits into that of the textbook, which unfolds the input and
multiplies. Sizes are those of ResNet-32 (batch 128) and ResNet-50 (batch 8).
"""

import argparse
from functools import partial

import torch
from torch import nn

from benchmarks.timing import Row, Table, interleave, report
from benchmarks.workloads import StageClock, Trainer, Workload, library, naive

SIZES = (  # batch, channels, height and width
    (128, 16, 32),
    (128, 32, 16),
    (128, 64, 8),
    (8, 64, 56),
    (8, 128, 28),
    (8, 256, 14),
    (8, 512, 7),
)


def convolution(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


def speedup(batch: int, channels: int, side: int, repeats: int) -> Row:
    workload = Workload(partial(convolution, channels), batch, (channels, side, side))
    calls = {
        "natgrad": Trainer(workload, library("update", "eigen")),
        "naive": Trainer(workload, naive("update", "eigen")),
    }
    clocks = {name: StageClock(trainer.preconditioner) for name, trainer in calls.items()}
    interleave(calls, repeats, after={name: clock.read for name, clock in clocks.items()}, burst=2)
    ours, theirs = (clocks[name].best("A") for name in ("natgrad", "naive"))
    note = f"{theirs * 1e3:.3g} -> {ours * 1e3:.3g} ms"
    label = f"{channels} channels, {side}x{side}, batch {batch}"
    return Row(label, theirs / ours, "x", 15 if channels <= 32 else 7, True, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table("Input factor of a 3x3 convolution", note_name="textbook -> natgrad")
    table.rows = [speedup(*size, arguments.repeats) for size in SIZES]
    report([table], arguments.markdown, arguments.json)


if __name__ == "__main__":
    main()
