"""One process, and the counting of bytes."""

import pickle

import pytest
import torch

from natgrad.comm import Alone, CommunicationError, Traffic, connect
from natgrad.errors import NatgradError
from unit.comm.contract import CONTRACT


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check):
    check(Alone())


def test_rank_and_size():
    comm = Alone()
    assert (comm.rank, comm.size, comm.ranks) == (0, 1, (0,))


def test_what_arrives_is_a_copy():
    send = torch.ones(3)
    Alone().exchange(send, [3], [3], "ones").wait().zero_()
    assert send.tolist() == [1, 1, 1]


def test_without_other_processes_everyone_is_alone():
    assert isinstance(connect(), Alone)


def test_a_communicator_is_taken_as_it_is():
    comm = Alone()
    assert connect(comm) is comm


def test_error_kind():
    assert issubclass(CommunicationError, NatgradError)
    assert issubclass(CommunicationError, RuntimeError)


class TestTraffic:
    def test_counts_by_purpose(self):
        traffic = Traffic()
        for purpose, nbytes in [("factors", 10), ("inverses", 4), ("factors", 2.5)]:
            traffic.count(purpose, nbytes)
        assert traffic.sent == {"factors": 12.5, "inverses": 4}
        assert traffic.calls == {"factors": 2, "inverses": 1}
        assert traffic.total() == 16.5

    def test_since_a_snapshot(self):
        traffic = Traffic({"factors": 10, "inverses": 4}, {"factors": 1, "inverses": 1})
        before = traffic.snapshot()
        traffic.count("factors", 5)
        traffic.count("gradients", 0)
        assert before == Traffic({"factors": 10, "inverses": 4}, {"factors": 1, "inverses": 1})
        since = traffic - before
        assert since == Traffic({"factors": 5, "gradients": 0}, {"factors": 1, "gradients": 1})

    def test_is_plain_data(self):
        traffic = Traffic({"factors": 1.5}, {"factors": 1})
        assert pickle.loads(pickle.dumps(traffic)) == traffic
