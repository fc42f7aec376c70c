"""Gradients of single samples."""

from collections.abc import Iterator

from torch import Tensor

from natgrad.operators.outer import OuterProducts
from natgrad.operators.problem import Problem
from natgrad.operators.vectors import Gradients


def sample_gradients(problem: Problem) -> Iterator[Tensor]:
    """``[n, P]`` of each batch: of the sample's part of the sum of losses."""
    yield from OuterProducts(problem, Gradients(), "gradients of samples").rows()
