"""How many ranks there are, and what a number weighs on the wire: what decides a plan.

What prices it is a `Cluster`.
"""

from dataclasses import dataclass, field

from natgrad.checks import check_whole_fields
from natgrad.placement.routes import Route


@dataclass(frozen=True, slots=True)
class World:
    """What a plan depends on besides the blocks.

    Arguments:
        size: number of ranks, at least 1.
        gradients_are_local: whether every rank has the gradient of its own data alone, so that
            K-FAC sums them; false under DDP and FSDP, which do so.
        update_every: steps from one update to the next, by which `Auto` weighs costs.
        refresh_every: steps from one refresh to the next, by which costs are weighed and loads
            balanced.
        factor_bytes: bytes of one word of a factor on the wire: of a number, if each has its own.
        inverse_bytes: bytes of one word of a decomposition on the wire.
        gradient_bytes: bytes of one word of a gradient on the wire.
        bucket_bytes: largest size of one exchange; an op that is larger is an exchange of its own.
        kept_factor_bytes: bytes of one number of a running average in memory.
        kept_inverse_bytes: bytes of one number of a decomposition in memory.
        sharded: whether gradients of some parameters, with a block or without, are sharded over the
            ranks.
        units: whether factors are sent as multiples of a unit that the ranks agree on first, as the
            narrow range of float16 requires.
        sum_bytes: bytes of one number of a finished sum of factors on the wire.
        gradient_sum_bytes: bytes of one number of a finished sum of gradients on the wire.
        total_bytes: bytes of one number of a gradient in an all-reduce.
        route: by which everything travels that can; ``None`` lets the planner choose.
        factors_per_word: numbers of a factor in one word; numbers of 21 bits are 3 to a word of 8
            bytes.
        inverses_per_word: numbers of a decomposition in one word.
        gradients_per_word: numbers of a gradient in one word.
        kept_sum_bytes: bytes of one number of the statistics of a step in memory.
        at_once: how many small factors a rank decomposes side by side, as CPUs do. Only memory
            depends on it, so that plans that differ in it are equal.
    """

    size: int
    gradients_are_local: bool = False
    update_every: int = 10
    refresh_every: int = 100
    factor_bytes: int = 4
    inverse_bytes: int = 4
    gradient_bytes: int = 4
    bucket_bytes: int = 25 << 20
    kept_factor_bytes: int = 4
    kept_inverse_bytes: int = 4
    sharded: bool = False
    units: bool = False
    sum_bytes: int = 4
    gradient_sum_bytes: int = 4
    total_bytes: int = 4
    route: Route | None = None
    factors_per_word: int = 1
    inverses_per_word: int = 1
    gradients_per_word: int = 1
    kept_sum_bytes: int = 4
    at_once: int = field(default=1, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole_fields(
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
            "sum_bytes",
            "gradient_sum_bytes",
            "total_bytes",
            "factors_per_word",
            "inverses_per_word",
            "gradients_per_word",
            "kept_sum_bytes",
            "at_once",
        )

    @property
    def ranks(self) -> range:
        return range(self.size)
