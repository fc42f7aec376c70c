"""Messages over MPI, by mpi4py: for clusters that start their processes with mpirun alone."""

import importlib
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from natgrad.comm.base import Communicator
from natgrad.comm.transfers import Pending, Transfer
from natgrad.comm.wire import SUMMED_AS
from natgrad.errors import SettingError

# An exchange moves bits, so a type of the right width serves any dtype; counts are 32 bits wide.
BITS = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
NUMBERS = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64_T"}


class MPI(Communicator):
    """All processes of an mpi4py communicator. Tensors must be on the CPU.

    It is duplicated, so no message of the program's own can be taken for one of these; all its
    processes must make this object together. Most MPI libraries only make progress while one of
    their functions runs, which is mainly in `wait`.

    Arguments:
        comm: an mpi4py communicator; ``None`` is ``mpi4py.MPI.COMM_WORLD``.
    """

    def __init__(self, comm: Any = None) -> None:
        try:
            self._mpi = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:
            raise SettingError(
                f"MPI() needs mpi4py, which cannot be imported ({error}): install an MPI library "
                "and run pip install 'natgrad[mpi]', or use ProcessGroups()."
            ) from error
        if comm is not None and not isinstance(comm, self._mpi.Comm):
            raise SettingError(
                f"comm is {comm!r} but must be an mpi4py communicator or None: pass one such as "
                "mpi4py.MPI.COMM_WORLD."
            )
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        super().__init__(self._comm.Get_rank(), self._comm.Get_size())

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        received = send.new_empty(sum(receive))
        kind = getattr(self._mpi, BITS[send.element_size()])
        request = self._comm.Ialltoallv(
            [self._buffer(send), sizes, _starts(sizes), kind],
            [self._buffer(received), receive, _starts(receive), kind],
        )
        return MPITransfer(request, received, send.dtype, failure, send)

    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        kind = getattr(self._mpi, NUMBERS[own.dtype])
        request = self._comm.Iallreduce(
            self._mpi.IN_PLACE, [self._buffer(own), own.numel(), kind], op=self._mpi.SUM
        )
        return MPITransfer(request, own, dtype, failure)

    def _reduce_scatter(self, send: Tensor, failure: str) -> Pending:
        if SUMMED_AS[send.dtype] != send.dtype:  # MPI knows no numbers of 16 bits
            return super()._reduce_scatter(send, failure)
        own = send.new_empty(send.numel() // self.size)
        kind = getattr(self._mpi, NUMBERS[send.dtype])
        request = self._comm.Ireduce_scatter_block(
            [self._buffer(send), own.numel(), kind],  # of a slice
            [self._buffer(own), own.numel(), kind],
            op=self._mpi.SUM,
        )
        return MPITransfer(request, own, send.dtype, failure, send)

    def _all_gather(self, send: Tensor, failure: str) -> Pending:
        received = send.new_empty(self.size * send.numel())
        kind = getattr(self._mpi, BITS[send.element_size()])
        request = self._comm.Iallgather(
            [self._buffer(send), send.numel(), kind], [self._buffer(received), send.numel(), kind]
        )
        return MPITransfer(request, received, send.dtype, failure, send)

    def _split(self, ranks: list[int]) -> Communicator:
        part = self._comm.Split(color=ranks[0], key=self.rank)
        try:
            return MPI(part)
        finally:
            part.Free()  # MPI() has duplicated it

    def _gather(self, value: object) -> list[Any]:
        gathered: list[Any] = self._comm.allgather(value)
        return gathered

    def _buffer(self, numbers: Tensor) -> Any:
        if numbers.device.type != "cpu":
            raise SettingError(
                f"MPI() carries tensors of the CPU, but these are on {numbers.device}: use "
                "ProcessGroups(), or move them with .cpu()."
            )
        return numbers.view(torch.uint8).numpy()


class MPITransfer(Transfer):
    """A nonblocking MPI operation.

    Arguments:
        request: of mpi4py, for which there is `wait`.
        received: as for `Transfer`.
        dtype: as for `Transfer`.
        failure: as for `Transfer`.
        buffers: as for `Transfer`.
    """

    def __init__(
        self, request: Any, received: Tensor, dtype: torch.dtype, failure: str, *buffers: object
    ) -> None:
        self._request = request
        super().__init__(received, dtype, failure, *buffers)

    def _arrived(self) -> bool:
        try:
            return bool(self._request.Test())
        except Exception:  # kept, as nobody knows what became of its buffers
            return False

    def _finish(self) -> None:
        self._request.Wait()


def _starts(sizes: list[int]) -> list[int]:
    return list(accumulate(sizes[:-1], initial=0))
