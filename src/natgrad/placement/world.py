"""How many ranks there are, what a number weighs on the wire, and how fast the machines are."""

from dataclasses import dataclass

from natgrad.placement.checks import check_positive, check_whole
from natgrad.specs import Ranks


@dataclass(frozen=True, slots=True)
class World:
    """What a plan depends on besides the blocks.

    ``gradients_are_local``: nobody else adds up the gradients of the ranks. The ``..._bytes`` of a
    factor, an inverse and a gradient are those of one number on the wire, ``kept_...`` those of one
    in memory. ``joint``: decompositions are eigendecompositions, otherwise inverses by Cholesky.
    ``sharded``: some gradients are spread over the ranks, of blocks or not. ``units``: factors
    travel as multiples of units that the ranks agree on."""

    size: int
    gradients_are_local: bool = False
    update_every: int = 10
    refresh_every: int = 100
    factor_bytes: int = 4
    inverse_bytes: int = 4
    gradient_bytes: int = 4
    bucket_bytes: int = 25 << 20
    joint: bool = True
    kept_factor_bytes: int = 4
    kept_inverse_bytes: int = 4
    sharded: bool = False
    units: bool = False

    def __post_init__(self) -> None:
        check_whole(
            self,
            "size",
            "update_every",
            "refresh_every",
            "factor_bytes",
            "inverse_bytes",
            "gradient_bytes",
            "bucket_bytes",
            "kept_factor_bytes",
            "kept_inverse_bytes",
        )

    @property
    def ranks(self) -> Ranks:
        return tuple(range(self.size))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Of one rank: operations and bytes a second, seconds until a message begins to arrive, and
    bytes of ``memory`` for factors and inverses.

    The defaults are those of a data-centre GPU behind a 100 Gbit/s link; only their ratios decide
    which placement is the cheapest."""

    flops: float = 1e13
    bandwidth: float = 1e10
    latency: float = 2e-5
    memory: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "flops", "bandwidth", "latency")
        if self.memory is not None:
            check_positive(self, "memory")
