"""What earlier tasks know of the weights: ``1/2 (theta - theta*)ᵀ Λ (theta - theta*)``.

The posterior of all tasks so far, ``N(theta*, Λ^-1)``, is the prior of the next one. ``theta*`` is
where the last training ended, with the penalty in its loss, and ``Λ = tau I + Σ_t W_t F_t`` adds up
the curvature of every task there, so that nothing is counted twice (Kirkpatrick et al. 2017 with a
diagonal; Ritter et al. 2018b with Kronecker factors; Huszár 2018 on adding up). For
linear models and Gaussian noise the last task's optimum is that of all tasks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.discovery import StructureOf
from natgrad.checks import NOT_NEGATIVE, number
from natgrad.curvature.fisher import ExactFisher, Fisher
from natgrad.errors import CheckpointError, SettingError
from natgrad.linalg.symmetric import (
    DenseBlocks,
    DiagonalMatrix,
    KroneckerProduct,
    Rotated,
    Symmetric,
)
from natgrad.measures.displaced_parameters import position
from natgrad.measures.matrix_choice import scale_of_sum
from natgrad.operators import Problem, Structured, fisher
from natgrad.operators.space import chosen
from natgrad.structures import Kronecker

# What a saved matrix is made of; None stands for the identity.
_KINDS: dict[str, tuple[type[Symmetric], tuple[str, ...]]] = {
    "dense": (DenseBlocks, ("values",)),
    "diagonal": (DiagonalMatrix, ("values",)),
    "kronecker": (KroneckerProduct, ("g", "a")),
    "rotated": (Rotated, ("q_g", "q_a", "values")),
}


@dataclass(frozen=True, eq=False)
class _Term:
    """``scale * matrix`` over the entries ``index`` of a flat vector."""

    scale: float
    matrix: Symmetric
    index: Tensor

    def __post_init__(self) -> None:
        _ = self.kind

    @property
    def kind(self) -> str:
        for kind, (cls, _) in _KINDS.items():
            if type(self.matrix) is cls:
                return kind
        raise SettingError(
            f"The structure's matrix is a {type(self.matrix).__name__} but only "
            f"{[cls.__name__ for cls, _ in _KINDS.values()]} can be kept: use another structure."
        )

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self.matrix, name) for name in _KINDS[self.kind][1]}

    def like(self, other: Tensor) -> _Term:
        """With the dtype and on the device of another tensor."""
        one = next(t for t in self.tensors.values() if t is not None)
        if one.device == other.device and one.dtype == other.dtype:
            return self
        tensors = [None if t is None else t.to(other) for t in self.tensors.values()]
        matrix = _KINDS[self.kind][0](*tensors)
        return _Term(self.scale, matrix, self.index.to(other.device))


class CurvaturePrior:
    """A quadratic penalty that remembers earlier tasks, one object for a sequence of them::

        prior = CurvaturePrior()
        for task in tasks:
            ...  # train on mean loss + prior.penalty(model) / number of terms in the mean
            prior.add(model, loss, task)

    The penalty is in units of the sum of losses over a task's data.

    Arguments:
        structure: what is kept of the curvature of each layer, or a function from layer to
            structure; ``Full()`` keeps all within a layer. ``None`` raises, as layers are kept
            apart between tasks.
        prior_precision: ``tau ≥ 0`` of a Gaussian prior around 0, before the first task.
        parameters: one pattern of parameter names (``fnmatch``, such as ``"body.*"``) or several;
            ``None`` takes all trainable parameters. Leave out heads that belong to one task alone.
    """

    def __init__(
        self,
        structure: StructureOf = Kronecker(),  # noqa: B008 (frozen)
        *,
        prior_precision: float = 0.0,
        parameters: Iterable[str] | str | None = None,
    ) -> None:
        if structure is None:
            raise SettingError(
                "CurvaturePrior has structure=None, the matrix of all parameters, but keeps those "
                "of layers between tasks: give a structure, Full() for all within a layer."
            )
        self.structure = structure
        self.prior_precision = number(prior_precision, "prior_precision", NOT_NEGATIVE)
        one = (parameters,) if isinstance(parameters, str) else parameters
        self.parameters = None if one is None else tuple(one)
        self.tasks = 0
        self._terms: list[_Term] = []
        self._mean: dict[str, Tensor] = {}

    def add(
        self,
        model: nn.Module,
        loss: Any,
        data: Any,
        *,
        importance: float = 1.0,
        curvature: Fisher = ExactFisher(),  # noqa: B008 (frozen)
        group: Any = None,
        progress: bool | None = None,
        check: bool = True,
    ) -> None:
        """After training on a task: add its curvature and move the mean to the weights as they are
        now.

        Arguments:
            model: the network, trained on the task, with dropout and BatchNorm in evaluation mode;
                its chosen parameters must be those of earlier tasks.
            loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits
                with ``reduction="mean"``, as a function, a module or a ``functools.partial``; or
                any function of (output, target) that returns the mean over the samples. Such a
                function has no Fisher matrix, except the empirical one, unless its second
                derivatives come with it, ``OwnLoss(function, output_hessian)``.
            data: those of the task. One batch, or an iterable of batches that can be iterated
                again, such as a ``DataLoader``; an iterator is refused. A batch is ``(inputs,
                targets)``, where a tuple of inputs is passed as several arguments, or a mapping
                whose ``labels`` are the targets and whose other entries are keyword arguments of
                the model.
            importance: ``≥ 0``, what the task's curvature is multiplied by; 1 is Bayes' rule, 0
                only moves the mean.
            curvature: which Fisher matrix: ``ExactFisher()``, ``MonteCarloFisher(samples, seed)``
                or ``EmpiricalFisher()``.
            group: the processes among which the data are divided: a ``ProcessGroup``, a
                ``DeviceMesh`` or a `Communicator`; ``None`` takes all processes.
            progress: whether passes over the data that take more than a second show a progress bar
                (by ``rich``, if it is installed); ``None`` shows one if standard error is a
                terminal.
            check: whether it is tested, by two forward passes of the first batch, that the model is
                deterministic and a loss function of your own a mean over samples, and, for what is
                made layer by layer, that the layers' gradients are those of autograd.
        """
        importance = number(importance, "importance", NOT_NEGATIVE)
        problem = Problem(
            model,
            loss,
            data,
            parameters=self.parameters,
            group=group,
            progress=progress,
            check=check,
        )
        self._check(dict(problem.parameters))
        matrix = fisher(problem, curvature=curvature, structure=self.structure)
        assert isinstance(matrix, Structured)
        scale = importance * scale_of_sum(problem, curvature)
        new = [_Term(scale, placed.matrix, placed.index) for placed in matrix.blocks.values()]
        for term in new:
            self._add(term)
        self._mean = problem.space.named(position(problem))
        self.tasks += 1

    def penalty(self, model: nn.Module) -> Tensor:
        """The penalty as one number, to be differentiated; ``tau/2 |theta|²`` before the first
        task.

        Arguments:
            model: the network in training; its chosen parameters must have the names and shapes of
                earlier tasks.
        """
        own = chosen(model, self.parameters)
        self._check(own)
        flat = torch.cat([p.flatten() for p in own.values()])
        if self._mean:
            flat = flat - torch.cat([t.flatten() for t in self._mean.values()]).to(flat)
        total = self.prior_precision * flat.square().sum()
        self._terms = [term.like(flat) for term in self._terms]
        for term in self._terms:
            d = flat[term.index].unsqueeze(0)
            total = total + term.scale * (d * term.matrix.product(d)).sum()
        return total / 2

    def _add(self, new: _Term) -> None:
        """Matrices that are kept entry by entry add up; a sum of products is none, so these stay
        side by side."""
        for i, old in enumerate(self._terms):
            a, b = old.matrix, new.matrix
            same = type(a) is type(b) and torch.equal(old.index, new.index)
            if same and isinstance(a, DenseBlocks | DiagonalMatrix):
                assert isinstance(b, DenseBlocks | DiagonalMatrix)
                together = type(a)(old.scale * a.values + new.scale * b.values)
                self._terms[i] = _Term(1.0, together, old.index)
                return
        self._terms.append(new)

    def _check(self, own: Mapping[str, Tensor]) -> None:
        known, given = ([(n, list(t.shape)) for n, t in d.items()] for d in (self._mean, own))
        if known and known != given:
            odd = next((one for one in given if one not in known), None)
            what = f"has {odd[0]!r} of shape {odd[1]}, which they had not" if odd else "lacks some"
            raise SettingError(
                f"The model does not have the {len(known)} parameters of earlier tasks, such as "
                f"{known[0][0]!r} of shape {known[0][1]}: it {what}. Leave out what tasks do not "
                "share with CurvaturePrior(parameters=[...])."
            )

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings, for ``torch.load(weights_only=True)``."""
        terms = [
            {"kind": term.kind, "scale": term.scale, "index": term.index, **term.tensors}
            for term in self._terms
        ]
        return {
            "tasks": self.tasks,
            "prior_precision": self.prior_precision,
            "mean": dict(self._mean),
            "terms": terms,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the tasks that were saved; a state that does not fit changes nothing.

        Arguments:
            state: what `state_dict` has returned; anything else raises `CheckpointError`. It brings
                the prior precision along, but neither structure nor ``parameters``.
        """
        missing = {"tasks", "prior_precision", "mean", "terms"} ^ set(state)
        if missing:
            raise CheckpointError(
                f"The state lacks or has too much of {sorted(missing)}: load what "
                "CurvaturePrior.state_dict() gave."
            )
        terms = []
        for saved in state["terms"]:
            cls, names = _KINDS.get(saved["kind"], (None, ()))
            if cls is None:
                raise CheckpointError(
                    f"The state has a matrix of the kind {saved['kind']!r} but only "
                    f"{list(_KINDS)} are known: load what CurvaturePrior.state_dict() gave."
                )
            matrix = cls(*(saved[name] for name in names))
            terms.append(_Term(saved["scale"], matrix, saved["index"]))
        self._terms, self._mean = terms, dict(state["mean"])
        self.tasks, self.prior_precision = state["tasks"], state["prior_precision"]

    def __repr__(self) -> str:
        size = sum(t.numel() for t in self._mean.values())
        return f"<CurvaturePrior of {self.tasks} tasks over {size:,} parameters>"
