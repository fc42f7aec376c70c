"""A measured computer as a file, so that what was measured once plans many runs.

The file is JSON, with every number as it was measured, so that reading gives back exactly what was
written: Python writes a float with as many digits as tell it from all others. A file with a field
too many or too few, or with a number that no computer has, is refused as a whole, as a plan from
half of it would look like any other.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from natgrad.checks import check_whole_fields
from natgrad.errors import SettingError, first_line
from natgrad.placement.cluster import Cluster, Link
from natgrad.placement.link_fit import CollectiveSeconds
from natgrad.placement.measured_cost import MeasuredCost, Passing, SecondsBySize

VERSION = 3
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Under which a computer was measured.

    Arguments:
        when: date and time, as ISO 8601 writes them.
        device: of torch, such as ``"cpu"``.
        ranks: processes that were measured together, which share what they share in a run.
        threads: of torch in each of them.
        torch: its version.
    """

    when: str
    device: str
    ranks: int
    threads: int
    torch: str

    def __post_init__(self) -> None:
        check_whole_fields(self, "ranks", "threads")
        for name in ("when", "device", "torch"):
            if not isinstance(getattr(self, name), str):
                raise SettingError(
                    f"Circumstances.{name} is {getattr(self, name)!r} but must be a text: pass one."
                )


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """Speeds that were measured, for `simulate` and `Auto`.

    Arguments:
        cluster: operations a second of the fastest product, and links as fitted.
        cost: seconds of computations by size; its ``flops`` are those of the cluster.
        collectives: what the links were fitted to; none where one rank was measured, whose links
            are then the default ones.
        measured: when, and on how many ranks.
    """

    cluster: Cluster
    cost: MeasuredCost
    collectives: tuple[CollectiveSeconds, ...]
    measured: Circumstances

    def __post_init__(self) -> None:
        if self.cluster.flops != self.cost.flops:
            raise SettingError(
                f"MeasuredCluster.cluster has {self.cluster.flops!r} flops and its cost "
                f"{self.cost.flops!r} but both must be the same: pass those of one measurement."
            )

    @property
    def residual(self) -> float:
        """The largest relative error of the fitted links, 0 without any."""
        return max((abs(one.residual(self.cluster)) for one in self.collectives), default=0.0)


def write_cluster(measured: MeasuredCluster, path: str | PathLike[str]) -> None:
    """Write a file that `read_cluster` reads.

    Arguments:
        measured: what to write.
        path: of the file, which is overwritten.
    """
    text = json.dumps({"version": VERSION, **asdict(measured)}, indent=1, allow_nan=False)
    try:
        Path(path).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise SettingError(
            f"The cluster file {path} cannot be written ({error.strerror}): name a file in a "
            "folder that exists and that you may write to."
        ) from error


def read_cluster(path: str | PathLike[str]) -> MeasuredCluster:
    """Read what `write_cluster` wrote, exactly.

    Arguments:
        path: of the file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(
            f"The cluster file {path} cannot be read ({error.strerror}): name one that exists, or "
            f"write it with {_remedy(path)}."
        ) from error
    except ValueError as error:  # of JSON, or of UTF-8
        raise _error(path, f"is no JSON ({first_line(error)})") from error
    version = found.get("version") if isinstance(found, dict) else None
    if version is not None and version != VERSION:
        raise _error(path, f"has version {version!r} but this natgrad reads version {VERSION}")
    try:
        return _whole(found)
    except _ShapeError as error:
        raise _error(path, str(error)) from None
    except SettingError as error:
        said = str(error).rpartition(": ")[0]
        raise _error(path, f"has an impossible value ({said})") from None


class _ShapeError(Exception):
    """What is wrong with the fields of a file."""


def _whole(found: object) -> MeasuredCluster:
    values = _named(found, "", ["version", *(field.name for field in fields(MeasuredCluster))])
    cluster = _named(values["cluster"], "cluster", _fields_of(Cluster))
    if cluster["inside"] is not None:
        cluster["inside"] = _made(Link, cluster["inside"], "cluster.inside")
    cost = _named(values["cost"], "cost", _fields_of(MeasuredCost))
    product, eigen, cholesky = (
        _table(cost[name], f"cost.{name}") for name in ("product", "eigen", "cholesky")
    )
    carried, folded = (_made(Passing, cost[name], f"cost.{name}") for name in ("carried", "folded"))
    collectives = (
        _made(CollectiveSeconds, one, f"collectives[{i}]")
        for i, one in enumerate(_list(values["collectives"], "collectives"))
    )
    return MeasuredCluster(
        Cluster(**cluster),
        MeasuredCost(cost["flops"], product, eigen, cholesky, carried, folded),
        tuple(collectives),
        _made(Circumstances, values["measured"], "measured"),
    )


def _table(found: object, where: str) -> SecondsBySize:
    values = _named(found, where, _fields_of(SecondsBySize))
    lists = {name: tuple(_list(one, f"{where}.{name}")) for name, one in values.items()}
    return SecondsBySize(**lists)


def _made(kind: Callable[..., T], found: object, where: str) -> T:
    return kind(**_named(found, where, _fields_of(kind)))


def _fields_of(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _named(found: object, where: str, names: list[str]) -> dict[str, Any]:
    """The object, if it has exactly these fields."""
    if not isinstance(found, dict):
        raise _ShapeError(f"has {found!r} for {where or 'all'} but must have an object there")
    before = f"{where}." if where else ""
    for name in names:
        if name not in found:
            raise _ShapeError(f"lacks the field {before}{name}")
    for name in found:
        if name not in names:
            raise _ShapeError(f"has a field {before}{name}, which is unknown")
    return dict(found)


def _list(found: object, where: str) -> list[Any]:
    if not isinstance(found, list):
        raise _ShapeError(f"has {found!r} for {where} but must have a list there")
    return found


def _error(path: str | PathLike[str], what: str) -> SettingError:
    return SettingError(f"The cluster file {path} {what}: write it anew with {_remedy(path)}.")


def _remedy(path: str | PathLike[str]) -> str:
    return f"natgrad plan --calibrate {path}"
