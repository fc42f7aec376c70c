"""The axes ``[groups, n, s, d]`` that inputs and gradients of layers are brought to.

Groups (of a grouped convolution), samples, shared positions, features.
"""

from torch import Tensor


def grouped(t: Tensor) -> Tensor:
    """``[n, s, d]`` -> ``[1, n, s, d]``; grouped tensors stay as they are.

    Arguments:
        t: ``[n, s, d]`` or ``[groups, n, s, d]``.
    """
    return t.unsqueeze(0) if t.ndim == 3 else t


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
