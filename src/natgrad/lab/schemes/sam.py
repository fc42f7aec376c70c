"""Sharpness-aware minimisation: the gradient at ``w + ρ g / ‖g‖``, uphill from the weights."""

from collections.abc import Iterable

from torch import Tensor

from natgrad.checks import NOT_NEGATIVE, POSITIVE, number
from natgrad.lab.schemes.norms import total_norm
from natgrad.lab.schemes.second_pass import SecondPass, scaled


class SAM(SecondPass):
    """``ε = ρ g / ‖g‖``, with the norm over all ``parameters`` (Foret et al. 2021).

    Arguments:
        rho: ``ρ > 0``, how far the weights are moved.
    """

    def __init__(self, parameters: Iterable[Tensor], rho: float = 0.05) -> None:
        super().__init__(parameters)
        self.rho = number(rho, "SAM.rho", POSITIVE)

    def displacements(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        return scaled(gradients, self.rho, total_norm(gradients))


class AdaptiveSAM(SecondPass):
    """``ε = ρ T² g / ‖T g‖`` with ``T = |w| + η``, entry by entry: a neighbourhood that is the same
    however the weights are scaled (Kwon et al. 2021).

    Arguments:
        rho: ``ρ > 0``, how far the weights are moved, in units of ``T``.
        eta: ``η ≥ 0``, added to ``|w|``; above 0 so that weights of 0 move.
    """

    def __init__(self, parameters: Iterable[Tensor], rho: float = 0.5, eta: float = 0.01) -> None:
        super().__init__(parameters)
        self.rho = number(rho, "AdaptiveSAM.rho", POSITIVE)
        self.eta = number(eta, "AdaptiveSAM.eta", NOT_NEGATIVE)

    def displacements(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        sizes = [w.abs() + self.eta for w in weights]
        once = [t * g for t, g in zip(sizes, gradients, strict=True)]
        twice = [t * x for t, x in zip(sizes, once, strict=True)]
        return scaled(twice, self.rho, total_norm(once))
