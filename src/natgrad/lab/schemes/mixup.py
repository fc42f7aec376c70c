"""Running mixup, ``x̃ₜ = λ xₜ + (1-λ) x̃ₜ₋₁`` and ``ỹₜ = λ yₜ + (1-λ) ỹₜ₋₁``, ``λ ~ Beta(α, α)``."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.checks import POSITIVE, check_whole, number
from natgrad.errors import CheckpointError, SettingError
from natgrad.lab.schemes.beta_draws import check_generator, numpy_generator
from natgrad.lab.schemes.soft_targets import check_distributions, one_hot


class RunningMixup:
    """Mixes each batch with the one that it made of the batch before (Osawa 2019, eq. 9 and 10).

    ``inputs, targets = mixup(inputs, targets)``, then `soft_cross_entropy`. Every sample has a
    ``λ`` of its own. The first batch is mixed with nothing.

    Arguments:
        alpha: ``α > 0`` of ``Beta(α, α)``, from which the share of the new sample is drawn.
        classes: that labels may be of.
        generator: of the random numbers, on the CPU; ``None`` is torch's own.
        mostly_new: whether ``max(λ, 1-λ)`` is taken, so that the new sample has the larger share.
    """

    def __init__(
        self,
        alpha: float,
        classes: int,
        generator: torch.Generator | None = None,
        *,
        mostly_new: bool = False,
    ) -> None:
        self.alpha = number(alpha, "RunningMixup.alpha", POSITIVE)
        check_whole(classes, "RunningMixup.classes", low=1)
        check_generator(generator, "RunningMixup")
        self.classes, self.generator, self.mostly_new = classes, generator, mostly_new
        self._inputs: Tensor | None = None
        self._targets: Tensor | None = None

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs ``[n, …]``, and labels ``[n, …]`` or distributions ``[n, classes, …]``; returns
        inputs and distributions. A batch larger than the last one meets its samples again."""
        if not inputs.is_floating_point():
            raise SettingError(
                f"inputs are of dtype {inputs.dtype} but must be floating-point to be mixed: "
                "convert them first, as in images.float() / 255."
            )
        inputs, targets = inputs.detach(), targets.detach()
        if not targets.is_floating_point():
            targets = one_hot(targets, self.classes, inputs.dtype)
        check_distributions(targets, self.classes)
        if len(inputs) != len(targets):
            raise SettingError(
                f"There are {len(inputs)} inputs and {len(targets)} targets but must be as many "
                "of one as of the other: pass those of one batch."
            )
        if self._inputs is not None and self._targets is not None and len(self._inputs):
            share = self._shares(len(inputs))
            inputs = _mixed(inputs, self._inputs, share, "inputs")
            targets = _mixed(targets, self._targets, share, "targets")
        # Copies: what others do in place to a batch, such as erasing, is not for the next one.
        self._inputs, self._targets = inputs.clone(), targets.clone()
        return inputs, targets

    def _shares(self, n: int) -> Tensor:
        """The shares ``λ [n]`` of the new samples."""
        share = numpy_generator(self.generator).beta(self.alpha, self.alpha, n)
        return torch.from_numpy(np.maximum(share, 1 - share) if self.mostly_new else share)

    def reset(self) -> None:
        """Forget the last batch: the next one is mixed with nothing."""
        self._inputs = self._targets = None

    def state_dict(self) -> dict[str, Tensor | None]:
        """The last mixed batch; the state of ``generator`` is its owner's to save."""
        return {"inputs": self._inputs, "targets": self._targets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch that was mixed last.

        Arguments:
            state: what `state_dict` has returned.
        """
        if state.keys() != {"inputs", "targets"}:
            raise CheckpointError(
                f"The state of a RunningMixup has the entries {sorted(state)} but must have "
                "'inputs' and 'targets': pass what its state_dict() returned."
            )
        self._inputs, self._targets = state["inputs"], state["targets"]


def _mixed(new: Tensor, last: Tensor, share: Tensor, name: str) -> Tensor:
    """``λ new + (1-λ) last``, sample by sample; ``new [n, …]``, ``last [m, …]``, ``share [n]``."""
    if new.shape[1:] != last.shape[1:]:
        raise SettingError(
            f"The {name} of a sample are of shape {list(new.shape[1:])} but were of shape "
            f"{list(last.shape[1:])} in the batch before, with which they are mixed: make them of "
            "one size, or call reset() between the two."
        )
    if len(last) != len(new):
        last = last[torch.arange(len(new), device=last.device) % len(last)]
    share = share.to(new).reshape(-1, *[1] * (new.ndim - 1))
    return share * new + (1 - share) * last.to(new)
