"""What every communicator must do, as functions that run on each of its ranks."""

import pytest
import torch

from natgrad.comm import Communicator, Traffic, float21
from natgrad.comm.transfers import in_flight
from natgrad.errors import SettingError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def size(source: int, target: int, seed: int = 0) -> int:
    """How many numbers ``source`` sends ``target``: uneven, not symmetric, and 0 now and then."""
    return 0 if (source + 2 * target + seed) % 4 == 0 else 3 * source + target + 1 + seed % 5


def piece(source: int, target: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Numbers that every dtype holds exactly and no two ranks share."""
    first = 50 * source + 11 * target + seed % 7
    return torch.arange(first, first + size(source, target, seed)).remainder(200).to(dtype)


def start(comm: Communicator, seed: int = 0, dtype=torch.float32, purpose: str = "numbers"):
    sent = [piece(comm.rank, other, seed, dtype) for other in range(comm.size)]
    return comm.exchange(
        torch.cat(sent),
        [len(one) for one in sent],
        [size(other, comm.rank, seed) for other in range(comm.size)],
        purpose,
    )


def check(comm: Communicator, received: torch.Tensor, seed: int = 0, dtype=torch.float32):
    expected = torch.cat([piece(other, comm.rank, seed, dtype) for other in range(comm.size)])
    assert received.dtype == dtype
    assert received.is_contiguous()
    assert torch.equal(received, expected), (comm.rank, received, expected)


def exchanges(comm: Communicator) -> None:
    for dtype in (*DTYPES, torch.uint8, torch.bool, torch.complex128):
        for seed in range(4):
            check(comm, start(comm, seed, dtype).wait(), seed, dtype)


def nothing_to_exchange(comm: Communicator) -> None:
    nothing = [0] * comm.size
    for dtype in DTYPES:
        received = comm.exchange(torch.empty(0, dtype=dtype), nothing, nothing, "nothing").wait()
        assert received.shape == (0,)
        assert received.dtype == dtype
    # One rank sends to itself and the next one alone.
    sizes = [0] * comm.size
    if comm.rank == 0:
        sizes[0] = sizes[1 % comm.size] = 2
    receive = [2 if comm.rank < 2 else 0] + [0] * (comm.size - 1)
    sent = torch.arange(float(sum(sizes)))
    received = comm.exchange(sent, sizes, receive, "some").wait().tolist()
    assert received == ([0, 1], [2, 3], [], [])[comm.rank]


def many_underway(comm: Communicator) -> None:
    """Thirty exchanges and sums at once, waited for out of order."""
    pending = [start(comm, seed) for seed in range(30)]
    sums = [comm.total(torch.full((5,), float(comm.rank + seed)), "sums") for seed in range(30)]
    for seed in reversed(range(30)):
        check(comm, pending[seed].wait(), seed)
        expected = sum(rank + seed for rank in range(comm.size))
        assert sums[seed].wait().tolist() == [expected] * 5


def totals(comm: Communicator) -> None:
    ranks = range(comm.size)
    for dtype in DTYPES:
        numbers = torch.tensor([1.0, 2.0, -3.0], dtype=dtype) * (comm.rank + 1)
        before = numbers.clone()
        result = comm.total(numbers, "numbers").wait()
        assert result.dtype == dtype
        assert result.tolist() == [sum((rank + 1) * n for rank in ranks) for n in (1, 2, -3)]
        assert torch.equal(numbers, before)
        result.zero_()  # a tensor of its own
        assert torch.equal(numbers, before)
    assert comm.total(torch.empty(0), "none").wait().shape == (0,)
    large = 2**53 + 1  # float64 cannot hold it
    assert comm.total(torch.tensor([large]), "count").wait().item() == large * comm.size


def sums_of_16_bit_numbers(comm: Communicator) -> None:
    """In bfloat16, 256 + 1 = 256: four ranks' 256 + 1 + 1 + 2 = 260 would be lost."""
    mine = torch.tensor([[256.0, 1.0, 1.0, 2.0][comm.rank]], dtype=torch.bfloat16)
    expected = sum([256.0, 1.0, 1.0, 2.0][: comm.size])
    result = comm.total(mine, "numbers").wait()
    assert result.dtype == torch.bfloat16
    assert result.item() == torch.tensor(expected).bfloat16().item()
    assert comm.traffic.sent["numbers"] == 2 * (comm.size - 1) * 4 / comm.size


def slice_of(source: int, target: int, dtype=torch.float32) -> torch.Tensor:
    """Three numbers that every dtype holds exactly."""
    return torch.tensor([1 + source, 7 * target, source - 2 * target]).to(dtype)


def reduce_scatters(comm: Communicator) -> None:
    ranks = range(comm.size)
    for dtype in DTYPES:
        send = torch.cat([slice_of(comm.rank, other, dtype) for other in ranks])
        before = send.clone()
        result = comm.reduce_scatter(send, "slices").wait()
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        assert result.dtype == wide
        expected = sum(slice_of(other, comm.rank, wide) for other in ranks)
        assert torch.equal(result, expected), (comm.rank, dtype, result, expected)
        result.zero_()  # a tensor of its own
        assert torch.equal(send, before)
    assert comm.reduce_scatter(torch.empty(0), "none").wait().shape == (0,)


def even_sums_of_16_bit_numbers(comm: Communicator) -> None:
    """In bfloat16, 256 + 1 = 256."""
    mine = torch.full((comm.size,), [256.0, 1.0, 1.0, 2.0][comm.rank], dtype=torch.bfloat16)
    result = comm.reduce_scatter(mine, "numbers").wait()
    assert result.tolist() == [sum([256.0, 1.0, 1.0, 2.0][: comm.size])]
    assert comm.traffic.sent["numbers"] == 2 * (comm.size - 1)


def even_sums_of_21_bit_numbers(comm: Communicator) -> None:
    """Slices of four numbers, two words each; in 21 bits, 8192 + 1 = 8192."""
    mine = torch.tensor([8192.0, 1.0, 1.0, 2.0])[comm.rank] + torch.zeros(4 * comm.size)
    mine[1::4], mine[2::4] = 1 + 2.0**-20, torch.arange(float(comm.size))
    before = mine.clone()
    result = comm.reduce_scatter(mine, "numbers", float21).wait()
    expected = sum([8192.0, 1.0, 1.0, 2.0][: comm.size])
    assert result.dtype == torch.float32
    assert result.tolist() == [expected, comm.size, comm.size * comm.rank, expected]
    assert comm.traffic.sent["numbers"] == 2 * 8 * (comm.size - 1)
    assert torch.equal(mine, before)
    assert comm.reduce_scatter(torch.empty(0), "none", float21).wait().shape == (0,)


def all_gathers(comm: Communicator) -> None:
    for dtype in (*DTYPES, torch.uint8, torch.bool, torch.complex128):
        mine = slice_of(comm.rank, 1, torch.int64).to(dtype)
        result = comm.all_gather(mine, "slices").wait()
        expected = [slice_of(other, 1, torch.int64).to(dtype) for other in range(comm.size)]
        assert torch.equal(result, torch.cat(expected))
        assert result.dtype == dtype
        result.zero_()  # a tensor of its own
        assert torch.equal(mine, slice_of(comm.rank, 1, torch.int64).to(dtype))
    assert comm.all_gather(torch.empty(0), "none").wait().shape == (0,)


def even_slices_underway(comm: Communicator) -> None:
    """Twenty of each at once, among exchanges."""
    ranks = range(comm.size)
    pending = []
    for seed in range(20):
        send = torch.arange(2.0 * comm.size) + seed * (comm.rank + 1)
        pending.append(
            (
                comm.reduce_scatter(send, "a"),
                start(comm, seed),
                comm.all_gather(torch.tensor([float(seed), comm.rank]), "b"),
            )
        )
    for seed, (summed, exchanged, gathered) in enumerate(pending):
        more = sum(seed * (rank + 1) for rank in ranks)
        expected = [comm.size * (2.0 * comm.rank + i) + more for i in (0, 1)]
        assert summed.wait().tolist() == expected
        check(comm, exchanged.wait(), seed)
        assert gathered.wait().view(-1, 2).tolist() == [[seed, rank] for rank in ranks]


def splits(comm: Communicator) -> None:
    """Odd and even ranks, then each by itself, then all; and the first ones once more."""
    for parts in (
        [range(0, comm.size, 2), range(1, comm.size, 2)],
        [range(rank, rank + 1) for rank in range(comm.size)],
        [range(comm.size)],
        [range(0, comm.size, 2), *(range(rank, rank + 1) for rank in range(1, comm.size, 2))],
    ):
        (own,) = (part for part in parts if comm.rank in part)
        part = comm.split(own)
        assert (part.rank, part.size) == (own.index(comm.rank), len(own))
        before = comm.traffic.snapshot()
        assert part.all_gather(torch.tensor([comm.rank]), "part").wait().tolist() == list(own)
        assert (comm.traffic - before).sent == {"part": 8 * (len(own) - 1)}
        assert part.total(torch.tensor([1.0]), "part").wait().item() == len(own)
        assert part.gather(comm.rank) == list(own)
        assert comm.total(torch.ones(1), "all").wait().item() == comm.size


def gathers(comm: Communicator) -> None:
    assert comm.gather({"rank": comm.rank, "text": "é" * comm.rank}) == [
        {"rank": rank, "text": "é" * rank} for rank in range(comm.size)
    ]


def waits_twice(comm: Communicator) -> None:
    pending = start(comm)
    first = pending.wait()
    assert pending.wait() is first
    check(comm, first)
    pending = comm.total(torch.ones(2, dtype=torch.bfloat16), "sum")
    assert pending.wait() is pending.wait()


def gradients_are_not_followed(comm: Communicator) -> None:
    numbers = torch.ones(comm.size, requires_grad=True)
    ones = [1] * comm.size
    assert not comm.exchange(numbers, ones, ones, "ones").wait().requires_grad
    assert not comm.total(numbers, "ones").wait().requires_grad
    assert not comm.reduce_scatter(numbers, "ones").wait().requires_grad
    assert not comm.all_gather(numbers, "ones").wait().requires_grad


def dropped(comm: Communicator) -> None:
    """Nobody waits for rank 0's messages, and their memory is asked for again at once."""
    n = 200_000
    sizes = [n] * comm.size
    pending = []
    for k in range(8):
        send = torch.full((n * comm.size,), float(10 * k + comm.rank))
        sent = comm.exchange(send, sizes, sizes, "large")
        summed = comm.total(send, "large")
        if comm.rank:
            pending.append((sent, summed))
        del send, sent, summed
        if comm.rank == 0:
            for _ in range(4):
                torch.full((n * comm.size,), -1.0)
    for k, (sent, summed) in enumerate(pending):
        expected = torch.arange(comm.size).repeat_interleave(n) + 10 * k
        assert torch.equal(sent.wait(), expected.float())
        total = sum(10 * k + rank for rank in range(comm.size))
        assert torch.equal(summed.wait(), torch.full((n * comm.size,), float(total)))
    for _ in range(100):  # every message looks for those that have arrived
        start(comm).wait()
    assert in_flight() == 0


def counts(comm: Communicator) -> None:
    others = [other for other in range(comm.size) if other != comm.rank]
    start(comm, 1, torch.float64, "a").wait()
    first = sum(size(comm.rank, other, 1) for other in others) * 8
    assert comm.traffic == Traffic({"a": first}, {"a": 1})
    before = comm.traffic.snapshot()
    start(comm, 2, torch.bfloat16, "a").wait()
    second = sum(size(comm.rank, other, 2) for other in others) * 2
    comm.total(torch.ones(7, dtype=torch.float64), "b").wait()
    comm.gather("not counted")
    ring = 2 * len(others) * 56 / comm.size
    assert comm.traffic == Traffic({"a": first + second, "b": ring}, {"a": 2, "b": 1})
    assert comm.traffic - before == Traffic({"a": second, "b": ring}, {"a": 1, "b": 1})
    assert comm.traffic.total() == first + second + ring


def says(message: str, call, *args) -> None:
    """The whole message, word by word; nothing was sent, so no rank waits for another."""
    with pytest.raises(SettingError) as error:
        call(*args)
    assert str(error.value) == message


def mistakes(comm: Communicator) -> None:
    matrix, sizes = torch.ones(2, 3), [2] * comm.size
    remedy = "but must be flat and contiguous: pass numbers.contiguous().flatten()."
    says(
        f"exchange of 'x': the numbers have shape (2, 3) and strides (3, 1) {remedy}",
        *(comm.exchange, matrix, sizes, sizes, "x"),
    )
    says(
        f"total of 'x': the numbers have shape (2,) and strides (3,) {remedy}",
        *(comm.total, matrix[:, 0], "x"),
    )
    says(
        f"exchange of 'x': sizes is [] but must be {comm.size} numbers of at least 0, one for "
        "each rank.",
        *(comm.exchange, torch.ones(2), [], sizes, "x"),
    )
    negative = [-1] * comm.size
    says(
        f"exchange of 'x': receive is {negative} but must be {comm.size} numbers of at least 0, "
        "one for each rank.",
        *(comm.exchange, torch.ones(2 * comm.size), sizes, negative, "x"),
    )
    says(
        f"exchange of 'x': sizes is {sizes}, {2 * comm.size} numbers in all, but send has 1: give "
        "the size of every rank's piece of it.",
        *(comm.exchange, torch.ones(1), sizes, sizes, "x"),
    )
    says(
        f"exchange of 'x': rank {comm.rank} sends itself 2 numbers but receives 3 from itself: "
        "give the same number.",
        *(comm.exchange, torch.ones(2 * comm.size), sizes, [3] * comm.size, "x"),
    )
    says(
        "total of 'x': the numbers are torch.bool but must be one of torch.float64, "
        "torch.float32, torch.bfloat16, torch.float16, torch.int64: convert them.",
        *(comm.total, torch.ones(2, dtype=torch.bool), "x"),
    )
    for method in ("reduce_scatter", "all_gather"):
        says(
            f"{method} of 'x': the numbers have shape (2, 3) and strides (3, 1) {remedy}",
            *(getattr(comm, method), matrix, "x"),
        )
    says(
        "reduce_scatter of 'x': the numbers are torch.bool but must be one of torch.float64, "
        "torch.float32, torch.bfloat16, torch.float16, torch.int64: convert them.",
        *(comm.reduce_scatter, torch.ones(comm.size, dtype=torch.bool), "x"),
    )
    if comm.size > 1:
        says(
            f"reduce_scatter of 'x': the {comm.size + 1} numbers do not make {comm.size} slices of "
            "one length: add zeros at the end.",
            *(comm.reduce_scatter, torch.ones(comm.size + 1), "x"),
        )
    for ranks in ([], [comm.rank, comm.size], [comm.rank, comm.rank], [comm.rank + 1]):
        says(
            f"split({ranks}) was called by rank {comm.rank} of {comm.size}: give different ranks "
            "in increasing order, with that of the caller.",
            *(comm.split, ranks),
        )
    assert comm.traffic == Traffic()


CONTRACT = [
    exchanges,
    nothing_to_exchange,
    many_underway,
    totals,
    sums_of_16_bit_numbers,
    gathers,
    waits_twice,
    reduce_scatters,
    even_sums_of_16_bit_numbers,
    even_sums_of_21_bit_numbers,
    all_gathers,
    even_slices_underway,
    splits,
    gradients_are_not_followed,
    dropped,
    counts,
    mistakes,
]


def by_name(checks=CONTRACT):
    """For `World.each`, by which ranks that are started once make all checks."""
    return {check.__name__: (check,) for check in checks}
