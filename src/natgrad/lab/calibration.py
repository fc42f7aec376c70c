"""How fast this computer is, or the job that runs on many of them: what a `Cluster` needs to know.

Everything is measured on all ranks at once, as ranks that share cores, memory or a link do so in
training, too. A call is repeated until a round lasts long enough for a clock, and for ranks that
take turns on a core; a round takes as long as its slowest rank, and the least of several rounds
counts, as whatever else the computer does only adds to it.

Decompositions are those of the library, as a refresh calls them (`natgrad.inverses.contained`), not
the bare routines of LAPACK: copies and checks are part of what a refresh takes.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from math import ceil

import torch

from natgrad.checks import POSITIVE, check_numbers, check_whole
from natgrad.comm import Communicator
from natgrad.errors import SettingError
from natgrad.inverses import Cholesky, Eigen, Inverse, contained
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
Track = Callable[[Sequence[tuple[str, int]], str], Iterable[tuple[str, int]]]

# Up to this size many matrices are one call, both for `Eigen` and for `Cholesky`.
_BATCHED = 32
_MANY = 64
_MOST_REPEATS = 10_000
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
    """

    sizes: tuple[int, ...] = (2, 8, 32, 64, 128, 256, 512, 1024)
    nbytes: tuple[int, ...] = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
    rounds: int = 10
    round_seconds: float = 0.01

    def __post_init__(self) -> None:
        check_whole(self.rounds, "CalibrationSettings.rounds", 1)
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
    """Seconds of a call on all ranks in step, the same on each of them.

    Arguments:
        comm: the ranks that call it together.
        settings: how often and how long.
        clock: seconds since some moment.
        finish: waits until the device has done what it was told to.
    """

    comm: Communicator
    settings: CalibrationSettings
    clock: Callable[[], float] = time.perf_counter
    finish: Callable[[], object] = lambda: None

    def __call__(self, call: Call) -> float:
        self._round(call, 1)  # allocates what the others use
        once = max(_NOTHING, self._round(call, 1))
        repeats = min(_MOST_REPEATS, ceil(self.settings.round_seconds / once))
        if repeats == 1:  # it was a round already
            return min([once, *(self._round(call, 1) for _ in range(self.settings.rounds - 1))])
        return min(self._round(call, repeats) for _ in range(self.settings.rounds))

    def _round(self, call: Call, repeats: int) -> float:
        """Of one call, at the slowest rank."""
        self.comm.gather(None)
        start = self.clock()
        for _ in range(repeats):
            call()
        self.finish()
        seconds: list[float] = self.comm.gather((self.clock() - start) / repeats)
        return max(seconds)


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
        track: is given all measurements and what they are, and shows which of them are done.
    """
    settings = settings or CalibrationSettings()
    timer = RankTimer(comm, settings, clock, partial(_finish, device))
    seconds: dict[Routine, list[tuple[int, float, float]]] = {routine: [] for routine in Routine}
    collectives = []
    jobs = [(routine.value, size) for routine in Routine for size in settings.sizes]
    if comm.size > 1:
        jobs += [(kind, nbytes) for kind in KINDS for nbytes in settings.nbytes]
    what = f"Measuring {comm.size} rank{'' if comm.size == 1 else 's'}"
    with torch.no_grad():
        for name, size in track(jobs, what):
            if name in KINDS:
                collectives.append(_collective(timer, name, size, device))
            else:
                routine = Routine(name)
                seconds[routine].append(_computation(timer, kernels[routine], size, device))
    tables = {
        routine.value: SecondsBySize(*zip(*rows, strict=True)) for routine, rows in seconds.items()
    }
    best = tables["product"]
    flops = max(
        Routine.PRODUCT.operations(size) / first
        for size, first in zip(best.sizes, best.first, strict=True)
    )
    return MeasuredCluster(
        fit_links(collectives, flops) if collectives else Cluster(flops),
        MeasuredCost(flops, **tables),
        tuple(collectives),
        comm.gather(_circumstances(comm, device))[0],
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _computation(
    timer: RankTimer, kernel: Kernel, size: int, device: torch.device
) -> tuple[int, float, float]:
    """The size, and seconds of a first and of each further matrix in a call."""
    first = timer(kernel(size, 1, device))
    if size > _BATCHED:
        return size, first, first
    many = timer(kernel(size, _MANY, device))
    return size, first, max(_NOTHING, (many - first) / (_MANY - 1))


def _collective(
    timer: RankTimer, kind: str, nbytes: int, device: torch.device
) -> CollectiveSeconds:
    comm = timer.comm
    each = max(1, nbytes // (4 * comm.size))  # numbers of four bytes in a slice
    whole, part = torch.zeros(comm.size * each, device=device), torch.zeros(each, device=device)
    sizes = [each] * comm.size
    calls: dict[str, Call] = {
        "exchange": lambda: comm.exchange(whole, sizes, sizes, "calibration").wait(),
        "total": lambda: comm.total(whole, "calibration").wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, "calibration").wait(),
        "all_gather": lambda: comm.all_gather(part, "calibration").wait(),
    }
    return CollectiveSeconds(kind, comm.size, whole.nbytes, timer(calls[kind]))


def _circumstances(comm: Communicator, device: torch.device) -> Circumstances:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Circumstances(
        now, str(device.type), comm.size, torch.get_num_threads(), str(torch.__version__)
    )
