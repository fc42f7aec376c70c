"""What a loss is a mean or sum of, seen from its gradient at the model's output.

A term of a cross-entropy with logits ``z`` and weight ``w`` has the gradient

    g = w (softmax(z) - q),         q the target: e_y, or probabilities

and none at all where its target is ignored. So the terms are the positions with a gradient, the
class axis is the one along which it sums to zero, and ``w`` is the slope of ``g`` over
``softmax(z)`` on the classes that are not the target. ``w = 1`` is a sum, ``w = 1/M`` a mean over M
terms; class weights and per-sample means are weights that differ. Other losses are read likewise:

    softmax       g_j = w p_j - c on all but a few classes; c > 0 with label smoothing (Szegedy
                  et al. 2016), and a few are two where images are mixed
    log softmax   z = log p, g = -w q: what `nll_loss` gives, w = -sum_j g_j
    logit         g = w (sigmoid(z) - y): w = g / p at y = 0 and -g / (1 - p) at y = 1
    probability   z = p, g = w (p - y) / (p (1 - p)): w = g (1 - p) at y = 0 and -g p at y = 1

Each reading is checked, entry by entry: the softmax of a few hundred positions has one number to
find and all others to agree with it. What fits none of them (squared errors, whose target can be
anything) has weights that nobody can know. Of large outputs some hundred rows are looked at,
spread by a fixed hash, so that no generator is advanced and nothing as large as the output is made.

Nothing here reads a number on the host: an accelerator need not be waited for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of one reading, in this order.
FIELDS = ("count", "looked", "fitting", "equal", "weight", "mean", "square")
READINGS = ("softmax", "softmax 1", "log softmax", "log softmax 1", "logit", "probability")
_ROWS, _ENTRIES = 256, 4096
_TINY = 1e-30


@dataclass(frozen=True)
class Seen:
    """One reading of one output. ``count``: terms with a gradient, of ``positions`` there are.
    ``weight``: of a term, if they all have the same; ``mean`` and ``square``: of their weights and
    of their squares. ``tolerance``: to which these are known."""

    reading: str
    count: float
    positions: int
    uniform: bool
    weight: float
    mean: float
    square: float
    tolerance: float


def tolerance(*dtypes: torch.dtype) -> float:
    """To which gradients of these dtypes, and what was rounded to them on the way, agree."""
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    return max(1e-4, min(0.04, 8 * coarsest))


def axes_of(shape: torch.Size) -> dict[str, int]:
    """The axis of the classes for each reading that an output of this shape may have; -1 where
    every entry is a term."""
    found = {}
    if len(shape) >= 2 and shape[-1] >= 2:
        found["softmax"] = found["log softmax"] = len(shape) - 1
    if len(shape) >= 3 and shape[1] >= 2:
        found["softmax 1"] = found["log softmax 1"] = 1
    return {**found, "logit": -1, "probability": -1}


def numbers_of(
    z: Tensor, g: Tensor, readings: tuple[str, ...] = READINGS
) -> tuple[list[str], Tensor]:
    """The readings that are possible, and the numbers of each, ``[readings, 7]``, on the device.
    On a CPU, where a number is read at once, the first one that fits is the last.

    Arguments:
        z: the output, ``[n, …]``.
        g: the gradient that came back to it, of the same shape.
        readings: those to look at.
    """
    if not z.numel():
        return [], z.new_zeros(0, len(FIELDS))
    axes = {name: axis for name, axis in axes_of(z.shape).items() if name in readings}
    wide = torch.promote_types(torch.promote_types(z.dtype, g.dtype), torch.float32)
    limit = tolerance(z.dtype, g.dtype)
    rows: dict[int, tuple[Tensor, ...]] = {}
    found: dict[str, Tensor] = {}
    for name, axis in axes.items():
        if axis >= 0:
            if axis not in rows:
                rows[axis] = _rows(z, g, axis, wide)
            count, there, own_z, own_g = rows[axis]
            read = _softmax if name.startswith("softmax") else _log_softmax
            weights, fits = read(own_z, own_g, limit)
            found[name] = _summary(count, there, weights, fits, limit)
        else:
            found[name] = _entries(z, g, wide, limit, logits=name == "logit")
        if g.is_cpu and seen([name], [found[name].tolist()], z.shape, limit).reading:
            break
    return list(found), torch.stack(list(found.values()))


def seen(names: list[str], numbers: list[list[float]], shape: torch.Size, limit: float) -> Seen:
    """The first reading that fits; one without a name if none does, whose ``count`` is below 0 if
    there was too little to tell; and ``"nothing"`` where no gradient came back.

    Arguments:
        names: of the readings.
        numbers: of each, as `numbers_of` has found them.
        shape: of the output.
        limit: the `tolerance` of its dtypes.
    """
    axes = axes_of(shape)
    too_few, nothing = True, True
    for name, row in zip(names, numbers, strict=True):
        count, looked, fitting, equal, weight, mean, square = row
        nothing = nothing and not looked
        axis = axes[name]
        # Two classes, or one number, are one equation for one weight: several must agree.
        weak = axis < 0 or shape[axis] == 2
        if looked < (8 if axis < 0 else 4 if weak else 1):
            continue
        too_few = False
        uniform = equal >= 0.95 * fitting
        enough = 0.9 * looked if axis >= 0 else 0.25 * looked
        if fitting < enough or (weak and axis >= 0 and not uniform) or not weight > 0:
            continue
        positions = shape.numel() // (shape[axis] if axis >= 0 else 1)
        return Seen(name, count, positions, uniform, weight, mean, square, limit)
    name, count = ("nothing", 0.0) if nothing else ("", -1.0 if too_few else 0.0)
    return Seen(name, count, 0, False, 0.0, 0.0, 0.0, limit)


def _spread(m: int, most: int, device: torch.device) -> Tensor:
    """Indices of at most so many of m places, everywhere among them in no order: multiples of the
    golden ratio, modulo 1 (Weyl's sequence)."""
    place = torch.arange(min(m, most), device=device)
    if m <= most:
        return place
    return ((place.to(torch.float64) * 0.6180339887498949).frac() * m).long()


def _chosen(there: Tensor, most: int) -> Tensor:
    """Indices of at most so many of ``there [m]``; those that are not there come last."""
    m = len(there)
    # Knuth's multiplicative hash: a fixed order without a pattern.
    order = torch.arange(m, device=there.device) * 2654435761 % 2**32
    return torch.topk(order.to(torch.float64) / 2**32 + there, min(most, m)).indices


def _rows(z: Tensor, g: Tensor, axis: int, wide: torch.dtype) -> tuple[Tensor, ...]:
    """How many positions have a gradient; of some of them whether they do, ``[r]``, with output and
    gradient ``[r, classes]``."""
    low, high = torch.aminmax(g, dim=axis)
    there = ((high > 0) | (low < 0)).flatten()
    some = _spread(len(there), 64 * _ROWS, z.device)
    index = some[_chosen(there[some], _ROWS)]
    if axis == z.ndim - 1:
        own = [t.reshape(-1, t.shape[-1])[index] for t in (z, g)]
    else:
        inner = z.shape[2:].numel()
        own = [t.flatten(2)[index // inner, :, index % inner] for t in (z, g)]
    return there.sum(), there[index], own[0].to(wide), own[1].to(wide)


def _softmax(z: Tensor, g: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Weight of each row, and whether it is one of a cross-entropy. ``z, g [r, classes]``."""
    classes = z.shape[1]
    p = z.softmax(1)
    size = g.abs().sum(1)
    balanced = g.sum(1).abs() <= 4 * limit * size
    kept = torch.ones_like(p)
    residual, slope = g, torch.zeros_like(size)
    fits = torch.zeros_like(balanced)
    # The target lies below the line of all others. One, two where images are mixed; three at most.
    for left in range(1, 4):
        if classes - left < (1 if left == 1 else 3):
            break
        kept = kept.scatter(1, residual.masked_fill(kept == 0, torch.inf).argmin(1, True), 0.0)
        own = (kept * g * p).sum(1) / (kept * p * p).sum(1).clamp(min=_TINY)
        residual = g - own.unsqueeze(1) * p
        good = _small(residual, kept, own, p, limit)
        slope = torch.where(good & ~fits, own, slope)
        fits |= good
    if classes >= 6:  # a line that does not go through the origin: label smoothing
        kept = torch.ones_like(p)
        residual = g
        for _ in range(3):
            kept = kept.scatter(1, residual.masked_fill(kept == 0, torch.inf).argmin(1, True), 0.0)
            number = kept.sum(1)
            middle_p, middle_g = ((kept * t).sum(1, True) / number.unsqueeze(1) for t in (p, g))
            from_p, from_g = kept * (p - middle_p), kept * (g - middle_g)
            own = (from_p * from_g).sum(1) / from_p.square().sum(1).clamp(min=_TINY)
            residual = (g - middle_g) - own.unsqueeze(1) * (p - middle_p)
            good = _small(residual, kept, own, from_p.abs(), limit)
            slope = torch.where(good & ~fits, own, slope)
            fits |= good
    return slope, fits & balanced & (slope > 0)


def _small(residual: Tensor, kept: Tensor, slope: Tensor, p: Tensor, limit: float) -> Tensor:
    """Whether a line goes through all points that are kept, ``[r]``."""
    most = (kept * residual).abs().amax(1)
    return most <= 4 * limit * slope.abs() * (kept * p).amax(1)


def _log_softmax(z: Tensor, g: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    normal = z.logsumexp(1).abs() <= 4 * limit
    return -g.sum(1), normal & (g <= 0).all(1)


def _summary(count: Tensor, there: Tensor, weights: Tensor, fits: Tensor, limit: float) -> Tensor:
    """``[7]`` of the rows that are ``there``."""
    fits = fits & there
    fitting = fits.sum().clamp(min=1)
    middle = torch.where(fits, weights, torch.nan).nanmedian()
    equal = fits & ((weights - middle).abs() <= 4 * limit * middle)
    among = equal.sum().clamp(min=1)
    own = torch.where(fits, weights, 0.0)
    one = torch.where(equal, weights, 0.0).sum() / among
    numbers = (count, there.sum(), fits.sum(), equal.sum(), one, own.sum() / fitting)
    return torch.stack([n.to(own.dtype) for n in (*numbers, own.square().sum() / fitting)])


def _entries(z: Tensor, g: Tensor, wide: torch.dtype, limit: float, *, logits: bool) -> Tensor:
    """``[7]``, where every entry is a term with a target from 0 to 1. Read as if targets were 0 and
    1, softer ones seem to have less weight than they do. So the largest weight is the true one, if
    a quarter of the entries have it: all the same, or one for each class (``pos_weight``)."""
    places = _spread(z.numel(), 16 * _ENTRIES, z.device)
    index = places[_chosen(g.reshape(-1)[places] != 0, _ENTRIES)]
    own_z, own_g = (t.reshape(-1)[index].to(wide) for t in (z, g))
    above = own_g > 0  # the target is smaller than the prediction: 0, if it is hard
    if logits:
        share = torch.sigmoid(torch.where(above, own_z, -own_z)).clamp(min=_TINY)
        weights, valid = own_g.abs() / share, torch.ones_like(above)
    else:
        share = torch.where(above, 1 - own_z, own_z)
        weights, valid = own_g.abs() * share, (own_z >= 0) & (own_z <= 1)
    some = own_g != 0
    groups = torch.stack([some & above, some & ~above])
    members = torch.where(groups, weights, torch.nan)
    tops = members.nanquantile(0.9, dim=1, keepdim=True)
    near = groups & ((weights - tops).abs() <= 4 * limit * tops)
    sizes, hard = groups.sum(1), near.sum(1)
    fair = _none_above(groups, weights, tops, limit) & (4 * hard >= sizes) & (hard > 0)
    own = torch.where(near, weights, 0.0).sum(1) / hard.clamp(min=1)
    # Where all targets of one sign are soft they have the weight of the others.
    other_fits = _none_above(groups, weights, own.flip(0).unsqueeze(1), limit) & fair.flip(0)
    own = torch.where(fair, own, own.flip(0))
    whole = (fair | other_fits | (sizes == 0)).all() & fair.any() & valid.all()
    share_of = sizes / sizes.sum().clamp(min=1)
    mean, square = (share_of * own).sum(), (share_of * own.square()).sum()
    alike = ((own - mean).abs() <= 4 * limit * mean) | (sizes == 0)
    fitting = (hard * fair).sum() * whole
    numbers = (g.count_nonzero(), some.sum(), fitting, fitting * alike.all(), mean, mean, square)
    return torch.stack([n.to(wide) for n in numbers])


def _none_above(groups: Tensor, weights: Tensor, tops: Tensor, limit: float) -> Tensor:
    """Whether the members of each group, but for a few, have no larger weight than ``tops``."""
    above = groups & (weights > (1 + 4 * limit) * tops)
    return above.sum(1) <= 0.02 * groups.sum(1)
