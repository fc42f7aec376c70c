"""Sums of products of 16-bit numbers, made in float32.

    out [b, m, n] += left [b, m, k] right [b, k, n]    left and right of 16 bits, out of 32

The product of two bfloat16 or two float16 numbers is a float32 number, exactly. So second moments
of activations that a network has in 16 bits lose nothing by being multiplied as they are, if only
the sums are float32, and tensor cores do that many times faster than products of float32.

In torch only CUDA gives float32 sums of such products. On CPUs the result is rounded to 16 bits,
which is worse than the rounding of the operands, as that averages out over the rows. There rows are
taken some at a time, so that only sums of few are rounded, and only where it is asked for; float16
never, as it ends at 65504.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Compute capability from which on there are tensor cores for it.
_TENSOR_CORES = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
# Rows whose sum is rounded at once.
_ROWS = 256


def taken(dtype: torch.dtype, device: torch.device, wanted: bool | None) -> bool:
    """Whether second moments of such numbers are sums of 16-bit products.

    ``wanted``: by the user; ``None`` where the device gains by it and the error is none."""
    if wanted is False or dtype not in _TENSOR_CORES:
        return False
    if device.type == "cuda":
        return _has_tensor_cores(dtype, device)
    return wanted is True and device.type == "cpu" and dtype == torch.bfloat16


def faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of float32 matrices gain by being made of bfloat16 numbers, with a result of
    bfloat16: on GPUs with tensor or matrix cores for it, and on CPUs with instructions for it.

    Arguments:
        dtype: of the matrices. Those of float64 are wanted as they are.
        device: where they lie.
    """
    if dtype != torch.float32:
        return False
    if device.type == "cuda":
        return torch.version.hip is not None or _has_tensor_cores(torch.bfloat16, device)
    return device.type == "cpu" and _cpu_multiplies_bfloat16()


@lru_cache(maxsize=1)
def _cpu_multiplies_bfloat16() -> bool:
    # Older releases of torch do not say.
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


@lru_cache(maxsize=64)
def _has_tensor_cores(dtype: torch.dtype, device: torch.device) -> bool:
    if torch.version.hip is not None:  # which has no float32 sums of them
        return False
    return torch.cuda.get_device_capability(device) >= _TENSOR_CORES[dtype]


def accumulate(out: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """``out += alpha * left @ right``, for operands of the dtype of ``out`` or of 16 bits."""
    if left.dtype == out.dtype:
        if len(out) == 1:
            out[0].addmm_(left[0], right[0], alpha=alpha)
        else:
            out.baddbmm_(left, right, alpha=alpha)
    elif out.device.type == "cuda":
        out.add_(torch.bmm(left, right, out_dtype=out.dtype), alpha=alpha)
    else:
        for some, others in zip(left.split(_ROWS, 2), right.split(_ROWS, 1), strict=True):
            out.add_(torch.bmm(some, others), alpha=alpha)
