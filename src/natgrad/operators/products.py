"""What an operator is at its root: products with vectors of every kind that users have.

A flat vector ``[P]``, several as columns ``[P, k]``, and a dict by parameter name are brought to
``[P, k]``, multiplied, and brought back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.operators.problem import Problem
from natgrad.operators.space import ParameterSpace

V = TypeVar("V", Tensor, dict[str, Tensor])


class Products(ABC):
    """A square matrix over the parameters of which only ``product`` is known.

    Arguments:
        problem: model, loss and data that the matrix belongs to.
        kind: name of the matrix, in print and in error sentences.
        size: number of rows; ``None`` takes the number of parameters ``P``.
    """

    def __init__(self, problem: Problem, kind: str, size: int | None = None) -> None:
        self.problem, self.kind = problem, kind
        self.space: ParameterSpace | None = problem.space if size is None else None
        self.size = problem.space.size if size is None else size
        self.dtype, self.device = problem.dtype, problem.device

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    # Products.

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """``A v``, which every operator defines.

        Arguments:
            v: ``[P, k]``.
        """

    def __matmul__(self, v: V) -> V:
        found: V = self._like(v, self.product)
        return found

    def to_scipy(self) -> Any:
        """A ``scipy.sparse.linalg.LinearOperator``."""
        try:
            from scipy.sparse.linalg import LinearOperator  # type: ignore[import-untyped]
        except ImportError as error:
            raise SettingError("to_scipy() needs scipy: pip install scipy.") from error

        def matmat(x: Any) -> Any:
            # A copy: torch takes neither read-only arrays nor negative strides.
            v = torch.tensor(x.copy(), dtype=self.dtype, device=self.device)
            found = self.product(v.view(self.size, -1)).view(v.shape)
            return found.cpu().numpy()

        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        return LinearOperator(self.shape, matvec=matmat, matmat=matmat, rmatvec=matmat, dtype=kind)

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.size:,} parameters>"

    # Helpers.

    def _like(self, v: Any, function: Any) -> Any:
        """``function`` of columns ``[P, k]``, on a vector of any kind."""
        if isinstance(v, Mapping):
            if self.space is None:
                raise SettingError(
                    f"{self.kind} is over one matrix, not over named parameters: give a tensor "
                    f"[{self.size}] or [{self.size}, k]."
                )
            flat = self.space.flat(v).to(self.dtype)
            return self.space.named(function(flat.unsqueeze(1)).squeeze(1))
        if not isinstance(v, Tensor):
            raise SettingError(
                f"The operator got an object of type {type(v).__name__} but takes tensors, or a "
                "dict of them by parameter name: convert it."
            )
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise SettingError(
                f"The operator has {self.size:,} parameters but got a tensor of shape "
                f"{list(v.shape)}: give [{self.size}], [{self.size}, k] or a dict by name."
            )
        v = v.to(self.dtype)
        return function(v.unsqueeze(1)).squeeze(1) if v.ndim == 1 else function(v)

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _kind_of(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    def _count(self, k: int) -> int:
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= self.size:
            raise SettingError(
                f"k is {k!r} but must be a whole number from 1 to {self.size:,}, the number of "
                "parameters: give such a number."
            )
        return k
