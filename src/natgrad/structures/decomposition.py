"""A factor in its form, and an inverse: how the one is decomposed by the other.

Diagonals are decomposed entry by entry, and diagonal blocks as a batch of small matrices: an
inverse that knows dense matrices alone works with all of them.
"""

from functools import partial

from torch import Tensor

from natgrad.inverses import Inverse, Parts, contained
from natgrad.linalg.forms import BlockTriangle, DiagonalForm, Form


def decompose_factor(
    inverse: Inverse,
    form: Form,
    kept: Tensor,
    damping: Tensor,
    rows: tuple[int, int] | None = None,
) -> Parts | None:
    """The parts of a factor in its form ``[numel]``; ``None`` where it cannot be decomposed.

    Arguments:
        inverse: what decomposes it.
        form: how the factor is kept; diagonal ones are decomposed entry by entry.
        kept: ``[form.numel]``, its numbers.
        damping: ``[form.batch]``, added to the diagonal by an inverse that damps factors.
        rows: of the only part, where other ranks make the others; ``None`` are all parts.
    """
    if isinstance(form, DiagonalForm):
        return inverse.decompose_diagonal(form.values(kept), damping)
    if isinstance(form, BlockTriangle):
        found: Parts = ()
        for index, (count, _) in enumerate(form.sections):
            each = damping.repeat_interleave(count)
            parts = contained(inverse, partial(form.squares, kept, index), each)
            if parts is None:
                return None
            found += parts
        return found
    return contained(inverse, partial(form.dense, kept), damping, rows)


def factor_error(
    inverse: Inverse, form: Form, parts: Parts, kept: Tensor, damping: Tensor
) -> float:
    """How far parts are from decomposing a factor as it is now, relative.

    Arguments:
        inverse: what made the parts.
        form: how the factor is kept; of one in blocks it is the root mean square over columns.
        parts: what `decompose_factor` gave for earlier numbers.
        kept: ``[form.numel]``, the numbers of now.
        damping: ``[form.batch]``, the damping of now.
    """
    if isinstance(form, DiagonalForm):
        return float(inverse.diagonal_error(parts, form.values(kept), damping))
    if isinstance(form, BlockTriangle):
        own, total = len(parts) // len(form.sections), 0.0
        for index, (count, size) in enumerate(form.sections):
            mine = parts[index * own : (index + 1) * own]
            each = damping.repeat_interleave(count)
            error = float(inverse.error(mine, form.squares(kept, index), each))
            total += count * size * error**2
        return float((total / form.dim) ** 0.5)
    return float(inverse.error(parts, form.dense(kept), damping))
