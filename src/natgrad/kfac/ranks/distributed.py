"""How several processes share the work, as one argument of the preconditioner."""

from dataclasses import dataclass

import torch

from natgrad.checks import check_whole
from natgrad.comm.base import Communicator
from natgrad.comm.layouts import DeviceMesh, ProcessGroup
from natgrad.comm.wire import WireFormat, float21
from natgrad.errors import SettingError
from natgrad.placement import Placement, Route

Group = Communicator | ProcessGroup | DeviceMesh | None
# Statistics in float16 are sent in units that all ranks agree on; other numbers are not.
WIDE_RANGE = (torch.float64, torch.float32, float21, torch.bfloat16)
WIRE_DTYPES = (*WIDE_RANGE, torch.float16)


@dataclass(frozen=True)
class Distributed:
    """How several processes share the work. None of this changes what one process would compute,
    but for the precisions on the wire.

    Arguments:
        placement: which rank reduces, decomposes and preconditions what, such as ``CommOpt()``,
            ``MemOpt()`` or ``Hybrid(0.5)``; ``Auto()`` if it is None.
        group: the processes that train together: a ``ProcessGroup``, a ``DeviceMesh`` or a
            communicator of ``natgrad.comm``; all of them if it is None.
        wire_dtype: precision in which sums of statistics travel: of float32's bytes
            ``torch.bfloat16`` and ``torch.float16`` take half, ``natgrad.comm.float21`` two thirds.
            That of the parameters if it is None.
        inverse_dtype: precision in which decompositions travel, ``torch.bfloat16`` or ``float21``
            for fewer bytes; float32 or better if it is None. The rank that made one rounds its own
            as well.
        gradient_dtype: precision in which gradients travel that are preconditioned elsewhere,
            before and after; ``torch.bfloat16`` or ``float21`` for fewer bytes. That of the
            parameters if it is None.
        packed: send one triangle of a symmetric matrix instead of the form in which it is kept.
        bucket_bytes: factors are bundled into exchanges of about this size.
        route: by which everything travels that can, ``Route.DIRECT`` (one all-to-all) or
            ``Route.BALANCED`` (even slices, by reduce-scatter and all-gather) of
            ``natgrad.placement``; the planner takes the faster one if it is None.
    """

    placement: Placement | None = None
    group: Group = None
    wire_dtype: WireFormat | None = None
    packed: bool = True
    bucket_bytes: int = 25 << 20
    route: Route | None = None
    inverse_dtype: WireFormat | None = None
    gradient_dtype: WireFormat | None = None

    def __post_init__(self) -> None:
        placement, dtype = self.placement, self.wire_dtype
        if placement is not None and (not callable(placement) or isinstance(placement, type)):
            raise SettingError(
                f"Distributed.placement is {placement!r} but must be a placement: pass an object "
                "such as natgrad.CommOpt() or natgrad.Hybrid(0.5)."
            )
        if dtype is not None and dtype not in WIRE_DTYPES:
            raise SettingError(
                f"Distributed.wire_dtype is {dtype!r} but must be None or one of "
                f"{', '.join(map(str, WIRE_DTYPES))}: pass torch.bfloat16 for half the bytes."
            )
        for name in ("inverse_dtype", "gradient_dtype"):
            given = getattr(self, name)
            if given is not None and given not in WIDE_RANGE:
                raise SettingError(
                    f"Distributed.{name} is {given!r} but must be None or one of "
                    f"{', '.join(map(str, WIDE_RANGE))}, whose range is that of what is sent: pass "
                    "torch.bfloat16 for half the bytes."
                )
        if not isinstance(self.packed, bool):
            raise SettingError(
                f"Distributed.packed is {self.packed!r} but must be True or False: pass True for "
                "half the bytes."
            )
        if self.route is not None and not isinstance(self.route, Route):
            raise SettingError(
                f"Distributed.route is {self.route!r} but must be None or a route: pass "
                "natgrad.placement.Route.BALANCED or Route.DIRECT."
            )
        check_whole(self.bucket_bytes, "Distributed.bucket_bytes", low=1)
