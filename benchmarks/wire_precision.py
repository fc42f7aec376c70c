"""What short numbers on the wire cost and save: `python -m benchmarks.wire_precision`.

Every setting trains the same steps on the same ranks from the same weights, on digits. Beside the
bytes that the busiest rank sends in a step with everything due stands the error of the
preconditioned gradient, after damping, relative to what float32 gives: that of the first step, and
the mean over ten steps, all of which follow the weights of float32.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from benchmarks import networks
from benchmarks.timing import render
from natgrad.comm import launch
from natgrad.lab.data import digits
from natgrad.placement import Route
from natgrad.tables import bytes_text

SHORT = torch.bfloat16
SETTINGS: dict[str, dict[str, torch.dtype]] = {
    "float32": {},
    "factors in bfloat16": {"wire_dtype": SHORT},
    "factors in float16": {"wire_dtype": torch.float16},
    "inverses in bfloat16": {"inverse_dtype": SHORT},
    "gradients in bfloat16": {"gradient_dtype": SHORT},
    "all in bfloat16": {"wire_dtype": SHORT, "inverse_dtype": SHORT, "gradient_dtype": SHORT},
}
STEPS = 10


@dataclass(frozen=True)
class Found:
    """Of one rank: bytes of the last step by setting, and of each step the relative error."""

    sent: dict[str, float]
    errors: dict[str, list[float]]


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(route: Route, batch: int) -> Found:
    """On the ranks of the default group: all settings take each step from the same weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, _ = digits()
    pixels = torch.stack([torch.as_tensor(x, dtype=torch.float32) for x, _ in data])
    labels = torch.tensor([int(y) for _, y in data])
    models, kfacs = {}, {}
    for name, short in SETTINGS.items():
        torch.manual_seed(0)
        models[name] = nn.parallel.DistributedDataParallel(networks.small_cnn())
        optimizer = torch.optim.SGD(models[name].parameters(), lr=0.05)
        spread = natgrad.Distributed(natgrad.Hybrid(0.5), route=route, **short)
        kfacs[name] = natgrad.KFAC(
            models[name], optimizer, update_every=1, refresh_every=1, distributed=spread
        )
    sent: dict[str, float] = {}
    errors: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for step in range(STEPS):
        chosen = torch.randint(len(labels), (ranks * batch,), generator=seeded(step))
        mine = chosen[rank * batch : (rank + 1) * batch]
        exact = None
        for name, model in models.items():
            before = kfacs[name].comm.traffic.snapshot()
            model.zero_grad()
            F.cross_entropy(model(pixels[mine].view(-1, 1, 8, 8)), labels[mine]).backward()
            kfacs[name].step()
            sent[name] = (kfacs[name].comm.traffic - before).total()
            found = gradients(model)
            exact = found.clone() if exact is None else exact
            errors[name].append(float((found - exact).norm() / exact.norm()))
        assert exact is not None
        for model in models.values():
            with torch.no_grad():
                moved = exact.split([p.numel() for p in model.parameters()])
                for p, change in zip(model.parameters(), moved, strict=True):
                    p -= 0.05 * change.view_as(p)
    return Found(sent, errors)


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def rows(ranks: int, results: Sequence[Found]) -> list[tuple[str, ...]]:
    most = {name: max(found.sent[name] for found in results) for name in SETTINGS}
    lines = []
    for name in SETTINGS:
        errors = results[0].errors[name]
        share = most[name] / most["float32"]
        first, mean = errors[0], sum(errors) / len(errors)
        figures = (bytes_text(most[name]), f"{share:.2f}", f"{first:.2%}", f"{mean:.2%}")
        lines.append((f"{ranks} ranks, {name}", *figures))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--batch", type=int, default=32, help="of one rank (default 32)")
    parser.add_argument("--route", choices=[route.value for route in Route], default="balanced")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    lines = []
    for ranks in given.ranks:
        results = launch.run(compare, Route(given.route), given.batch, ranks=ranks)
        lines += rows(ranks, results)
    header = ("what", "sent a step", "of float32's", "error, first step", "mean of ten")
    title = "Precision on the wire: bytes and error of the preconditioned gradient"
    print(render(title, header, lines, given.markdown))


if __name__ == "__main__":
    main()
