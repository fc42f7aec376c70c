"""Words of the command line, and the objects that they stand for."""

from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, TypeVar

import torch
import typer

from natgrad.comm.wire import WireFormat, float21
from natgrad.errors import SettingError
from natgrad.lab.models.by_name import NamedNetwork
from natgrad.lab.models.spreading import Layout
from natgrad.lab.names import INVERSES, NETWORKS, PLACEMENTS, PlacementRequest
from natgrad.lab.registry import PATH
from natgrad.placement import CLUSTERS, Cluster, CostModel, Flops, Placement, read_cluster

T = TypeVar("T")
UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}


class WireDtype(StrEnum):
    FLOAT32 = "float32"
    FLOAT21 = "float21"
    BFLOAT16 = "bfloat16"

    def made(self) -> WireFormat:
        found: dict[str, WireFormat] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        return found.get(self.value, float21)


# Networks that have a size without the data of a task.
SIZED = tuple(name for name, one in NETWORKS.entries().items() if one.alone is not None)

_NETWORK = typer.Option(
    metavar="NAME",
    help=f"{', '.join(SIZED)}; or a function that builds a model, as {PATH}.",
)
NetworkOption = Annotated[str, _NETWORK]
SomeNetworkOption = Annotated[str | None, _NETWORK]
_RANKS = typer.Option(metavar="N", min=1, help="Processes that train together.")
RanksOption = Annotated[int, _RANKS]
SomeRanksOption = Annotated[int | None, _RANKS]
PlacementOption = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"Who does what: {PLACEMENTS.help()}.", show_default=False),
]
FractionOption = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="Of the ranks, with --placement hybrid."),
]
LayoutOption = Annotated[
    Layout,
    typer.Option(
        metavar="NAME", help=f"How gradients lie: {', '.join(Layout)}.", show_default=False
    ),
]
InverseOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"{INVERSES.help()}.", show_default=False)
]
UpdateOption = Annotated[int, typer.Option(metavar="N", min=1, help="Steps between updates.")]
RefreshOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Steps between decompositions.")
]

StatisticsOption = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="Of a batch, or samples, that are measured."),
]
MaxDimOption = Annotated[
    str,
    typer.Option(metavar="N", help="Widest factor kept whole, or none.", show_default=True),
]


def statistics(text: str | None) -> float | None:
    """'0.25' -> 0.25, a share; '64' -> 64, a number of samples"""
    if text is None:
        return None
    try:
        found: float = int(text) if text.strip().isdecimal() else float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        found = 0.0
    if not (0 < found <= 1 or (isinstance(found, int) and found)):
        raise SettingError(
            f"--statistics is {text!r} but must say which samples the curvature is measured on: "
            "write a share above 0 and at most 1.0, such as 0.25 or 1/4, or a whole number of "
            "samples of all ranks together."
        )
    return found


def max_dim(text: str) -> int | None:
    """'4096' -> 4096; 'none' -> None"""
    if text == "none":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(
            f"--max-dim is {text!r} but must be the most columns of a factor that is kept whole: "
            "write a whole number, at least 1, or none to keep all of them whole."
        )
    return int(text)


def size(text: str, option: str) -> int:
    """'25MiB' -> 26214400"""
    number = text.strip().rstrip("BKMGibkmg").strip()
    unit = text.strip()[len(number) :].strip().lower()
    try:
        value = round(float(number) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        value = 0
    if value < 1:
        raise SettingError(
            f"{option} is {text!r}, which is no number of bytes: write one such as 512MiB, 40GB or "
            "1e9."
        )
    return value


def fraction(text: str) -> float:
    """'1/4' -> 0.25"""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise SettingError(
            f"--fraction is {text!r} but must be above 0 and at most 1: write a share of the ranks "
            "such as 0.25 or 1/4."
        )
    return value


def shape(text: str) -> tuple[int, ...]:
    """'3,32,32' -> (3, 32, 32)"""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise SettingError(
            f"--sample is {text!r}, which is no shape: write the sizes of one input, such as "
            "3,32,32."
        )
    return sizes


def rank_counts(text: str) -> tuple[int, ...]:
    """'1,4,16' -> (1, 4, 16)"""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise SettingError(
            f"--sweep-ranks is {text!r} but must be numbers of ranks, at least 1 each: write them "
            "as in 1,4,16,64."
        )
    return counts


def in_two_levels(machines: Cluster, name: str) -> Cluster:
    """The cluster with even slices that go inside of nodes first."""
    if machines.node == 1:
        nodes = [one.name for one in CLUSTERS.values() if one.node > 1]
        raise SettingError(
            f"--two-levels is given but --cluster {name} has one rank in a node: leave it out, or "
            f"name one of {', '.join(nodes)}."
        )
    return replace(machines, two_levels=True)


def cluster(text: str) -> tuple[Cluster, CostModel]:
    """'1e13,1e10,2e-5' -> Cluster(flops=1e13, bandwidth=1e10, latency=2e-5), Flops(); one by name;
    or the name of a file -> what `natgrad plan --calibrate` has measured and written there."""
    if text in CLUSTERS:
        return CLUSTERS[text], Flops()
    if text.endswith(".json"):
        found = read_cluster(text)
        return found.cluster, found.cost
    try:
        flops, bandwidth, latency = map(float, text.split(","))
    except ValueError:
        raise SettingError(
            f"--cluster is {text!r} but must be three numbers, operations a second, bytes a second "
            "and seconds of latency of one rank, as in 1e13,1e10,2e-5, or a file that --calibrate "
            f"wrote, with .json at the end: write these, or name one of {', '.join(CLUSTERS)}."
        ) from None
    return Cluster(flops, bandwidth, latency), Flops()


def needed(value: T | None, option: str) -> T:
    """What a command cannot do without, unless it is asked for something else."""
    if value is None:
        raise SettingError(
            f"natgrad plan is given no {option} but needs --network and --ranks to plan a run: "
            "pass both, or --calibrate FILE to measure this computer."
        )
    return value


def network(name: str) -> NamedNetwork:
    """One that can be built without data."""
    found = NETWORKS[name]
    if found.alone is None:
        raise SettingError(
            f"Network {name!r} is built for the data of a task, and here are none: name one of "
            f"{', '.join(SIZED)}, or a function that builds it as {PATH}."
        )
    return found


def placement(
    name: str,
    share: str | None,
    memory_limit: int | None = None,
    machines: Cluster | None = None,
    cost: CostModel | None = None,
) -> Placement:
    made_by = PLACEMENTS[name]
    if share is not None and name != "hybrid":
        raise SettingError(
            f"--fraction {share} belongs to --placement hybrid but --placement is {name}: leave "
            "one of them out."
        )
    if share is None and name == "hybrid":
        raise SettingError(
            "--placement hybrid needs the share of ranks that precondition a layer: pass "
            "--fraction, such as 0.25."
        )
    part = 1.0 if share is None else fraction(share)
    return made_by(PlacementRequest(part, memory_limit, machines or Cluster(), cost or Flops()))
