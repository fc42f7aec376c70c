"""A matrix of a small model, written out once and read from then on."""

import torch
from torch import Tensor

from natgrad.linalg.density import Quadrature
from natgrad.linalg.results import Eigenpairs
from natgrad.operators import Operator, Spectrum
from natgrad.operators.base import SMALL
from natgrad.operators.estimators import Eigensolver, Lanczos


def written(operator: Operator) -> Operator:
    """The same matrix, dense if it is small and not known in closed form anyway."""
    return operator if operator.closed or operator.size > SMALL else Written(operator)


class Written(Operator):
    """``[P, P]`` at the weights as they were when it was made; its eigenvalues are exact."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(operator.problem, operator.kind, operator.size)
        self.space, self.definite = operator.space, operator.definite
        self.entries = operator.dense()
        self._pairs: tuple[Tensor, Tensor] | None = None

    def product(self, v: Tensor) -> Tensor:
        return self.entries @ v.to(self.dtype)

    def _dense(self) -> Tensor:
        return self.entries.clone()

    def diagonal(self) -> Tensor:
        return self.entries.diagonal().clone()

    def _all(self) -> tuple[Tensor, Tensor]:
        if self._pairs is None:
            values, vectors = torch.linalg.eigh(self.entries)
            self._pairs = values.flip(0), vectors.flip(1)
        return self._pairs

    def exact_eigenvalues(self) -> Tensor:
        return self._all()[0]

    def eigenvalues(
        self,
        k: int = 10,
        *,
        smallest: bool = False,
        by: Eigensolver = Lanczos(),  # noqa: B008 (frozen)
    ) -> Eigenpairs:
        """Exact, so ``by`` is not looked at."""
        k = self._count(k)
        part = slice(self.size - k, None) if smallest else slice(k)
        values, vectors = self._all()[0][part], self._all()[1][:, part]
        apart = (self.entries @ vectors - vectors * values).norm(dim=0)
        scale = self._all()[0].abs().max().clamp(min=1e-300)
        return Eigenpairs(values, vectors, apart / scale, True, 0, "exact: from the dense matrix")

    def spectrum(self, probes: int = 8, steps: int = 64, seed: int = 0) -> Spectrum:
        nodes = self._all()[0].double().cpu()[None]
        rule = nodes, torch.full_like(nodes, 1 / self.size)
        exact = Quadrature(*rule, rule, self.size, True, 0, "exact: all eigenvalues")
        return Spectrum(self.kind, exact)
