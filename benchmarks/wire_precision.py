"""What short numbers cost and save: `python -m benchmarks.wire_precision`.

Every setting trains the same steps on the same ranks from the same weights, on digits. Beside the
bytes that the busiest rank sends in a step with everything due stands the error of the
preconditioned gradient, after damping, relative to what float32 gives: that of the first step, and
the mean over ten, all of which follow the weights of float32.

Factors and gradients travel under `MemOpt`, inverses under `CommOpt`, and all three under
`Hybrid(0.5)` on 4 ranks or more. Bytes are compared with those of float32 under the same placement.
The last two rows send float32: a network under autocast to bfloat16, whose activations have 16
bits, and the same with factors by 16-bit products, the error of which is against the former.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from benchmarks import networks
from benchmarks.timing import render
from natgrad.comm import float21, launch
from natgrad.comm.wire import WireFormat
from natgrad.lab.data import digits
from natgrad.placement import Placement, Route
from natgrad.tables import bytes_text


@dataclass(frozen=True)
class Setting:
    """``wire``: keywords of `Distributed`; ``to``: whose gradients the error is against; ``ranks``:
    the fewest on which it differs from that."""

    placement: Placement = natgrad.MemOpt()  # noqa: RUF009 (frozen)
    wire: dict[str, WireFormat] = field(default_factory=dict)
    autocast: bool = False
    half_products: bool | None = None
    to: str = "float32"
    ranks: int = 2


def _settings() -> dict[str, Setting]:
    found = {"float32": Setting(ranks=1)}
    formats: dict[str, WireFormat] = {"float21": float21, "bfloat16": torch.bfloat16}
    for name, given in (formats | {"float16": torch.float16}).items():
        found[f"factors in {name}"] = Setting(wire={"wire_dtype": given})
    for name, given in formats.items():
        found[f"inverses in {name}"] = Setting(natgrad.CommOpt(), {"inverse_dtype": given})
    for name, given in formats.items():
        found[f"gradients in {name}"] = Setting(wire={"gradient_dtype": given})
    for name, given in formats.items():
        wire = dict.fromkeys(("wire_dtype", "inverse_dtype", "gradient_dtype"), given)
        found[f"all in {name}"] = Setting(natgrad.Hybrid(0.5), wire, ranks=4)
    autocast = Setting(autocast=True, half_products=False, ranks=1)
    found["autocast"] = autocast
    found["16-bit products"] = replace(autocast, half_products=True, to="autocast")
    return found


SETTINGS = _settings()


def settings_on(ranks: int) -> dict[str, Setting]:
    return {name: one for name, one in SETTINGS.items() if ranks >= one.ranks}


@dataclass(frozen=True)
class Found:
    """Of one rank: bytes of the last step by setting, those of float32 under the same placement,
    and of each step the relative error."""

    sent: dict[str, float]
    single: dict[str, float]
    errors: dict[str, list[float]]


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(route: Route, batch: int, steps: int) -> Found:
    """On the ranks of the default group: all settings take each step from the same weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, _ = digits()
    pixels = torch.stack([torch.as_tensor(x, dtype=torch.float32) for x, _ in data])
    labels = torch.tensor([int(y) for _, y in data])
    settings, models, kfacs = settings_on(ranks), {}, {}
    for name, one in settings.items():
        models[name], kfacs[name] = _made(one, one.wire, route)
    sent: dict[str, float] = {}
    errors: dict[str, list[float]] = {name: [] for name in settings}
    for step in range(steps):
        chosen = torch.randint(len(labels), (ranks * batch,), generator=seeded(step))
        mine = chosen[rank * batch : (rank + 1) * batch]
        found: dict[str, Tensor] = {}
        for name, one in settings.items():
            before, model = kfacs[name].comm.traffic.snapshot(), models[name]
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=one.autocast):
                out = model(pixels[mine].view(-1, 1, 8, 8))
            F.cross_entropy(out.float(), labels[mine]).backward()
            kfacs[name].step()
            sent[name] = (kfacs[name].comm.traffic - before).total()
            found[name] = gradients(model).clone()
            exact = found[one.to]
            errors[name].append(float((found[name] - exact).norm() / exact.norm()))
        for model in models.values():
            with torch.no_grad():
                moved = found["float32"].split([p.numel() for p in model.parameters()])
                for p, change in zip(model.parameters(), moved, strict=True):
                    p -= 0.05 * change.view_as(p)
    single = {name: _planned(_made(one, {}, route)[1]) for name, one in settings.items()}
    assert single["float32"] == sent["float32"]
    return Found(sent, single, errors)


def _made(
    setting: Setting, wire: dict[str, WireFormat], route: Route
) -> tuple[nn.Module, natgrad.KFAC]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(networks.small_cnn())
    kfac = natgrad.KFAC(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        update_every=1,
        refresh_every=1,
        half_products=setting.half_products,
        distributed=natgrad.Distributed(setting.placement, route=route, **wire),
    )
    return model, kfac


def _planned(kfac: natgrad.KFAC) -> float:
    """Bytes of a step with everything due, which are those that would be counted."""
    sent = kfac.plan.sent(kfac.comm.rank)
    agreed = sent.agreement.update + sent.agreement.refresh + sent.agreement.apply
    return sent.factors + sent.inverses + sent.gradients + agreed


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def rows(ranks: int, results: Sequence[Found]) -> list[tuple[str, ...]]:
    lines = []
    for name in settings_on(ranks):
        errors = results[0].errors[name]
        most = max(found.sent[name] for found in results)
        single = max(found.single[name] for found in results)
        share = f"{most / single:.2f}" if single else "–"
        first, mean = errors[0], sum(errors) / len(errors)
        figures = (bytes_text(most), share, f"{first:.3%}", f"{mean:.3%}")
        lines.append((f"{ranks} rank{'s' * (ranks > 1)}, {name}", *figures))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--batch", type=int, default=32, help="of one rank (default 32)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--route", choices=[route.value for route in Route], default="balanced")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    lines = []
    for ranks in given.ranks:
        settings = Route(given.route), given.batch, given.steps
        results = launch.run(compare, *settings, ranks=ranks)
        lines += rows(ranks, results)
    header = ("what", "sent a step", "of float32's", "error, first step", f"mean of {given.steps}")
    title = "Short numbers: bytes and error of the preconditioned gradient"
    print(render(title, header, lines, given.markdown))


if __name__ == "__main__":
    main()
