"""Calls side by side, one thread each."""

import threading

import pytest
import torch

from natgrad.linalg import threads as side_by_side


def spread(calls):
    return list(side_by_side.spread(calls))


def of_a_new_thread():
    """How many threads torch uses there: as many as were last set, by whichever thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_are_in_order(threads):
    for count in (0, 1, 2, 7):
        assert spread([lambda i=i: i * i for i in range(count)]) == [i * i for i in range(count)]
    assert torch.get_num_threads() == of_a_new_thread() == threads


def test_as_many_at_a_time_as_torch_has_threads(threads):
    together = threading.Barrier(threads, timeout=20)  # breaks unless all of them are there
    assert spread([together.wait] * threads) != []
    running, most, lock = 0, 0, threading.Lock()
    done = threading.Event()

    def call():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        done.wait(0.01)
        with lock:
            running -= 1

    spread([call] * 9)
    assert most == threads


def test_each_has_one_thread_and_records_no_gradient(threads):
    x = torch.ones(3, requires_grad=True)

    def call():
        return torch.get_num_threads(), (2 * x).requires_grad, torch.is_grad_enabled()

    assert spread([call] * 4) == [(1, False, False)] * 4
    assert spread([call]) == [(threads, False, False)]
    assert torch.is_grad_enabled()


def test_no_more_than_memory_allows(threads, monkeypatch):
    monkeypatch.setattr(side_by_side, "_WORKERS", 1)
    assert spread([torch.get_num_threads] * 3) == [threads] * 3


def test_nothing_stays_behind_when_nobody_wants_the_rest(threads):
    results = side_by_side.spread([lambda i=i: i for i in range(50)])
    assert next(results) == 0
    results.close()
    assert torch.get_num_threads() == threads
    assert not [t for t in threading.enumerate() if t.name.startswith("natgrad")]


def test_an_error_arrives_and_the_threads_come_back(threads):
    def fail():
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError, match="no"):
        spread([lambda: 1, fail, lambda: 2])
    assert torch.get_num_threads() == of_a_new_thread() == threads
    assert not [t for t in threading.enumerate() if t.name.startswith("natgrad")]
