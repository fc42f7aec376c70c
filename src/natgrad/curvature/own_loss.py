"""Any other loss, ``L = 1/n Σ ℓ(f_n, y_n)``, with the roots ``√λ_d q_d`` of ``Λ_n = ∂²ℓ/∂f_n²``.

``Λ_n = Σ_d λ_d q_d q_dᵀ`` is its eigendecomposition: a singular one has zeros among the roots, and
an indefinite one has no roots.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.curvature.loss import Loss, check_direction, holds, precise
from natgrad.errors import SettingError


@dataclass(frozen=True, eq=False)
class OwnLoss(Loss):
    """A loss given as a function.

    Without ``output_hessian`` there is the Hessian of a network, but neither its Gauss-Newton nor
    its Fisher matrix.

    Arguments:
        function: ``(output [n, …], target) -> []``, the mean over the n samples as a tensor of one
            number.
        output_hessian: ``(output, target) -> [n, D, D]``: for each sample the second derivatives of
            its own loss (not divided by n) by its D outputs, in row-major order; symmetric, finite,
            and without negative eigenvalues. ``None`` if there are none.
    """

    function: Callable[[Tensor, Any], Tensor]
    output_hessian: Callable[[Tensor, Any], Tensor] | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingError(
                f"OwnLoss.function is {self.function!r} but must be callable: pass a function of "
                "(output, target)."
            )
        if self.output_hessian is not None and not callable(self.output_hessian):
            raise SettingError(
                f"OwnLoss.output_hessian is {self.output_hessian!r} but must be callable or None: "
                "pass a function of (output, target)."
            )

    def total(self, output: Tensor, target: Tensor) -> Tensor:
        return self._mean(precise(output), target) * output.shape[0]

    def weight(self, output: Tensor, target: Tensor) -> float:
        return float(precise(output).shape[0])

    def sample_totals(self, output: Tensor, target: Tensor) -> Tensor:
        """The function of each sample alone. They sum to `total` if it is a mean over samples."""
        f = precise(output)
        n = f.shape[0]
        if not isinstance(target, Tensor) or target.shape[:1] != f.shape[:1]:
            given = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise SettingError(
                f"OwnLoss needs targets that are one tensor with a row for each of the {n} samples "
                f"to take these apart, but got {given}: put the samples on axis 0."
            )
        if n == 0:
            return f.new_zeros(0)
        return torch.stack([self._mean(f[i : i + 1], target[i : i + 1]) for i in range(n)])

    def roots(self, output: Tensor, target: Tensor) -> Iterator[Tensor]:
        return iter(self.stacked_roots(output, target))

    def passes(self, output: Tensor) -> int:
        self._given_hessian()
        return precise(output).shape[1:].numel()

    def stacked_roots(self, output: Tensor, target: Tensor) -> Tensor:
        hessian = self._hessian(output, target)
        values, vectors = torch.linalg.eigh(hessian)
        largest = values.abs().amax() if values.numel() else values.new_zeros(())
        # Far more than rounding leaves, as the entries may come from differences of larger numbers.
        allowed = largest * torch.finfo(values.dtype).eps ** 0.5
        if not holds(values >= -allowed):
            raise SettingError(
                f"OwnLoss.output_hessian has the eigenvalue {values.amin():.3g} beside a largest "
                f"of {largest:.3g}, but only a matrix without negative ones is a sum of squares: "
                "use the Hessian of the network instead, or a positive part of output_hessian."
            )
        roots = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # [n, D, root]
        stacked: Tensor = roots.movedim(-1, 0).reshape(roots.shape[-1], *output.shape)
        return stacked

    def draw(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        """The roots added with random signs, of which each sample has its own."""
        roots = self.stacked_roots(output, target)
        shape = (*roots.shape[:2], *[1] * (output.dim() - 1))
        signs = torch.randint(2, shape, generator=generator, device=generator.device)
        return (roots * signs.to(roots).mul_(2).sub_(1)).sum(0)

    def curve(self, output: Tensor, target: Tensor, u: Tensor) -> Tensor:
        hessian = self._hessian(output, target)
        check_direction(output, u)
        lead = u.shape[: u.dim() - output.dim()]
        dtype = torch.promote_types(u.dtype, hessian.dtype)
        rows = u.reshape(*lead, *hessian.shape[:2]).to(dtype)
        return torch.einsum("nij,...nj->...ni", hessian.to(dtype), rows).reshape(u.shape)

    def _mean(self, f: Tensor, target: Any) -> Tensor:
        value = self.function(f, target)
        if not isinstance(value, Tensor) or value.dim() != 0:
            given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise SettingError(
                f"OwnLoss.function returned {given} but must return a tensor with one number: take "
                "the mean over the samples."
            )
        return value

    def _given_hessian(self) -> Callable[[Tensor, Any], Tensor]:
        if self.output_hessian is None:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise SettingError(
                f"The loss {name} has no output_hessian, which Gauss-Newton and Fisher matrices "
                "need: pass OwnLoss(function, output_hessian), or use the Hessian."
            )
        return self.output_hessian

    def _hessian(self, output: Tensor, target: Any) -> Tensor:
        """``Λ``: ``[n, D, D]``, apart from the graph."""
        f = precise(output).detach()
        n, D = f.shape[0], f.shape[1:].numel()
        hessian = self._given_hessian()(f, target)
        if not isinstance(hessian, Tensor) or list(hessian.shape) != [n, D, D]:
            given = list(hessian.shape) if isinstance(hessian, Tensor) else type(hessian).__name__
            raise SettingError(
                f"OwnLoss.output_hessian returned {given} for an output of shape {list(f.shape)} "
                f"but must return the shape {[n, D, D]}: one matrix a sample."
            )
        hessian = hessian.detach().to(f)
        if not holds(hessian.isfinite()):
            raise SettingError(
                "OwnLoss.output_hessian returned entries that are infinite or not a number, but "
                "all must be finite: check the outputs of the network for these."
            )
        # Entries that differ by rounding do no harm, and the mean is then the better of them.
        gap, size = (hessian - hessian.mT).abs(), hessian.abs()
        if hessian.numel() and not holds(gap <= size.amax() * torch.finfo(f.dtype).eps ** 0.5):
            raise SettingError(
                "OwnLoss.output_hessian has entries that differ from their mirror image by "
                f"{gap.amax():.3g}, but second derivatives are symmetric: return such a matrix."
            )
        return (hessian + hessian.mT) / 2
