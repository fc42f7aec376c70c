"""The axes ``[groups, n, s, d]`` that inputs and gradients of layers are brought to.

Groups (of a grouped convolution), samples, shared positions, features.
"""

from typing import Any

import torch
from torch import Tensor, nn

# Per-sample gradients are made for this many numbers at a time.
_PIECE = 1 << 24


def grouped(t: Tensor) -> Tensor:
    """``[n, s, d]`` -> ``[1, n, s, d]``; grouped tensors stay as they are.

    Arguments:
        t: ``[n, s, d]`` or ``[groups, n, s, d]``.
    """
    return t.unsqueeze(0) if t.ndim == 3 else t


def is_alone(x: Any, features: int | None) -> bool:
    """Whether an input is one sample that has no axis of its own.

    Arguments:
        x: the first argument of a forward call.
        features: `natgrad.layers.Layer.input_features` of the layer that is called.
    """
    return isinstance(x, Tensor) and x.ndim == features


def per_sample(t: Tensor, samples: int | None) -> Tensor:
    """Take positions that were folded into the samples' axis out again.

    A model that flattens ``[samples, tokens, d]`` to ``[samples * tokens, d]`` still has that many
    samples. A leading size that is no multiple of their number is taken as it is.

    Arguments:
        t: ``[groups, n, s, d]``.
        samples: number of samples that the model was called with; ``None`` or 0 is not known, and
            leaves ``t`` as it is.
    """
    n = t.shape[1]
    if not samples or n == samples or n % samples:
        return t
    return t.reshape(t.shape[0], samples, n // samples * t.shape[2], t.shape[3])


def piece(shape: tuple[int, int, int]) -> int:
    """How many samples' gradients are made at a time: the same for all uses of one weight.

    Arguments:
        shape: ``(groups, rows, cols)``.
    """
    groups, rows, cols = shape
    return max(1, _PIECE // max(1, groups * rows * cols))


def trainable(p: Any) -> nn.Parameter | None:
    """The parameter, if it is one and requires gradients.

    Arguments:
        p: a parameter, or anything else, for which there is ``None``.
    """
    return p if isinstance(p, nn.Parameter) and p.requires_grad else None


def real(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32 for half-precision tensors.

    Arguments:
        dtype: of activations or gradients; float32 and float64 stay.
    """
    return torch.float32 if dtype.itemsize < 4 else dtype
