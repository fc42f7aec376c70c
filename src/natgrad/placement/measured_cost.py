"""What decompositions and preconditioning cost on a computer that was measured.

A routine does far from equally many operations a second at all sizes: small matrices cost more to
start than to do, and an eigendecomposition is slower than a product throughout. So seconds are
tabulated by size, and lie on straight lines between the measured ones where both axes are
logarithmic::

    log t(d) = log t(a) + (log t(b) - log t(a)) (log d - log a) / (log b - log a)    a <= d <= b
    t(d) = t(b) (d / b)³                              above the largest one, b
    t(d) = t(a)                                       below the smallest one, a: only a start

Norm layers have many tiny factors in one call, where a further matrix is far cheaper than the
first, so there is a second table for those: ``t(d) + (count - 1) further(d)``.

Gradients and factors pass through memory besides, and every block and factor is a few calls:
``start + each n`` for a gradient that is copied in, scaled, compared and copied out, and for a sum
that is folded into its running average (`Passing`).

Costs are operations (`CostModel`), here seconds times the ``flops`` of the same measurement.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, prod

from natgrad.checks import (
    NOT_NEGATIVE,
    POSITIVE,
    check_numbers,
    check_positive_fields,
    check_whole,
    number,
)
from natgrad.errors import SettingError
from natgrad.specs import BlockSpec, FactorSpec, Routine


@dataclass(frozen=True, slots=True)
class SecondsBySize:
    """Seconds of one routine, by the rows ``d`` of its square matrices.

    Arguments:
        sizes: increasing, at least one.
        first: for each size, seconds of a call for one matrix.
        further: for each size, seconds of each further matrix in the same call.
    """

    sizes: tuple[int, ...]
    first: tuple[float, ...]
    further: tuple[float, ...]

    def __post_init__(self) -> None:
        for size in self.sizes:
            check_whole(size, "SecondsBySize.sizes", 1)
        for name in ("first", "further"):
            for value in getattr(self, name):
                number(value, f"SecondsBySize.{name}", POSITIVE)
        lengths = [len(self.sizes), len(self.first), len(self.further)]
        if not self.sizes or len(set(lengths)) > 1 or any(a >= b for a, b in pairwise(self.sizes)):
            raise SettingError(
                f"SecondsBySize has sizes {self.sizes!r} with {lengths[1]} and {lengths[2]} "
                "numbers of seconds but must have at least one size, in increasing order, and "
                "two numbers for each: pass such tuples."
            )

    def seconds(self, size: float, count: int = 1) -> float:
        """Seconds of one call.

        Arguments:
            size: rows of a matrix, not necessarily a whole number.
            count: matrices in the call.
        """
        return self._at(self.first, size) + (count - 1) * self._at(self.further, size)

    def _at(self, values: tuple[float, ...], size: float) -> float:
        if size <= self.sizes[0]:
            return values[0]
        if size >= self.sizes[-1]:
            return values[-1] * (size / self.sizes[-1]) ** 3
        right = bisect_left(self.sizes, size)
        if self.sizes[right] == size:
            return values[right]
        a, b = self.sizes[right - 1 : right + 1]
        share = log(size / a) / log(b / a)
        return exp(log(values[right - 1]) * (1 - share) + log(values[right]) * share)


@dataclass(frozen=True, slots=True)
class Passing:
    """Seconds of what is done with all numbers of a tensor, a few times over.

    Arguments:
        start: ``>= 0``, of its calls.
        each: ``>= 0``, of each of its numbers.
    """

    start: float = 0.0
    each: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, start=NOT_NEGATIVE, each=NOT_NEGATIVE)

    def seconds(self, numbers: float) -> float:
        """Seconds of a tensor.

        Arguments:
            numbers: how many it has.
        """
        return self.start + self.each * numbers


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """A `CostModel` from measured seconds.

    A decomposition takes the seconds of its routine, in proportion to the operations that its
    inverse states (`Inverse.cost`). A product ``[d, d] [d, k]`` takes those of a product of square
    matrices with as many operations, of ``(d d k)^(1/3)`` rows. Operations on diagonals are as
    fast as ``flops`` says.

    Arguments:
        flops: ``> 0``, of the `Cluster` that simulates with these costs: operations a second of the
            fastest product.
        product: seconds of products of two square matrices.
        eigen: seconds of eigendecompositions.
        cholesky: seconds of inverses of positive definite matrices.
        carried: seconds of a block's gradient at a step, beside products.
        folded: seconds of a factor at an update, from its sum to its running average.
    """

    flops: float
    product: SecondsBySize
    eigen: SecondsBySize
    cholesky: SecondsBySize
    carried: Passing = Passing()
    folded: Passing = Passing()

    def __post_init__(self) -> None:
        check_positive_fields(self, "flops")

    def table(self, routine: Routine) -> SecondsBySize:
        """The seconds of one routine.

        Arguments:
            routine: what is done.
        """
        match routine:
            case Routine.PRODUCT:
                return self.product
            case Routine.EIGEN:
                return self.eigen
            case Routine.CHOLESKY:
                return self.cholesky

    def decompose(self, spec: FactorSpec) -> float:
        """Operations of decomposing one factor: its seconds times ``flops``.

        Arguments:
            spec: sizes of the factor, and the cost and routine that its inverse gave.
        """
        work = spec.work
        if spec.diagonal:
            return work.decompose
        share = work.decompose / (spec.batch * work.by.operations(spec.dim))
        return self.flops * share * self.table(work.by).seconds(spec.dim, spec.batch)

    def precondition(self, block: BlockSpec) -> float:
        """Operations of all decomposed factors of a block together, and of its gradient on the way
        through memory: their seconds times ``flops``.

        Arguments:
            block: its shape, and the costs of its decomposed factors.
        """
        numel = float(prod(block.shape))
        found = block.operations + self.flops * self.carried.seconds(numel)
        for name in block.decomposed:
            spec = block.factor(name)
            apply = spec.work.apply
            if spec.diagonal:
                found += numel * apply
                continue
            size = (spec.dim * numel / spec.batch) ** (1 / 3)
            products = apply / (2 * spec.dim)
            found += self.flops * products * self.product.seconds(size, spec.batch)
        return found

    def fold(self, spec: FactorSpec) -> float:
        """Operations of folding a factor's sum into its running average: seconds times ``flops``.

        Arguments:
            spec: sizes of the factor.
        """
        return self.flops * self.folded.seconds(spec.numel)
