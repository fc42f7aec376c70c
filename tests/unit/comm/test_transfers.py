"""Transfers in flight: they keep their buffers until the backend is done, and no longer."""

import gc
import weakref

import pytest
import torch

from natgrad.comm import CommunicationError
from natgrad.comm.transfers import Transfer, in_flight


class ByHand(Transfer):
    """Arrives when it is told to."""

    def __init__(self, *args, error=None):
        self.done, self.finished, self.error = False, 0, error
        super().__init__(*args)

    def _arrived(self):
        return self.done

    def _finish(self):
        self.finished += 1
        if self.error is not None:
            raise self.error
        self.done = True


@pytest.fixture(autouse=True)
def _nothing_of_other_tests():
    """A new transfer lets go of those that have arrived, also of earlier tests' in this process."""
    ByHand(torch.empty(1), torch.float32, "Rank 0 of 2 could not exchange 'x'").wait()


def test_it_is_waited_for_once_and_converted():
    before = in_flight()
    transfer = ByHand(torch.arange(3), torch.float64, "Rank 0 of 2 could not exchange 'x'")
    assert in_flight() == before + 1
    assert not transfer.arrived()
    found = transfer.wait()
    assert found.dtype == torch.float64
    assert found.tolist() == [0.0, 1.0, 2.0]
    assert transfer.wait() is found
    assert transfer.finished == 1
    assert transfer.arrived()
    assert in_flight() == before


def test_what_nobody_waits_for_lives_until_it_has_arrived():
    before, buffer = in_flight(), torch.ones(2)
    transfer = ByHand(torch.empty(2), torch.float32, "Rank 0 of 2 could not exchange 'x'", buffer)
    held, alive = weakref.ref(transfer), weakref.ref(buffer)
    del transfer, buffer
    gc.collect()
    assert held() is not None
    assert alive() is not None
    held().done = True
    assert held().arrived()
    ByHand(torch.empty(2), torch.float32, "Rank 0 of 2 could not exchange 'y'").wait()
    gc.collect()
    assert held() is None
    assert alive() is None
    assert in_flight() == before


def test_what_has_failed_says_so_every_time():
    transfer = ByHand(
        torch.empty(2),
        torch.float32,
        "Rank 0 of 2 could not exchange 'x'",
        error=RuntimeError("connection reset\nby peer"),
    )
    for _ in range(2):
        with pytest.raises(CommunicationError, match="Rank 0 of 2 could not exchange 'x'") as error:
            transfer.wait()
        assert "connection reset" in str(error.value)
    assert transfer.finished == 1
    assert transfer.arrived()
    before = in_flight()
    transfer.done = True  # the next one lets it go
    ByHand(torch.empty(1), torch.float32, "Rank 0 of 2 could not exchange 'y'").wait()
    assert in_flight() == before - 1
