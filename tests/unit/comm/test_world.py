"""The tests' own world: what ranks return and raise arrives, and nothing stays behind."""

import os
import time
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

from distributed.world import RankError
from natgrad.errors import SettingError

pytestmark = pytest.mark.distributed


def hello(text, *, twice=False):
    return f"{text} {dist.get_rank()} of {dist.get_world_size()}" * (1 + twice)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results(world, ranks):
    assert world.run(hello, "rank", ranks=ranks) == [f"rank {r} of {ranks}" for r in range(ranks)]


def large_tensor(numbers):
    return numbers + dist.get_rank()


def test_large_arguments_and_results(world):
    results = world.run(large_tensor, torch.zeros(3_000_000), ranks=2)
    for rank, result in enumerate(results):
        assert torch.equal(result, torch.full((3_000_000,), float(rank)))


def drawn(text, problem):
    if problem is not None:
        raise problem
    return hello(text), torch.rand(1).item()


def test_calls_that_share_their_ranks(world):
    found = world.each(drawn, {"a": ("one", None), 7: ("two", None)}, ranks=2)
    assert list(found) == ["a", 7]
    for name, text in (("a", "one"), (7, "two")):
        assert [answer for answer, _ in found[name]] == [f"{text} 0 of 2", f"{text} 1 of 2"]
    assert len({number for answers in found.values() for _, number in answers}) == 1


def test_a_shared_call_that_fails_is_named(world):
    with pytest.raises(ZeroDivisionError) as error:
        world.each(drawn, {"a": ("", None), "b": ("", ZeroDivisionError("no"))}, ranks=2)
    assert error.value.__notes__ == ["in the call named 'b'"]


class Named:
    """Pickled by reference to this module, whose name only pytest can resolve."""

    def __init__(self, number):
        self.number = number


def through(function, named):
    return function, Named(named.number + dist.get_rank())


def test_what_test_modules_define_travels(world):
    for rank, (function, named) in enumerate(world.run(through, hello, Named(3), ranks=2)):
        assert function is hello
        assert named.number == 3 + rank


def state():
    """What a call must find as it is when a process starts; it then changes all of it."""
    found = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.initial_seed(),
        torch.is_grad_enabled(),
        torch.rand(1).item(),
        numpy.random.rand(),
        len(dist.distributed_c10d._world.pg_names),
        os.environ.get("NATGRAD_WORLD"),
    )
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.manual_seed(5)
    dist.new_group([0])
    os.environ["NATGRAD_WORLD"] = "changed"
    return found


def test_calls_do_not_change_each_other(world):
    first, again = world.run(state, ranks=2)
    assert first == again
    assert first[:4] == (torch.float32, 1, 0, True)
    assert first[6:] == (1, None)
    assert world.run(state, ranks=2) == [first, first]


def fails_on(rank):
    if dist.get_rank() == rank:
        raise SettingError(f"on rank {rank}")
    dist.barrier()  # hangs without the other rank


def test_what_a_rank_raises_is_raised(world):
    began = time.monotonic()
    with pytest.raises(SettingError, match="on rank 1") as error:
        world.run(fails_on, 1, ranks=3)
    assert time.monotonic() - began < 60
    where = str(error.value.__cause__)
    assert "Rank 1:\nTraceback" in where
    assert "in fails_on" in where
    assert "Rank 0" not in where
    assert world.run(hello, "after", ranks=2) == ["after 0 of 2", "after 1 of 2"]


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raises_oddly():
    raise OddError("this", "that")


def returns_oddly():
    return lambda: 0


def warns():
    warnings.warn("careful", DeprecationWarning, stacklevel=1)


def skips():
    pytest.skip("not here")


def exits():
    os._exit(3)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (raises_oddly, RankError, "OddError: this and that"),
        (returns_oddly, RankError, r"Rank \d cannot pickle what it returns: .*lambda"),
        (warns, DeprecationWarning, "careful"),
        (skips, pytest.skip.Exception, "not here"),
        (exits, RankError, r"Rank \d ended with code 3 in exits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_failures(world, function, kind, message):
    with pytest.raises(kind, match=message):
        world.run(function, ranks=2)


def sleeps():
    if dist.get_rank() == 1:
        time.sleep(1000)
    return os.getpid()


def test_timeout(world):
    with pytest.raises(RankError) as error:
        world.run(sleeps, ranks=2, timeout=3)
    message = str(error.value)
    assert message.startswith("Ranks [1] did not finish sleeps within 3 s.\nRank 1:\n")
    assert "in sleeps" in message
    assert not world.processes


def pid():
    return os.getpid()


def test_nothing_stays_behind(world):
    for number in world.run(pid, ranks=3):
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
    assert world.processes == []


def test_the_lost_may_die(world):
    assert world.run(dies_on_1, ranks=2, lost=[1]) == ["alive", None]


def dies_on_1():
    if dist.get_rank() == 1:
        os._exit(9)
    return "alive"
