"""A loss as its curvature needs it: ``L = total / weight`` and ``Λ = ∂²total/∂f²`` at the output f.

``total`` and ``weight`` of several batches add up, so that ``Σ total / Σ weight`` is the mean loss
of all of them as if they were one batch, whatever their sizes and however many targets count.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from natgrad.curvature import likelihoods
from natgrad.errors import SettingError


class Loss(ABC):
    """A loss of ``output [n, …]`` and its target, with torch's ``reduction="mean"``.

    Nothing couples two samples, so ``Λ`` has one block ``Λ_n`` a sample, over that sample's
    outputs. Vectors are apart from the output's graph and in float32, or float64 when it is.
    """

    @abstractmethod
    def total(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum over samples and positions: one number, to be differentiated.

        Arguments:
            output: the network's output, ``[n, …]``.
            target: as the loss takes it, for the same ``n`` samples.
        """

    @abstractmethod
    def weight(self, output: Tensor, target: Tensor) -> float:
        """What `total` is divided by to give the mean.

        Arguments:
            output: the network's output, ``[n, …]``.
            target: as the loss takes it, for the same ``n`` samples.
        """

    @abstractmethod
    def sample_totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Each sample's part of `total`: ``[n]``.

        Arguments:
            output: the network's output, ``[n, …]``.
            target: as the loss takes it, for the same ``n`` samples.
        """

    @abstractmethod
    def roots(self, output: Tensor, target: Tensor) -> Iterator[Tensor]:
        """Vectors ``[n, …]`` whose outer products sum, sample by sample, to ``Λ_n``.

        Arguments:
            output: the network's output, ``[n, …]``.
            target: as the loss takes it, for the same ``n`` samples.
        """

    @abstractmethod
    def passes(self, output: Tensor) -> int:
        """How many vectors `roots` yields: the backward passes they cost.

        Arguments:
            output: the network's output, ``[n, …]``.
        """

    @abstractmethod
    def draw(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        """One random ``v [n, …]`` with ``E[v vᵀ] = Λ_n``: the gradient of ``-log p`` at a target
        drawn from the network's own prediction. Only ``generator`` is advanced.

        Arguments:
            output: the network's output, ``[n, …]``.
            target: as the loss takes it, for the same ``n`` samples: only says which positions
                count, and with which weight.
            generator: of the random numbers, on the output's device.
        """

    @abstractmethod
    def curve(self, output: Tensor, target: Tensor, u: Tensor) -> Tensor:
        """``Λ u``.

        Arguments:
            output: the network's output, ``[n, …]``.
            target: as the loss takes it, for the same ``n`` samples.
            u: ``[..., n, …]``: shaped like the output, after any leading axes.
        """

    def stacked_roots(self, output: Tensor, target: Tensor) -> Tensor:
        """All `roots` at once: ``[passes, n, …]``.

        Arguments:
            output: the network's output, ``[n, …]``.
            target: as the loss takes it, for the same ``n`` samples.
        """
        return torch.stack(list(self.roots(output, target)))

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss; not a number when no target counts, as in torch.

        Arguments:
            output: the network's output, ``[n, …]``.
            target: as the loss takes it, for the same ``n`` samples.
        """
        return self.total(output, target) / self.weight(output, target)


def precise(output: Tensor) -> Tensor:
    """The output with its graph, in float32 or better.

    Arguments:
        output: the network's output, ``[n, …]``.
    """
    return likelihoods.precise(output, "loss")


def by_sample(terms: Tensor) -> Tensor:
    """Sums of ``terms [n, …]`` over all axes but the first: ``[n]``.

    Arguments:
        terms: ``[n, …]``.
    """
    # Not -1, which an empty batch leaves undetermined.
    return terms.reshape(terms.shape[0], terms.shape[1:].numel()).sum(1)


def holds(condition: Tensor) -> bool:
    """Whether all of ``condition`` is true, as far as one may look.

    Arguments:
        condition: a tensor of truth values. Under `torch.func` its values cannot be read; then it
            is taken to hold.
    """
    try:
        return bool(condition.all())
    except RuntimeError:  # torch.func.vmap over the targets lets nobody look at them
        return True


def check_direction(output: Tensor, u: Tensor) -> None:
    """Refuse a direction that is not shaped like the output.

    Arguments:
        output: the network's output, ``[n, …]``.
        u: ``[..., n, …]``.
    """
    if u.shape[-output.dim() :] != output.shape:
        raise SettingError(
            f"The vector to curve has the shape {list(u.shape)}, which must end with that of the "
            f"output, {list(output.shape)}: put all other axes in front."
        )


def check_weights(name: str, weights: object) -> None:
    """Refuse what is neither None nor a tensor of finite weights ``≥ 0``, without which ``Λ`` would
    have no roots.

    Arguments:
        name: of the setting, for the error sentence.
        weights: what the user gave.
    """
    if weights is None:
        return
    if not isinstance(weights, Tensor) or weights.is_complex() or weights.dtype == torch.bool:
        given = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise SettingError(f"{name} is of type {given} but must be a tensor of real numbers.")
    if not holds((weights >= 0) & (weights < torch.inf)):
        raise SettingError(
            f"{name} holds {_worst(weights)}, but weights must be finite and not below 0."
        )


def _worst(weights: Tensor) -> float:
    values = weights.detach().flatten()
    return float(values[~((values >= 0) & (values < torch.inf))][0])
