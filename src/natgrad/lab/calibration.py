"""How fast this computer is, or the job that runs on many of them: what a `Cluster` needs to know.

Everything is measured on all ranks at once, as ranks that share cores, memory or a link do so in
training, too. A call is repeated until a round lasts long enough for a clock, and for ranks that
take turns on a core; a round takes as long as its slowest rank, and the least of several rounds
counts, as whatever else the computer does only adds to it. All calls take turns, a round each, so
that a slow moment of the computer spoils one round of all and not all rounds of one.

Decompositions are those of the library, as a refresh calls them (`natgrad.inverses.contained`), not
the bare routines of LAPACK: copies and checks are part of what a refresh takes. What the rest of a
step takes is measured on steps (`step_calibration`).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import pairwise
from math import ceil, inf

import torch

from natgrad.checks import POSITIVE, check_numbers, check_whole
from natgrad.comm import Communicator
from natgrad.errors import SettingError
from natgrad.inverses import Cholesky, Eigen, Inverse, contained
from natgrad.lab.step_calibration import passing
from natgrad.linalg.products import product
from natgrad.placement import (
    Circumstances,
    Cluster,
    CollectiveSeconds,
    MeasuredCluster,
    MeasuredCost,
    SecondsBySize,
    fit_links,
)
from natgrad.placement.link_fit import KINDS
from natgrad.specs import Routine

Call = Callable[[], object]
# From the rows of a matrix, their number and the device to what is timed.
Kernel = Callable[[int, int, torch.device], Call]
Job = tuple[str, int, int]  # a routine with rows and matrices, or a collective with bytes and 1
Track = Callable[[Sequence[Job], str], Iterable[Job]]

# Up to this size many matrices are one call, both for `Eigen` and for `Cholesky`.
_BATCHED = 32
_MANY = 64
_MOST_REPEATS = 10_000
_MEETINGS = 20
# Below what a clock can tell: a further matrix that came for nothing.
_NOTHING = 1e-9


@dataclass(frozen=True)
class CalibrationSettings:
    """What is measured, and how carefully.

    Arguments:
        sizes: rows of the square matrices, in increasing order; above the largest one seconds grow
            by the cube.
        nbytes: of the buffers of collectives.
        rounds: of which the fastest counts.
        round_seconds: how long one lasts at least, by repeating a call.
        layers: of the network whose steps show what a layer costs beside its products.
        width: of the layer whose steps show what a number costs.
    """

    sizes: tuple[int, ...] = (2, 8, 32, 64, 128, 256, 512, 1024)
    nbytes: tuple[int, ...] = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
    rounds: int = 10
    round_seconds: float = 0.01
    layers: int = 64
    width: int = 1024

    def __post_init__(self) -> None:
        for name in ("rounds", "layers", "width"):
            check_whole(getattr(self, name), f"CalibrationSettings.{name}", 1)
        check_numbers(self, round_seconds=POSITIVE)
        for name in ("sizes", "nbytes"):
            values = getattr(self, name)
            for value in values:
                check_whole(value, f"CalibrationSettings.{name}", 1)
            if not values or any(a >= b for a, b in pairwise(values)):
                raise SettingError(
                    f"CalibrationSettings.{name} is {values!r} but must be at least one number, in "
                    "increasing order: pass such a tuple."
                )


def _product(dim: int, count: int, device: torch.device) -> Call:
    left, right, out = torch.randn(3, count, dim, dim, device=device)
    return lambda: product(left, right, out)


def _decomposition(inverse: Inverse) -> Kernel:
    def kernel(dim: int, count: int, device: torch.device) -> Call:
        data = torch.randn(count, dim, 2 * dim, device=device)
        factor = data @ data.mT / (2 * dim)
        damping = torch.full((count,), 1e-2, device=device)
        return lambda: contained(inverse, factor.clone, damping)

    return kernel


KERNELS: Mapping[Routine, Kernel] = {
    Routine.PRODUCT: _product,
    Routine.EIGEN: _decomposition(Eigen()),
    Routine.CHOLESKY: _decomposition(Cholesky()),
}


@dataclass(frozen=True)
class RankTimer:
    """Seconds of calls on all ranks in step, the same on each of them.

    They last from the start of a rank until all are done. Where there are more ranks than cores,
    some begin when others have ended: each by itself would seem to have a core of its own.

    Arguments:
        comm: the ranks that call it together.
        clock: seconds since some moment.
        finish: waits until the device has done what it was told to.
    """

    comm: Communicator
    clock: Callable[[], float] = time.perf_counter
    finish: Callable[[], object] = lambda: None

    def __call__(self, call: Call, repeats: int = 1) -> float:
        """Seconds of one call, at the slowest rank.

        Arguments:
            call: what is timed, on all ranks the same.
            repeats: how often it is called for that, at least once.
        """
        start, own = self._called(call, repeats)
        self.comm.gather(None)
        together = self.clock() - start - self.meeting
        seconds: list[float] = self.comm.gather(max(own, together) / repeats)
        return max(seconds)

    def _called(self, call: Call, repeats: int) -> tuple[float, float]:
        """When this rank began, after a meeting, and the seconds until it was done itself."""
        self.comm.gather(None)
        start = self.clock()
        for _ in range(repeats):
            call()
        self.finish()
        return start, self.clock() - start

    @cached_property
    def meeting(self) -> float:
        """Seconds until all ranks have heard of each other, at least."""
        found = inf
        for _ in range(_MEETINGS):
            start = self.clock()
            self.comm.gather(None)
            found = min(found, self.clock() - start)
        return found

    def repeats(self, call: Call, seconds: float) -> int:
        """How many calls last that long.

        Arguments:
            call: what will be timed.
            seconds: how long a round shall last.
        """
        self._called(call, 1)  # allocates what the others use
        # A rank's own seconds: those of a meeting, however few, are many beside a short call.
        own: list[float] = self.comm.gather(self._called(call, 1)[1])
        return min(_MOST_REPEATS, ceil(seconds / max(_NOTHING, *own)))


def calibrate(
    comm: Communicator,
    device: torch.device,
    settings: CalibrationSettings | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    kernels: Mapping[Routine, Kernel] = KERNELS,
    track: Track = lambda items, what: items,
) -> MeasuredCluster:
    """Measure the ranks of a communicator, which all call this; each gets the same result.

    Arguments:
        comm: the ranks; alone, links are not measured and stay those of ``Cluster()``.
        device: of this rank, where everything is computed.
        settings: what is measured; ``None`` is ``CalibrationSettings()``.
        clock: seconds since some moment.
        kernels: what computes a product, an eigendecomposition and a Cholesky inverse.
        track: is given all rounds and what they are, and shows how many of them are done.
    """
    settings = settings or CalibrationSettings()
    timer = RankTimer(comm, clock, partial(_finish, device))
    with torch.no_grad():
        calls = {
            (routine.value, size, count): kernels[routine](size, count, device)
            for routine in Routine
            for size in settings.sizes
            for count in ((1, _MANY) if size <= _BATCHED else (1,))
        }
        if comm.size > 1:
            for nbytes in settings.nbytes:
                calls |= _collectives(comm, nbytes, device)
        repeats: dict[Job, int] = {}
        seconds = dict.fromkeys(calls, inf)
        turns = [job for _ in range(settings.rounds) for job in calls]
        for job in track(turns, f"Measuring {comm.size} rank{'' if comm.size == 1 else 's'}"):
            if job not in repeats:
                repeats[job] = timer.repeats(calls[job], settings.round_seconds)
            seconds[job] = min(seconds[job], timer(calls[job], repeats[job]))
    tables = {routine.value: _table(routine, settings.sizes, seconds) for routine in Routine}
    collectives = [
        CollectiveSeconds(kind, comm.size, nbytes, found)
        for kind in KINDS
        for (name, nbytes, _), found in seconds.items()
        if name == kind
    ]
    best = tables["product"]
    flops = max(
        Routine.PRODUCT.operations(size) / first
        for size, first in zip(best.sizes, best.first, strict=True)
    )
    cost = MeasuredCost(flops, best, tables["eigen"], tables["cholesky"])
    carried, folded = passing(timer, settings.rounds, settings.layers, settings.width, cost, device)
    return MeasuredCluster(
        fit_links(collectives, flops) if collectives else Cluster(flops),
        replace(cost, carried=carried, folded=folded),
        tuple(collectives),
        comm.gather(_circumstances(comm, device))[0],
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table(routine: Routine, sizes: Sequence[int], seconds: Mapping[Job, float]) -> SecondsBySize:
    first = [seconds[routine.value, size, 1] for size in sizes]
    further = [
        one
        if (many := seconds.get((routine.value, size, _MANY))) is None
        else max(_NOTHING, (many - one) / (_MANY - 1))
        for size, one in zip(sizes, first, strict=True)
    ]
    return SecondsBySize(tuple(sizes), tuple(first), tuple(further))


def _collectives(comm: Communicator, nbytes: int, device: torch.device) -> dict[Job, Call]:
    each = max(1, nbytes // (4 * comm.size))  # numbers of four bytes in a slice
    whole, part = torch.zeros(comm.size * each, device=device), torch.zeros(each, device=device)
    sizes = [each] * comm.size
    calls: dict[str, Call] = {
        "exchange": lambda: comm.exchange(whole, sizes, sizes, "calibration").wait(),
        "total": lambda: comm.total(whole, "calibration").wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, "calibration").wait(),
        "all_gather": lambda: comm.all_gather(part, "calibration").wait(),
    }
    return {(kind, whole.nbytes, 1): call for kind, call in calls.items()}


def _circumstances(comm: Communicator, device: torch.device) -> Circumstances:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Circumstances(
        now, str(device.type), comm.size, torch.get_num_threads(), str(torch.__version__)
    )
