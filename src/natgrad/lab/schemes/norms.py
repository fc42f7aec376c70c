"""Norms of tensors, ``‖x‖ = √Σ x²``, summed in float32 or better."""

from collections.abc import Iterable

import torch
from torch import Tensor


def norm(x: Tensor) -> Tensor:
    """Of one tensor of any shape, as a scalar on its device."""
    found: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return found


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all entries of all tensors, as a scalar on the device of the first."""
    norms = [norm(x) for x in tensors]
    return norm(torch.stack([n.to(norms[0].device) for n in norms]))


def safe_ratio(above: Tensor, below: Tensor, otherwise: float) -> Tensor:
    """``above / below`` where both are positive, ``otherwise`` elsewhere; no waiting for either."""
    usable = (above > 0) & (below > 0)
    ratio = above / torch.where(usable, below, torch.ones_like(below))
    return torch.where(usable, ratio, torch.full_like(ratio, otherwise))
