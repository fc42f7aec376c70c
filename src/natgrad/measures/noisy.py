"""Noisy natural gradient: train the mean of a Gaussian over weights, whose shape K-FAC knows.

With N training samples (or terms of their losses, such as tokens), prior precision tau and
temperature T (the weight of the KL divergence), the Gaussian that is nearest to the posterior has
the covariance ``T/N (F + T tau/N I)^-1``. Every gradient is taken at weights drawn from it, and
moves the mean by K-FAC's step ``(F + damping I)^-1 (∇L(drawn) + T tau/N mean)`` (Zhang
et al. 2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.capture.wrappers import unscale
from natgrad.checks import POSITIVE, check_whole, number
from natgrad.comm.layouts import is_sharded
from natgrad.damping import Relative
from natgrad.errors import CheckpointError, SettingError
from natgrad.inverses import Diagonalization
from natgrad.linalg.matrix_free import generator_of
from natgrad.preconditioner import KFAC


class NoisyKFAC:
    """Around a ``KFAC``, whose ``step`` it takes over::

        noisy = NoisyKFAC(kfac, samples=len(train_set))
        for x, y in loader:
            optimizer.zero_grad()
            with noisy:  # or noisy.sample() before and noisy.restore() after
                F.cross_entropy(model(x), y).backward()
            noisy.step()
            optimizer.step()

    A layer whose curvature is not known yet, and parameters that K-FAC does not cover, stay at the
    mean. The prior is part of ``step``, so the optimizer should have no weight decay.

    Arguments:
        kfac: made as always, with ``inverse=Eigen()`` and without FSDP. Its damping must be at
            least ``temperature * prior_precision / (samples * terms_per_sample)``, or `step`
            raises; on several ranks it needs ``placement=CommOpt()``.
        samples: ``N``, the number of training samples; ``terms_per_sample`` of K-FAC's loss is
            counted by itself.
        prior_precision: ``tau > 0`` of a Gaussian prior around 0, ``1 / variance``.
        temperature: ``T > 0``, the weight of the KL divergence; 1 is Bayes' rule, less is a colder
            posterior.
        seed: of the weights that are drawn; the same on all ranks.
    """

    def __init__(
        self,
        kfac: KFAC,
        samples: int,
        *,
        prior_precision: float = 1.0,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        _check(kfac)
        check_whole(samples, "samples", 1)
        self.kfac, self.samples = kfac, samples
        self.prior_precision = number(prior_precision, "prior_precision", POSITIVE)
        self.temperature = number(temperature, "temperature", POSITIVE)
        self._generator = generator_of(seed)
        self._means: dict[nn.Parameter, Tensor] = {}
        self._drawn = False

    @property
    def damping(self) -> float:
        """``T tau/N``, the prior's share of the precision; K-FAC's damping is at least this."""
        return self.temperature * self.prior_precision / self._terms

    @property
    def _terms(self) -> float:
        """Of the losses of all samples; K-FAC's curvature is that of one of them."""
        return self.samples * self.kfac.settings.terms_per_sample

    # Weights.

    @torch.no_grad()
    def sample(self) -> None:
        """Give the model weights from the posterior, until ``restore()``."""
        if self._drawn:
            raise SettingError(
                "The weights are a sample already: call restore() before the next sample(), or use "
                "`with noisy:`, which does so even after an exception."
            )
        ready = [block for block in self.kfac.blocks if block.ready]
        changes = [(block, self._noise(block)) for block in ready]
        self._means = {p: p.detach().clone() for block in ready for p in block.parameters}
        self._drawn = True
        try:
            for block, noise in changes:
                _add(block, noise)
        except BaseException:
            self.restore()
            raise

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model the mean back, bit for bit."""
        for p, mean in self._means.items():
            p.copy_(mean)
        self._means, self._drawn = {}, False

    def __enter__(self) -> NoisyKFAC:
        self.sample()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    # Steps.

    @torch.no_grad()
    def step(self, samples: int | None = None) -> None:
        """Add the prior's gradient and precondition. Call it before ``optimizer.step()``.

        Arguments:
            samples: in this step's batch on this rank, as `KFAC.step` takes it; ``None`` takes the
                number the model was called with.
        """
        if self._drawn:
            raise SettingError(
                "step() moves the mean, but the weights are a sample: leave the `with noisy:` "
                "block or call restore() first."
            )
        kfac = self.kfac
        now = kfac.settings.at(kfac.steps)
        for block in kfac.blocks:
            own = now.damping_of(block)
            if isinstance(own, Relative) or own < self.damping * (1 - 1e-9):
                raise SettingError(
                    f"K-FAC's damping of {block.name!r} is {own} but must be a number and at least "
                    f"the prior's own, temperature * prior_precision / samples = "
                    f"{self.damping:g}: give KFAC(damping=...) more, or the prior less precision."
                )
        unscale(kfac.scaler, kfac.rates.optimizers)
        scale = kfac.finding.gradient_scale(max(1, samples or kfac.capture.samples() or 0))
        for p in kfac.model.parameters():
            if p.grad is not None:
                p.grad.add_(p.to(p.grad.dtype), alpha=self.damping / scale)
        kfac.step(samples)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where the random numbers are; the rest is in the states of model and K-FAC."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the random numbers of a saved state.

        Arguments:
            state: what `state_dict` has returned.
        """
        if set(state) != {"generator"} or not isinstance(state["generator"], Tensor):
            raise CheckpointError(
                f"The state has the keys {sorted(map(str, state))} but that of a NoisyKFAC has "
                "'generator', a tensor: load what its state_dict() gave."
            )
        self._generator.set_state(state["generator"].cpu())

    def _noise(self, block: Block) -> Tensor:
        """A draw of ``N(0, T/N (F + damping I)^-1)`` in the shape of the block's matrix."""
        missing = [name for name in block.structure.needs if name not in block.parts]
        if missing:
            raise SettingError(
                f"The decomposition of {block.kind} {block.name!r} is on other ranks, so that its "
                "weights cannot be drawn here: use Distributed(placement=natgrad.CommOpt())."
            )
        z = torch.randn(block.shape, generator=self._generator, dtype=torch.float64)
        z = z.to(block.device, block.wide_dtype)
        root = block.decomposed().apply(lambda values: (values + self.damping).rsqrt(), z)
        return root * math.sqrt(self.temperature / self._terms)


def _add(block: Block, noise: Tensor) -> None:
    layer, first = block.layers[0], block.parameters[0]
    w = torch.zeros(block.shape, dtype=first.dtype, device=first.device)
    layer.load(w, lambda p: p.detach())
    layer.store(w + noise.to(w), lambda p: p.detach())


def _check(kfac: object) -> None:
    if not isinstance(kfac, KFAC):
        raise SettingError(
            f"NoisyKFAC is around a {type(kfac).__name__} but must be around a natgrad.KFAC: make "
            "one of the model and its optimizer."
        )
    for block in kfac.blocks:
        if not isinstance(block.inverse, Diagonalization):
            raise SettingError(
                f"NoisyKFAC draws from eigenvalues, which {block.inverse!r} does not give for "
                f"{block.name!r}: use KFAC(..., inverse=natgrad.Eigen())."
            )
        if any(is_sharded(p) for p in block.parameters):
            raise SettingError(
                f"The weights of {block.name!r} are spread over ranks, so that no rank can draw "
                "them: use DDP or a plain model."
            )
