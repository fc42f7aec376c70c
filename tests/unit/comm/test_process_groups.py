"""torch.distributed: the contract on 1 to 4 ranks, sub-groups and meshes, and peers that fail."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import natgrad.comm.process_groups as module
from natgrad.comm import CommunicationError, ProcessGroups, TwoLevels, connect, float21
from natgrad.errors import SettingError
from unit.comm.contract import (
    CONTRACT,
    by_name,
    check,
    even_slices_underway,
    even_sums_of_16_bit_numbers,
    even_sums_of_21_bit_numbers,
    reduce_scatters,
    start,
)

pytestmark = pytest.mark.distributed


def with_default_group(function):
    comm = connect()
    assert isinstance(comm, ProcessGroups)
    assert (comm.rank, comm.size) == (dist.get_rank(), dist.get_world_size())
    function(comm)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_contract(world, ranks):
    world.each(with_default_group, by_name(), ranks=ranks)


def in_two_levels(function):
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2))
    comm = connect(mesh)
    assert isinstance(comm, TwoLevels) == (size > 2)
    assert (comm.rank, comm.size, comm.ranks) == (rank, size, tuple(range(size)))
    function(comm)


@pytest.mark.parametrize("ranks", [2, 4])
def test_contract_of_two_levels(world, ranks):
    """But for sums that are rounded between the two."""
    rounded = (even_sums_of_16_bit_numbers, even_sums_of_21_bit_numbers)
    world.each(in_two_levels, by_name([f for f in CONTRACT if f not in rounded]), ranks=ranks)


def rounded_between_nodes(comm):
    """In bfloat16 257 is 256: 256 + 1 of one node is rounded, and then 3 of the other added."""
    mine = torch.full((comm.size,), [256.0, 1.0, 1.0, 2.0][comm.rank], dtype=torch.bfloat16)
    assert comm.reduce_scatter(mine, "numbers").wait().tolist() == [259.0]
    # Of 21 bits 8193 is 8192; slices of two words each, as many as in one level.
    mine = torch.tensor([8192.0, 1.0, 1.0, 2.0])[comm.rank] + torch.zeros(4 * comm.size)
    mine[1::4] = torch.arange(float(comm.size))
    found = comm.reduce_scatter(mine, "of 21 bits", float21).wait()
    assert found.tolist() == [8195.0, 4.0 * comm.rank, 8195.0, 8195.0]
    assert comm.traffic.sent["of 21 bits"] == 2 * 8 * (comm.size - 1)
    assert comm.traffic.sent["numbers"] == 2 * (comm.size - 1)


def test_sums_of_a_node_are_rounded_before_they_leave_it(world):
    world.run(in_two_levels, rounded_between_nodes, ranks=4)


def with_stock_collectives(function):
    """As on a device whose backend adds up well, which here is gloo all the same."""
    comm = connect()
    comm._backend_of = lambda numbers: "nccl"
    function(comm)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_contract_of_stock_reduce_scatters(world, ranks):
    some = (reduce_scatters, even_sums_of_16_bit_numbers, even_slices_underway)
    world.each(with_stock_collectives, by_name(some), ranks=ranks)


def three_of_a_node():
    with pytest.raises(SettingError) as error:
        TwoLevels(connect(), 2)
    return str(error.value)


def test_nodes_must_divide_the_ranks(world):
    says = (
        "TwoLevels.node is 2 but must divide the 3 ranks: give the number of ranks in each node, "
        "the same in all of them."
    )
    assert world.run(three_of_a_node, ranks=3) == [says] * 3


def talk(comm):
    """What a communicator says of itself, after a few messages that arrive."""
    for seed in range(3):
        check(comm, start(comm, seed).wait(), seed)
    assert comm.total(torch.ones(2), "ones").wait().tolist() == [comm.size] * 2
    return comm.rank, comm.gather(dist.get_rank()), comm.ranks


class TestSubGroups:
    def test_some_ranks(self, world):
        """Rank 1 never hears of the group of ranks 0 and 2."""
        assert world.run(ranks_0_and_2, ranks=3) == [(0, [0, 2], (0, 2)), 7, (1, [0, 2], (0, 2))]

    def test_stages(self, world):
        """Disjoint groups that other ranks neither know nor wait for, as in a pipeline."""
        first, second = (0, [0, 1], (0, 1)), (1, [0, 1], (0, 1))
        third, fourth = (0, [2, 3], (2, 3)), (1, [2, 3], (2, 3))
        assert world.run(stages, ranks=4) == [first, second, third, fourth]

    def test_overlapping(self, world):
        """Ranks that know different numbers of groups find each other all the same."""
        assert world.run(overlapping, ranks=3, timeout=30) == [
            [(0, [0, 2], (0, 2)), (0, [0, 1], (0, 1)), (0, [0, 1, 2], (0, 1, 2))],
            [(1, [0, 1], (0, 1)), (1, [0, 1, 2], (0, 1, 2))],
            [(1, [0, 2], (0, 2)), (2, [0, 1, 2], (0, 1, 2))],
        ]

    def test_not_a_member(self, world):
        world.run(not_a_member, ranks=2)

    def test_messages_do_not_interleave(self, world):
        world.run(beside_other_collectives, ranks=3)

    def test_one_private_group_for_all(self, world):
        world.run(made_often, ranks=2)

    def test_a_part_of_one_needs_no_group(self, world):
        """It has nobody to talk to, but takes part in making those of the others."""
        assert world.run(parts_of_two_and_one, ranks=3) == [(2, True), (2, True), (None, True)]

    def test_a_new_default_group(self, world, tmp_path):
        world.run(started_again, str(tmp_path / "store"), ranks=2)

    def test_timeout_and_backend_are_the_group_s(self, world):
        world.run(kind_of_group, ranks=2)


def parts_of_two_and_one():
    """How many are in this rank's part, and whether it is the same group when it is asked again."""
    ranks = (2,) if dist.get_rank() == 2 else (0, 1)
    part, again = (module._part_of(dist.group.WORLD, ranks) for _ in range(2))
    return None if part is None else part.size(), part is again


