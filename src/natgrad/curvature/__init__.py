"""Which output gradients are averaged: Fisher matrices, likelihoods, and losses.

    fisher         vectors ``v`` with ``F = mean Σ (Jᵀ v)(Jᵀ v)ᵀ``: empirical, Monte-Carlo or exact
    gauss_newton   the same for squared residuals, whatever they are computed from
    likelihoods    ``-log p(y | f)`` of outputs ``f``: draws of ``y``, and exact vectors
    loss           `Loss`: ``total / weight``, and the roots of ``Λ = ∂²total/∂f²``
    losses         `as_loss`, which recognises torch's losses
    subsample      which samples of a batch enter, where that is a share of them

K-FAC needs only `fisher`; operators over all data also need to know what a loss is a mean over.
"""

from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from natgrad.curvature.gauss_newton import GaussNewton
from natgrad.curvature.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from natgrad.curvature.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Loss,
    OwnLoss,
    SquareLoss,
    as_loss,
)
from natgrad.curvature.subsample import Subsample

__all__ = [
    "Bernoulli",
    "BinaryCrossEntropy",
    "Categorical",
    "CrossEntropy",
    "EmpiricalFisher",
    "ExactFisher",
    "Fisher",
    "GaussNewton",
    "Gaussian",
    "Likelihood",
    "Loss",
    "MonteCarloFisher",
    "OwnLoss",
    "SquareLoss",
    "Subsample",
    "as_loss",
]
