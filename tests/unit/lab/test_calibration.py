"""A calibration finds the speeds of a computer that is made up, to the last digits, and says how it
was measured; what it measures on a real one makes sense."""

import math
from dataclasses import replace

import pytest
import torch

from distributed.conftest import world
from natgrad.comm import Alone, Communicator, connect
from natgrad.comm.transfers import Arrived
from natgrad.errors import SettingError
from natgrad.lab.calibration import CalibrationSettings, RankTimer, calibrate
from natgrad.lab.step_calibration import passing
from natgrad.placement import Cluster, Passing
from natgrad.specs import Routine

__all__ = ["world"]

CPU = torch.device("cpu")
SIZES, NBYTES = (2, 32, 64, 256), (1 << 10, 1 << 14, 1 << 20)
REAL = (1 << 10, 1 << 23)  # no other program makes up for such a factor
SETTINGS = CalibrationSettings(SIZES, NBYTES, rounds=3, round_seconds=1e-3, layers=4, width=16)
ALPHA, OVERHEAD, BETA, FLOPS = 3e-5, 4e-6, 2.5e8, 5e9
START = {Routine.PRODUCT: 1e-6, Routine.EIGEN: 2e-5, Routine.CHOLESKY: 1e-5}
SPEED = {Routine.PRODUCT: FLOPS, Routine.EIGEN: FLOPS / 8, Routine.CHOLESKY: FLOPS / 2}


class Clock:
    """Stands still unless something is done."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


class MadeUp(Communicator):
    """Ranks that take just what the formulas at the top of `natgrad.placement.cluster` say."""

    def __init__(self, clock, size):
        super().__init__(0, size)
        self.clock, self.rounds = clock, math.ceil(math.log2(size))

    def _spend(self, start, nbytes):
        self.clock.spend(start + (self.size - 1) * nbytes / self.size / BETA)
        return Arrived(torch.zeros(1))

    def _exchange(self, send, sizes, receive, failure):
        return self._spend(ALPHA + OVERHEAD * (self.size - 2), send.nbytes)

    def _total(self, own, dtype, failure):
        self._reduce_scatter(own, failure)
        return self._reduce_scatter(own, failure)

    def _reduce_scatter(self, send, failure):
        return self._spend(ALPHA * self.rounds, send.nbytes)

    def _all_gather(self, send, failure):
        return self._spend(ALPHA * self.rounds, self.size * send.nbytes)

    def _split(self, ranks):
        raise NotImplementedError

    def _gather(self, value):
        return [value] * self.size


def kernels(clock):
    """A start, and then every matrix at a constant speed."""

    def kernel(routine):
        def made(dim, count, device):
            each = routine.operations(dim) / SPEED[routine]
            return lambda: clock.spend(START[routine] + count * each)

        return made

    return {routine: kernel(routine) for routine in Routine}


def calibrated(size):
    clock = Clock()
    comm = MadeUp(clock, size) if size > 1 else Alone()
    return calibrate(comm, CPU, SETTINGS, clock=clock, kernels=kernels(clock))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_known_links_are_recovered(size):
    found = calibrated(size)
    assert found.cluster.latency == pytest.approx(ALPHA, rel=1e-7)
    assert found.cluster.bandwidth == pytest.approx(BETA, rel=1e-7)
    if size == 2:
        assert found.cluster.overhead is None
    else:
        assert found.cluster.overhead == pytest.approx(OVERHEAD, rel=1e-7)
    assert found.residual < 1e-7
    assert len(found.collectives) == 4 * len(NBYTES)
    assert {one.ranks for one in found.collectives} == {size}


def test_known_speeds_are_recovered():
    cost = calibrated(1).cost
    for routine in Routine:
        table = cost.table(routine)
        assert table.sizes == SIZES
        each = [routine.operations(size) / SPEED[routine] for size in SIZES]
        assert table.first == pytest.approx([START[routine] + one for one in each], rel=1e-9)
        # A further one of many tiny matrices does not start anew, of larger ones each does.
        alone = [size > 32 for size in SIZES]
        expected = [one + START[routine] * a for one, a in zip(each, alone, strict=True)]
        assert table.further == pytest.approx(expected, rel=1e-6)
    largest = Routine.PRODUCT.operations(256)
    assert cost.flops == pytest.approx(largest / (START[Routine.PRODUCT] + largest / FLOPS))


def test_one_rank_has_no_links_to_measure():
    found = calibrated(1)
    assert found.collectives == ()
    assert found.cluster == Cluster(found.cost.flops)
    assert found.residual == 0


def test_the_circumstances():
    about = calibrated(4).measured
    assert (about.ranks, about.threads, about.device) == (4, torch.get_num_threads(), "cpu")
    assert about.torch == torch.__version__
    assert about.when.endswith("+00:00")


def test_everything_is_tracked():
    seen = []

    def track(items, what):
        seen.append((what, list(items)))
        return items

    clock = Clock()
    calibrate(MadeUp(clock, 2), CPU, SETTINGS, clock=clock, kernels=kernels(clock), track=track)
    ((what, items),) = seen
    assert what == "Measuring 2 ranks"
    each = 3 * (len(SIZES) + 2) + 4 * len(NBYTES)  # two sizes are measured for many matrices, too
    assert len(items) == 3 * each
    assert items[:each] == items[each : 2 * each]  # in turn
    assert len(set(items)) == each


class Uneven(Alone):
    """Another rank takes the given seconds a call."""

    def __init__(self, others):
        super().__init__()
        self.others = others

    def _gather(self, value):
        return [value, value if value is None else self.others.pop(0)]


def test_the_slowest_rank_counts():
    clock = Clock()
    timer = RankTimer(Uneven([9.0, 0.5]), clock)
    assert timer(lambda: clock.spend(1.0)) == 9.0
    assert timer(lambda: clock.spend(1.0)) == 1.0


class Crowded(Alone):
    """Two ranks on one core: the other one begins when this one has ended, and takes as long. Each
    by itself would seem to have the core alone."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.began = clock, None

    def _gather(self, value):
        self.clock.spend(0.125)  # what a meeting takes
        if value is None and self.began is not None:
            self.clock.spend(self.clock.now - self.began - 0.125)
            self.began = None
        return [value]