def ranks_0_and_2():
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return 7
    return talk(ProcessGroups(group))


def stages():
    rank = dist.get_rank()
    ranks = [0, 1] if rank < 2 else [2, 3]
    group = dist.new_group(ranks, use_local_synchronization=True)
    return talk(ProcessGroups(group))


def overlapping():
    rank, said = dist.get_rank(), []
    for ranks in ([0, 2], [0, 1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            said.append(talk(ProcessGroups(group)))
    return [*said, talk(ProcessGroups())]


def not_a_member():
    group = dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("one", "two"))
    if dist.get_rank() == 1:
        with pytest.raises(SettingError) as error:
            ProcessGroups(group)
        assert str(error.value) == (
            "Process 1 is not part of the process group it was given: pass its own one, or leave "
            "it out there."
        )
    other = dist.device_mesh.DeviceMesh("cpu", [0])
    if dist.get_rank() == 1:
        with pytest.raises(SettingError, match="Process 1 is not part of the device mesh it was"):
            ProcessGroups(other)
    assert ProcessGroups(mesh["one"]).size == 2
    assert ProcessGroups(mesh["two"]).size == 1


def beside_other_collectives():
    """The ranks order their own collectives and the communicator's differently."""
    comm, rank = ProcessGroups(), dist.get_rank()
    theirs = torch.full((1000,), float(rank))
    if rank % 2:
        pending, work = start(comm), dist.all_reduce(theirs, async_op=True)
    else:
        work, pending = dist.all_reduce(theirs, async_op=True), start(comm)
    work.wait()
    check(comm, pending.wait())
    assert theirs.tolist() == [3.0] * 1000


def made_often():
    first, second = ProcessGroups(), ProcessGroups()
    known = len(dist.distributed_c10d._world.pg_names)
    for _ in range(5):
        talk(ProcessGroups(dist.group.WORLD))
    assert len(dist.distributed_c10d._world.pg_names) == known
    start(first).wait()
    assert first.traffic.total() > 0
    assert second.traffic.total() == 0


def started_again(path):
    """The private groups of a default group that was destroyed are of no use to the next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    talk(ProcessGroups())
    dist.barrier()
    dist.destroy_process_group()
    assert not module._private
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    talk(ProcessGroups())


def kind_of_group():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=17))
    private = ProcessGroups(group)._group
    assert private is not group
    assert private._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=17)
    assert dist.get_backend(private) == "gloo"
    other = dist.new_group([0, 1], timeout=timedelta(seconds=18), backend="cpu:gloo")
    private = ProcessGroups(other)._group
    assert private._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=18)
    assert dist.get_backend(private) == "cpu:gloo"


class TestMeshes:
    def test_two_dimensions(self, world):
        rows, columns = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
        for rank, (whole, row, column) in enumerate(world.run(meshes, ranks=4)):
            assert whole == (rank, [0, 1, 2, 3], (0, 1, 2, 3))
            mine = rows[rank // 2]
            assert row == (mine.index(rank), list(mine), mine)
            mine = columns[rank % 2]
            assert column == (mine.index(rank), list(mine), mine)

    def test_part_of_the_world(self, world):
        """A mesh of two dimensions over some ranks, which no group of torch's connects."""
        expected = [(rank, [0, 1, 2, 3], (0, 1, 2, 3)) for rank in range(4)]
        assert world.run(mesh_of_four, ranks=5) == [*expected, None]


def meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return [talk(ProcessGroups(it)) for it in (mesh, mesh["shards"], mesh["replicas"])]


def mesh_of_four():
    rank = dist.get_rank()
    # Members that know different numbers of groups, where only both dimensions together tell.
    for _ in range(2):
        dist.new_group([3])
    mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 1], [2, 3]])
    return talk(ProcessGroups(mesh)) if rank < 4 else None


