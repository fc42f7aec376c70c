"""Curvature matrices of a model over data, as linear operators: H, G, F and C.

``L`` is the mean loss over all data, ``J`` the Jacobian of the model's outputs.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from natgrad.capture.discovery import StructureOf
from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from natgrad.operators.base import Operator
from natgrad.operators.compare import compare, cosine
from natgrad.operators.estimators import LOBPCG, Hutchinson, HutchPP, Lanczos, XTrace
from natgrad.operators.hessian import Hessian
from natgrad.operators.hessian_blocks import build_hessian
from natgrad.operators.layer_blocks import block_norms, cross_block
from natgrad.operators.outer import OuterProducts
from natgrad.operators.problem import Problem
from natgrad.operators.spectrum import Spectrum
from natgrad.operators.steps import (
    apply_,
    gauss_newton,
    gram_gauss_newton,
    natural_gradient,
    powered_gradient,
)
from natgrad.operators.structured import Structured, build
from natgrad.operators.vectors import Roots, Vectors, vectors_of

__all__ = [
    "LOBPCG",
    "HutchPP",
    "Hutchinson",
    "Lanczos",
    "Operator",
    "Problem",
    "Spectrum",
    "Structured",
    "XTrace",
    "apply_",
    "block_norms",
    "compare",
    "cosine",
    "cross_block",
    "fisher",
    "gauss_newton",
    "ggn",
    "gram_gauss_newton",
    "hessian",
    "natural_gradient",
    "powered_gradient",
]


def hessian(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    structure: StructureOf = None,
    parameters: Iterable[str] | str | None = None,
    group: Any = None,
    progress: bool | None = None,
    check: bool = True,
) -> Operator:
    """``H = ∇²L``, the Hessian of the mean loss.

    Arguments:
        model: the network, or a `Problem`, which brings loss, data and parameters along: leave
            these out then, since one given beside it raises `SettingError`. Dropout and BatchNorm
            must be in evaluation mode (``model.eval()``).
        loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits with
            ``reduction="mean"``, as a function, a module or a ``functools.partial``; or any
            function of (output, target) that returns the mean over the samples.
        data: one batch, or an iterable of batches that can be iterated again, such as a
            ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a tuple
            of inputs is passed as several arguments, or a mapping whose ``labels`` are the targets
            and whose other entries are keyword arguments of the model.
        structure: what is kept of the block of each layer, such as ``Kronecker()`` or
            ``Diagonal()``, or a function from layer to structure; every parameter must then belong
            to a known layer. ``None`` keeps the whole matrix, which is not written out but known by
            its products with vectors.
        parameters: one pattern of parameter names (``fnmatch``, such as ``"head.*"``) or several,
            each of which must match a trainable parameter; ``None`` takes all trainable parameters.
        group: the processes among which the data are divided: a ``ProcessGroup``, a ``DeviceMesh``
            or a `Communicator`; ``None`` takes all processes.
        progress: whether passes over the data that take more than a second show a progress bar (by
            ``rich``, if it is installed); ``None`` shows one if standard error is a terminal.
        check: whether it is tested, by two forward passes of the first batch, that the model is
            deterministic and a loss function of your own a mean over samples, and, for what is made
            layer by layer, that the layers' gradients are those of autograd.
    """
    options = {"parameters": parameters, "group": group, "progress": progress, "check": check}
    problem = Problem.of(model, loss, data, **options)
    return Hessian(problem) if structure is None else build_hessian(problem, structure)


def ggn(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    structure: StructureOf = None,
    parameters: Iterable[str] | str | None = None,
    group: Any = None,
    progress: bool | None = None,
    check: bool = True,
) -> Operator:
    """``G = mean Jᵀ (∂²loss/∂output²) J``, the generalised Gauss-Newton matrix.

    Arguments:
        model: the network, or a `Problem`, which brings loss, data and parameters along: leave
            these out then, since one given beside it raises `SettingError`. Dropout and BatchNorm
            must be in evaluation mode (``model.eval()``).
        loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits with
            ``reduction="mean"``, as a function, a module or a ``functools.partial``; or any
            function of (output, target) that returns the mean over the samples. Such a function has
            no Gauss-Newton matrix unless its second derivatives come with it, ``OwnLoss(function,
            output_hessian)``.
        data: one batch, or an iterable of batches that can be iterated again, such as a
            ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a tuple
            of inputs is passed as several arguments, or a mapping whose ``labels`` are the targets
            and whose other entries are keyword arguments of the model.
        structure: what is kept of the block of each layer, such as ``Kronecker()`` or
            ``Diagonal()``, or a function from layer to structure; every parameter must then belong
            to a known layer. ``None`` keeps the whole matrix, which is not written out but known by
            its products with vectors.
        parameters: one pattern of parameter names (``fnmatch``, such as ``"head.*"``) or several,
            each of which must match a trainable parameter; ``None`` takes all trainable parameters.
        group: the processes among which the data are divided: a ``ProcessGroup``, a ``DeviceMesh``
            or a `Communicator`; ``None`` takes all processes.
        progress: whether passes over the data that take more than a second show a progress bar (by
            ``rich``, if it is installed); ``None`` shows one if standard error is a terminal.
        check: whether it is tested, by two forward passes of the first batch, that the model is
            deterministic and a loss function of your own a mean over samples, and, for what is made
            layer by layer, that the layers' gradients are those of autograd.
    """
    options = {"parameters": parameters, "group": group, "progress": progress, "check": check}
    problem = Problem.of(model, loss, data, **options)
    return _outer(problem, Roots(), structure, "GGN")


def fisher(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    curvature: Fisher = ExactFisher(),  # noqa: B008 (frozen)
    structure: StructureOf = None,
    parameters: Iterable[str] | str | None = None,
    group: Any = None,
    progress: bool | None = None,
    check: bool = True,
) -> Operator:
    """``F = mean E[∇log p ∇log pᵀ]``, the Fisher matrix of the likelihood that belongs to the loss.

    Arguments:
        model: the network, or a `Problem`, which brings loss, data and parameters along: leave
            these out then, since one given beside it raises `SettingError`. Dropout and BatchNorm
            must be in evaluation mode (``model.eval()``).
        loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits with
            ``reduction="mean"``, as a function, a module or a ``functools.partial``; or any
            function of (output, target) that returns the mean over the samples. Such a function has
            no Fisher matrix, except the empirical one, unless its second derivatives come with it,
            ``OwnLoss(function, output_hessian)``.
        data: one batch, or an iterable of batches that can be iterated again, such as a
            ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a tuple
            of inputs is passed as several arguments, or a mapping whose ``labels`` are the targets
            and whose other entries are keyword arguments of the model.
        curvature: which targets the expectation is over: all that the model may predict
            (``ExactFisher()``), some that are drawn from its prediction
            (``MonteCarloFisher(samples, seed)``, which refuses a ``DataLoader`` that shuffles), or
            those of the data (``EmpiricalFisher()``, which gives ``C``). The loss says what the
            likelihood is; another one named here raises.
        structure: what is kept of the block of each layer, such as ``Kronecker()`` or
            ``Diagonal()``, or a function from layer to structure; every parameter must then belong
            to a known layer. ``None`` keeps the whole matrix, which is not written out but known by
            its products with vectors.
        parameters: one pattern of parameter names (``fnmatch``, such as ``"head.*"``) or several,
            each of which must match a trainable parameter; ``None`` takes all trainable parameters.
        group: the processes among which the data are divided: a ``ProcessGroup``, a ``DeviceMesh``
            or a `Communicator`; ``None`` takes all processes.
        progress: whether passes over the data that take more than a second show a progress bar (by
            ``rich``, if it is installed); ``None`` shows one if standard error is a terminal.
        check: whether it is tested, by two forward passes of the first batch, that the model is
            deterministic and a loss function of your own a mean over samples, and, for what is made
            layer by layer, that the layers' gradients are those of autograd.
    """
    options = {"parameters": parameters, "group": group, "progress": progress, "check": check}
    problem = Problem.of(model, loss, data, **options)
    vectors = vectors_of(curvature, problem)
    names = {EmpiricalFisher: "empirical Fisher", MonteCarloFisher: "Monte-Carlo Fisher"}
    return _outer(problem, vectors, structure, names.get(type(curvature), "Fisher"))


def _outer(problem: Problem, vectors: Vectors, structure: StructureOf, kind: str) -> Operator:
    if structure is None:
        return OuterProducts(problem, vectors, kind)
    return build(problem, vectors, structure, kind)
