"""What is read from curvature matrices, and other measures of a trained network: one file each.

    sharpness, tic, noise, gradient_variance, fisher_rao    curvature and noise at a minimum
    spectral_bound, path_norm, pac_bayes, noisy_loss        capacity, and bounds on generalisation
    laplace, predictive, noisy, continual                   Gaussian posteriors over weights
    influence, hypergradient                                what changes if data or settings do

Most take ``(model, loss, data)`` or a `natgrad.operators.Problem`, which several measures share.
"""

from natgrad.measures.bounds import catoni, mcallester, seeger
from natgrad.measures.classes import mistakes
from natgrad.measures.continual import CurvaturePrior
from natgrad.measures.fisher_rao import fisher_rao
from natgrad.measures.gradient_variance import GradientVariance, gradient_variance
from natgrad.measures.hypergradient import (
    Hypergradient,
    ParameterResponse,
    hypergradient,
    parameter_response,
)
from natgrad.measures.influence import Influence, influence, pairwise_influence, self_influence
from natgrad.measures.laplace import Laplace
from natgrad.measures.linear_maps import spectral_norm
from natgrad.measures.noise import NoiseScale, noise_scale
from natgrad.measures.noisy import NoisyKFAC
from natgrad.measures.noisy_loss import Isotropic, MagnitudeAware, Tolerated, tolerated_sigma
from natgrad.measures.pac_bayes import PacBayes, pac_bayes
from natgrad.measures.path_norm import path_norm
from natgrad.measures.predictive import Linearised, MonteCarlo, Prediction
from natgrad.measures.sample_traces import Signs, Subset
from natgrad.measures.sharpness import AdaptiveBall, Ball, Rise, Sharpness, rise, sharpness
from natgrad.measures.solvers import ConjugateGradients, KroneckerInverse, Neumann
from natgrad.measures.spectral_bound import SpectralBound, spectral_bound
from natgrad.measures.tic import TIC, tic

__all__ = [
    "TIC",
    "AdaptiveBall",
    "Ball",
    "ConjugateGradients",
    "CurvaturePrior",
    "GradientVariance",
    "Hypergradient",
    "Influence",
    "Isotropic",
    "KroneckerInverse",
    "Laplace",
    "Linearised",
    "MagnitudeAware",
    "MonteCarlo",
    "Neumann",
    "NoiseScale",
    "NoisyKFAC",
    "PacBayes",
    "ParameterResponse",
    "Prediction",
    "Rise",
    "Sharpness",
    "Signs",
    "SpectralBound",
    "Subset",
    "Tolerated",
    "catoni",
    "fisher_rao",
    "gradient_variance",
    "hypergradient",
    "influence",
    "mcallester",
    "mistakes",
    "noise_scale",
    "pac_bayes",
    "pairwise_influence",
    "parameter_response",
    "path_norm",
    "rise",
    "seeger",
    "self_influence",
    "sharpness",
    "spectral_bound",
    "spectral_norm",
    "tic",
    "tolerated_sigma",
]
