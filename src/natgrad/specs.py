"""Sizes of factors, without their numbers: no tensors, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FactorSpec:
    """``batch`` symmetric matrices of size ``dim``, kept as ``numel`` numbers altogether."""

    dim: int
    batch: int
    numel: int
    diagonal: bool = False
