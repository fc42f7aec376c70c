"""Words of the command line, and the objects that they stand for."""

from enum import StrEnum
from fractions import Fraction
from typing import Annotated

import torch
import typer

from natgrad.cli.networks import NAMED
from natgrad.errors import SettingError
from natgrad.inverses import Cholesky, Eigen, Inverse
from natgrad.placement import (
    Auto,
    Cluster,
    CommOpt,
    Hybrid,
    Local,
    MemOpt,
    ReduceScatter,
    Strategy,
)

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}


class PlacementName(StrEnum):
    AUTO = "auto"
    MEM = "mem"
    HYBRID = "hybrid"
    COMM = "comm"
    SCATTER = "scatter"
    LOCAL = "local"


class InverseName(StrEnum):
    EIGEN = "eigen"
    CHOLESKY = "cholesky"

    def made(self) -> Inverse:
        return Eigen() if self is InverseName.EIGEN else Cholesky()


class Layout(StrEnum):
    DDP = "ddp"
    FSDP = "fsdp"
    PLAIN = "plain"


class WireDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def made(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.value]


NetworkOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(NAMED)}; or a function that builds a model, as module:function.",
    ),
]
RanksOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Processes that train together.")
]
PlacementOption = Annotated[
    PlacementName,
    typer.Option(
        metavar="NAME", help=f"Who decomposes and preconditions what: {', '.join(PlacementName)}."
    ),
]
FractionOption = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE", help="Of the ranks that precondition a layer, with --placement hybrid."
    ),
]
LayoutOption = Annotated[
    Layout,
    typer.Option(metavar="NAME", help=f"How gradients lie on the ranks: {', '.join(Layout)}."),
]
InverseOption = Annotated[
    InverseName,
    typer.Option(metavar="NAME", help=f"How factors are inverted: {', '.join(InverseName)}."),
]
UpdateOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Steps between updates of factors.")
]
RefreshOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Steps between decompositions.")
]


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


def cluster(text: str) -> Cluster:
    """'1e13,1e10,2e-5' -> Cluster(flops=1e13, bandwidth=1e10, latency=2e-5)"""
    try:
        flops, bandwidth, latency = map(float, text.split(","))
    except ValueError:
        raise SettingError(
            f"--cluster is {text!r} but must be three numbers, operations a second, bytes a second "
            "and seconds of latency of one rank: write them as in 1e13,1e10,2e-5."
        ) from None
    return Cluster(flops, bandwidth, latency)


def placement(
    name: PlacementName,
    share: str | None,
    memory_limit: int | None = None,
    machines: Cluster | None = None,
) -> Strategy:
    if share is not None and name is not PlacementName.HYBRID:
        raise SettingError(
            f"--fraction {share} belongs to --placement hybrid but --placement is {name.value}: "
            "leave one of them out."
        )
    match name:
        case PlacementName.AUTO:
            return Auto(memory_limit, cluster=machines or Cluster())
        case PlacementName.MEM:
            return MemOpt()
        case PlacementName.COMM:
            return CommOpt()
        case PlacementName.SCATTER:
            return ReduceScatter()
        case PlacementName.LOCAL:
            return Local()
    if share is None:
        raise SettingError(
            "--placement hybrid needs the share of ranks that precondition a layer: pass "
            "--fraction, such as 0.25."
        )
    return Hybrid(fraction(share))
