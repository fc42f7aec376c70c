"""Ranks that fail together also leave together."""

import pytest

from natgrad.comm import Alone, torchrun
from natgrad.comm.agreement import raise_on_all_ranks
from natgrad.errors import DataError


def fails():
    raise DataError("There are no data: bring some.")


def test_what_goes_well_is_returned():
    assert raise_on_all_ranks(Alone(), lambda: 3) == 3


@pytest.mark.parametrize("of_all", [True, False])
def test_processes_leave_in_order_after_an_error_of_all(monkeypatch, of_all):
    """One that ends without may be aborted by gloo, which hides its exit code."""
    left = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(torchrun, "initialised", lambda: False)
    monkeypatch.setattr(torchrun.dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(torchrun, "connect", Alone)
    monkeypatch.setattr(torchrun, "destroy_group", lambda: left.append(True))
    with (
        pytest.raises(DataError, match=r"^There are no data: bring some\.$"),
        torchrun.joined() as (comm, _),
    ):
        raise_on_all_ranks(comm, fails) if of_all else fails()
    assert left == [True] * of_all