def test_ranks_that_share_a_core_are_measured_together():
    clock = Clock()
    comm = Crowded(clock)
    timer = RankTimer(comm, clock)
    assert timer.meeting == 0.125

    def call():
        comm.began = clock.now
        clock.spend(3.0)

    assert timer(call) == 6.0
    assert timer.repeats(call, 30.0) == 10  # as many as last that long by themselves


def test_passes_through_memory_are_found():
    """Steps that take just what the formulas at the top of `step_calibration` say."""
    carried, folded = Passing(8e-5, 4e-9), Passing(3e-5, 2e-9)
    cost = calibrated(1).cost
    cost = replace(cost, flops=1e15, carried=Passing(), folded=Passing())
    whole = replace(cost, carried=carried, folded=folded)

    def timed(step):
        kfac, updates = step.__self__, step.__self__.steps % 2 == 0
        step()
        blocks = kfac.plan.blocks
        factors = (spec for block in blocks for _, spec in block.factors)
        operations = sum(map(whole.precondition, blocks))
        return (operations + updates * sum(map(whole.fold, factors))) / cost.flops

    found = passing(timed, 2, 8, 600, cost, CPU)
    for one, true in zip(found, (carried, folded), strict=True):
        assert one.start == pytest.approx(true.start, rel=0.01)  # small layers have numbers as well
        assert one.each == pytest.approx(true.each, rel=0.01)
    assert passing(lambda step: step() or 0.0, 1, 2, 8, cost, CPU) == (Passing(), Passing())


def test_of_rounds_the_fastest_counts():
    """A computer that has other work during all rounds but one."""
    clock = Clock()
    quiet = kernels(clock)

    def disturbed(kernel):
        def made(dim, count, device):
            call, calls = kernel(dim, count, device), []

            def slower():
                calls.append(dim)
                call()
                if len(calls) != 4:  # two that do not count, a round, and this one
                    clock.spend(1.0)

            return slower

        return made

    busy = {routine: disturbed(kernel) for routine, kernel in quiet.items()}
    found = calibrate(Alone(), CPU, SETTINGS, clock=clock, kernels=busy)
    for routine in Routine:
        assert found.cost.table(routine).first == pytest.approx(
            calibrated(1).cost.table(routine).first, rel=1e-9
        )


def test_short_calls_are_repeated():
    clock, calls = Clock(), []

    def call():
        calls.append(clock.now)
        clock.spend(1e-4)

    timer = RankTimer(Alone(), clock)
    assert timer.repeats(call, 1e-3) == 10
    assert timer(call, 10) == pytest.approx(1e-4)
    assert len(calls) == 2 + 10
    assert timer.repeats(lambda: clock.spend(1.0), 1e-3) == 1
    assert timer.repeats(lambda: None, 1e-3) == 10_000  # at most


@pytest.mark.parametrize("name", ["sizes", "nbytes"])
@pytest.mark.parametrize("values", [(), (4, 2)])
def test_sizes_that_are_none(name, values):
    with pytest.raises(SettingError) as error:
        replace(SETTINGS, **{name: values})
    assert str(error.value) == (
        f"CalibrationSettings.{name} is {values!r} but must be at least one number, in increasing "
        "order: pass such a tuple."
    )


def test_other_settings():
    for name in ("rounds", "layers", "width"):
        with pytest.raises(SettingError, match=f"{name} is 0 but must be a whole number of at lea"):
            replace(SETTINGS, **{name: 0})
    with pytest.raises(SettingError, match="round_seconds is 0 but must be finite and above 0"):
        replace(SETTINGS, round_seconds=0)


def test_a_real_process_takes_longer_for_more():
    """Factors of eight or more between the sizes, so that no other program turns them around."""
    found = calibrate(Alone(), CPU, replace(SETTINGS, sizes=(8, 256)))
    for routine in Routine:
        small, large = found.cost.table(routine).first
        assert small < large


def real():
    return calibrate(connect(), CPU, replace(SETTINGS, sizes=(8, 64), nbytes=REAL))


@pytest.mark.distributed
def test_real_ranks_get_the_same_result(world):
    one, other = world.run(real, ranks=2)
    assert one == other
    assert one.measured.ranks == 2
    assert len(one.collectives) == 8
    assert one.cluster.bandwidth < 1e15
    small, large = (sum(c.seconds for c in one.collectives if c.nbytes == n) for n in REAL)
    assert small < large