class TestFailures:
    def test_a_rank_dies(self, world):
        """The others find out from the broken connection, long before the timeout."""
        first, dead, last = world.run(one_dies, ranks=3, lost=[1])
        assert dead is None
        for rank, messages in ((0, first), (2, last)):
            for what, message in zip(
                ("exchange 'factors'", "add up 'sums'", "gather values"), messages, strict=True
            ):
                assert message.startswith(f"Rank {rank} of 3 could not {what} (")
                assert message.endswith(
                    "). Another rank has ended, hangs or took another way through the program: "
                    "look at what the other ranks say."
                )

    def test_a_rank_says_nothing(self, world):
        """One that lives but does not take part costs the group's timeout, here two seconds."""
        *seconds, _ = world.run(one_is_silent, ranks=3)
        assert all(1 < each < 20 for each in seconds)

    def test_no_group_can_be_made(self, world):
        message = world.run(one_makes_no_group, ranks=2)[0]
        assert message.startswith("Process 0 could not make a group of processes (0, 1) (")


def one_dies():
    comm = ProcessGroups()
    talk(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sent = comm.exchange(torch.ones(30_000), [10_000] * 3, [10_000] * 3, "factors")
    messages = []
    for attempt in (
        sent.wait,
        lambda: comm.total(torch.ones(3), "sums").wait(),
        lambda: comm.gather(1),
    ):
        with pytest.raises(CommunicationError) as error:
            attempt()
        assert isinstance(error.value.__cause__, RuntimeError)
        messages.append(str(error.value))
    with pytest.raises(CommunicationError) as error:
        sent.wait()  # again
    assert str(error.value) == messages[0]
    return messages


def one_is_silent():
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    comm = ProcessGroups(group)
    talk(comm)
    began = time.monotonic()
    if comm.rank != 2:
        with pytest.raises(CommunicationError, match=f"^Rank {comm.rank} of 3 could not exchange"):
            start(comm).wait()
    seconds = time.monotonic() - began
    dist.barrier()  # of the default group: rank 2 waits here
    return seconds


def one_makes_no_group():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(CommunicationError) as error:
            ProcessGroups(group)
        message = str(error.value)
    dist.barrier()
    return message


class TestSettings:
    def test_not_initialised(self):
        with pytest.raises(SettingError) as error:
            ProcessGroups()
        assert str(error.value) == (
            "ProcessGroups() needs torch.distributed, which is not initialised here: call "
            "torch.distributed.init_process_group() first, or use Alone() for one process."
        )

    def test_not_available(self, monkeypatch):
        monkeypatch.setattr(module.dist, "is_available", lambda: False)
        with pytest.raises(SettingError) as error:
            connect("some group")
        assert str(error.value) == (
            "ProcessGroups() needs torch.distributed, which this build of torch lacks: install "
            "another, or use Alone() for one process."
        )

    def test_no_group(self, world):
        world.run(wrong_groups, ranks=1)


def wrong_groups():
    with pytest.raises(SettingError) as error:
        connect("gloo")
    assert str(error.value) == (
        "group is a str but must be a ProcessGroup, a DeviceMesh or None: pass one made by "
        "torch.distributed."
    )
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(SettingError) as error:
        ProcessGroups(group)
    assert str(error.value) == (
        "group is a process group that torch.distributed does not know, so it was destroyed: pass "
        "a new one."
    )
