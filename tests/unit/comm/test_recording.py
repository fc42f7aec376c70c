"""Recording: a communicator like the one it wraps, with times that agree with what happened."""

import time

import torch

from natgrad.comm import Alone, ProcessGroups
from natgrad.comm.recording import MessageTimes, Recording
from unit.comm.contract import by_name, start

LATE = 0.4  # seconds


def recorded(function):
    comm = Recording(ProcessGroups())
    assert comm.ranks == comm.inner.ranks
    function(comm)


def test_contract(world):
    world.each(recorded, by_name(), ranks=3)


def one_is_late() -> list[MessageTimes]:
    """Rank 1 sends 0.4 s after the others, and nobody waits until everything has arrived."""
    comm = Recording(ProcessGroups())
    comm.gather("start together")
    if comm.rank == 1:
        time.sleep(LATE)
    sizes = [comm.rank + 1] * comm.size
    receive = [rank + 1 for rank in range(comm.size)]
    pending = [
        comm.exchange(torch.zeros(sum(sizes)), sizes, receive, "factors"),
        comm.total(torch.zeros(6, dtype=torch.float64), "agreement"),
    ]
    comm.gather("all have sent")
    time.sleep(LATE)
    for one in pending:
        one.wait()
    return comm.messages


def test_times_are_those_of_departure_and_arrival(world):
    for rank, (exchange, total) in enumerate(world.run(one_is_late, ranks=3)):
        assert (exchange.kind, exchange.purpose) == ("exchange", "factors")
        assert (total.kind, total.purpose) == ("total", "agreement")
        assert exchange.sent == 2 * (rank + 1) * 4
        assert exchange.received == 4 * (6 - (rank + 1))
        assert total.sent == total.received == 2 * 2 * 48 / 3
        for message in (exchange, total):
            ((begin, end),) = message.waits
            assert message.launched <= message.left <= message.arrived < begin <= end
            seconds = (message.arrived - message.launched) / 1e9
            if rank != 1:
                assert seconds > 0.5 * LATE  # on its way until rank 1 had sent


def test_processes_share_a_clock(world):
    """What the late rank sends last leaves before it arrives anywhere."""
    exchanges = [messages[0] for messages in world.run(one_is_late, ranks=3)]
    assert exchanges[1].launched == max(message.launched for message in exchanges)
    assert all(message.arrived > exchanges[1].launched for message in exchanges)


def test_a_backend_that_does_not_tell():
    """Arrival is then found out by the first wait, and a second one changes nothing."""
    comm = Recording(Alone())
    pending = start(comm)
    (message,) = comm.messages
    assert (message.sent, message.received, message.arrived) == (0, 0, None)
    pending.wait()
    arrived = message.arrived
    assert message.waits[0][0] <= arrived <= message.waits[0][1]
    pending.wait()
    assert (message.arrived, len(message.waits)) == (arrived, 2)


def test_traffic_is_counted_once():
    inner = Alone()
    comm = Recording(inner)
    start(comm, purpose="a").wait()
    comm.total(torch.ones(3), "b").wait()
    assert comm.traffic is inner.traffic
    assert comm.traffic.calls == {"a": 1, "b": 1}
    assert [message.purpose for message in comm.messages] == ["a", "b"]
