"""Gradients of single samples."""

from collections.abc import Iterator

from torch import Tensor

from natgrad.operators.outer import OuterProducts
from natgrad.operators.problem import Problem
from natgrad.operators.vectors import LossGradients


def sample_gradients(problem: Problem) -> Iterator[Tensor]:
    """``[n, P]`` of each batch: of the sample's part of the sum of losses.

    Arguments:
        problem: model, loss and data.
    """
    yield from OuterProducts(problem, LossGradients(), "gradients of samples").rows()
