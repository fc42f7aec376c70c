"""Correlation blocks against unfold-and-multiply for 3x3 convolutions, without any training.

    python -m benchmarks.correlation [--repeats 20] [--threads 2]

The limit is the time of the 13 lags, 26 n h w c^2 operations, at the speed of a large square
product on the same threads, measured in the same rounds. Errors are against float64.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import interleave
from natgrad.linalg.correlation import ConvGeometry, Correlations

SIZES = (  # images, channels, height and width: ResNets on 32x32, then on 224x224
    (128, 3, 32),
    (128, 16, 32),
    (128, 32, 16),
    (128, 64, 8),
    (8, 64, 56),
    (8, 128, 28),
    (8, 256, 14),
    (8, 512, 7),
)
GEOMETRY = ConvGeometry((3, 3), ((1, 1), (1, 1)))
SQUARE = 1536


def goal(channels: int) -> int:
    return 15 if channels <= 32 else 7


def unfold_and_multiply(x: Tensor) -> Tensor:
    """``x [n, c, h, w]`` -> ``[9 c, 9 c]``, features ordered channel, kernel row, kernel column."""
    patches = F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 9 * x.shape[1])
    return patches.T @ patches


def error(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact).norm() / exact.norm())


def line(n: int, c: int, side: int, repeats: int) -> str:
    x = torch.randn(n, c, side, side).relu()  # as after an activation: the mean is not zero
    form = Correlations(c, GEOMETRY, bias=False)
    kept = torch.zeros(form.numel)
    square = torch.randn(SQUARE, SQUARE)
    calls = {
        "square": lambda: square @ square,
        "unfold": lambda: unfold_and_multiply(x),
        "ours": lambda: form.add(kept, x),
    }
    times = interleave(calls, repeats)
    unfold, ours = times["unfold"].minimum, times["ours"].minimum
    limit = 26 * n * side**2 * c**2 * times["square"].minimum / (2 * SQUARE**3)
    exact = unfold_and_multiply(x.double())
    by_tap = exact.view(c, 9, c, 9).permute(1, 0, 3, 2).reshape(9 * c, 9 * c)
    form.add(kept.zero_(), x)
    verdict = "met" if unfold / ours >= goal(c) else "MISSED"
    return (
        f"{n:4} x {c:3} x {side:2} x {side:2} {1e3 * unfold:9.2f} {1e3 * ours:9.2f} "
        f"{unfold / ours:7.1f} {f'>= {goal(c)}':>7} {verdict:>7} {limit / ours:9.0%} "
        f"{error(unfold_and_multiply(x), exact):10.1e} {error(form.dense(kept)[0], by_tap):10.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} threads, float32, interleaved minima")
    print(
        f"{'n x c x h x w':19} {'unfold ms':>9} {'ours ms':>9} {'ratio':>7} {'goal':>7} {'':>7} "
        f"{'of limit':>9} {'error unf.':>10} {'error ours':>10}"
    )
    for size in SIZES:
        print(line(*size, options.repeats), flush=True)


if __name__ == "__main__":
    main()
