"""A model, a loss and data: ``L = Σ_batches total / Σ_batches weight``, and its first derivatives.

``L`` is the mean loss over all data as if they were one batch. Sums and their divisor ``W`` are
kept apart until all data are seen, so that batches of any sizes, ignored targets and class weights
give the matrix of the whole. Only ``C`` has another scale: it is the second moment of gradients of
samples, whatever the loss divides by, so that its trace minus ``|∇L|²`` is the gradient's variance.

Several processes hold a part of the data each; sums over them are made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from natgrad.capture.wrappers import Compiled, unwrapped
from natgrad.comm import Communicator, agreement, connect
from natgrad.curvature.losses import as_loss
from natgrad.errors import SettingError
from natgrad.operators import requirements
from natgrad.operators.data import Batch, Data
from natgrad.operators.progress import track
from natgrad.operators.space import ParameterSpace, chosen


class Problem:
    """The mean loss ``L`` of a model over data, as a function of some of its parameters.

    Operators, steps and measures made from one problem share its passes over the data and its
    counts ``N`` (samples) and ``W`` (what the sum of all losses is divided by).

    Arguments:
        model: the network. Wrappers such as DDP and ``torch.compile`` are looked through. Dropout
            and BatchNorm must be in evaluation mode (``model.eval()``), and the parameters all
            float32 or all float64.
        loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits with
            ``reduction="mean"``, as a function, a module or a ``functools.partial``; or any
            function of (output, target) that returns the mean over the samples.
        data: one batch, or an iterable of batches that can be iterated again, such as a
            ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a tuple
            of inputs is passed as several arguments, or a mapping whose ``labels`` are the targets
            and whose other entries are keyword arguments of the model.
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

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        data: Any,
        *,
        parameters: Iterable[str] | str | None = None,
        group: Any = None,
        progress: bool | None = None,
        check: bool = True,
    ) -> None:
        self.comm: Communicator = connect(group)
        requirements.model(model)
        # A matrix is made of eager passes: hooks and second derivatives do not go through compiled
        # code, and data-parallel wrappers would average what is summed here.
        self.model, self.loss, self.data = unwrapped(model), as_loss(loss), Data(data)
        self.parameters = chosen(self.model, parameters)
        self.space = ParameterSpace(self.parameters)
        self._compiled = Compiled(self.model)
        self.progress = progress
        self.check = check
        self.unseen: str | None = None  # not looked for yet
        self._own: tuple[float, float] | None = None  # this process's part of N and W
        self._known: tuple[float, float] | None = None  # N and W
        first = next(iter(self.parameters.values()))
        self.dtype, self.device = requirements.precision(self.parameters), first.device
        with agreement.AllRanksAgree(self.comm, "Problem") as agreed:
            agreed.compared = {"parameters": str(self.space.shapes)}
            self._check()

    @classmethod
    def of(cls, model: nn.Module | Problem, loss: Any, data: Any, **options: Any) -> Problem:
        """A problem as it is, or a new one.

        Arguments:
            model: a problem, which is returned as it is, or a network.
            loss: of the new problem; beside a problem it must be ``None``.
            data: of the new problem; beside a problem it must be ``None``.
            options: the keyword arguments of `Problem`; beside a problem they must have their
                defaults.
        """
        if not isinstance(model, Problem):
            return cls(model, loss, data, **options)
        usual = {"check": True}
        given = [n for n, value in options.items() if value is not usual.get(n)]
        given += [n for n, value in (("loss", loss), ("data", data)) if value is not None]
        if given:
            raise SettingError(
                f"{given[0]} was given beside a Problem, which has its own: leave it out, or make "
                "another Problem."
            )
        return model

    # Passes over the data.

    def batches(self, label: str = "data") -> Iterator[Batch]:
        """One pass over this process's data.

        Arguments:
            label: what the progress bar says.
        """
        return track(self.data, label, self.progress)

    @contextmanager
    def ready(self, *, twice: bool = False) -> Iterator[None]:
        """A context in which gradients are on, for the chosen parameters only.

        Arguments:
            twice: whether gradients will be differentiated again: fused attention kernels have no
                second derivative, so attention is then computed by torch's plain formula.
        """
        frozen = [
            p
            for p in self.model.parameters()
            if p.requires_grad and not any(p is own for own in self.parameters.values())
        ]
        for p in frozen:
            p.requires_grad_(False)
        eager = self._compiled.eager
        self._compiled.run_eagerly(True)
        try:
            with torch.enable_grad():
                if twice:
                    with sdpa_kernel(SDPBackend.MATH):
                        yield
                else:
                    yield
        finally:
            self._compiled.run_eagerly(eager)
            for p in frozen:
                p.requires_grad_(True)

    def output(self, batch: Batch) -> Tensor:
        """The model's output ``[n, …]`` for a batch, checked to be a tensor of samples.

        Arguments:
            batch: as `batches` gives it; the model must return one row for each of its samples.
        """
        out = batch.call(self.model)
        if torch.is_grad_enabled() and not out.requires_grad:
            raise SettingError(
                f"The model's output depends on none of the {len(self.parameters)} chosen "
                f"parameters, such as {self.space.names[0]!r}, so there is no matrix: choose "
                "others, or let gradients through in the model."
            )
        if out.ndim == 0 or len(out) != batch.samples:
            raise SettingError(
                f"The model returned a tensor of shape {list(out.shape)} for {batch.samples} "
                "samples but its first axis must be theirs: return one row for each sample."
            )
        return out

    def totals(self, numbers: Tensor) -> Tensor:
        """``numbers`` summed over all processes, by an all-reduce.

        Arguments:
            numbers: this process's share of the sum, of the same shape on all processes.
        """
        if self.comm.size == 1:
            return numbers
        summed = self.comm.total(numbers.contiguous().flatten(), "curvature").wait()
        return summed.view(numbers.shape)

    # Sizes.

    @property
    def samples(self) -> int:
        """``N``, of all processes."""
        return int(self._sizes()[0])

    @property
    def weight(self) -> float:
        """``W``, what the sum of all losses is divided by."""
        return self._sizes()[1]

    def remember_totals(self, samples: float, weight: float) -> None:
        """What a pass over this process's data has counted in passing. The sum over processes is
        made when it is needed: then all of them do, whichever way their passes went.

        Arguments:
            samples: this process's share of ``N``.
            weight: this process's share of ``W``.
        """
        self._own = samples, weight

    def _sizes(self) -> tuple[float, float]:
        if self._known is None:
            if self._own is None:
                self._sums()
            n, w = self.totals(self._numbers(self._own)).tolist()
            if w <= 0:
                raise SettingError(
                    f"The weights of all targets sum to {w:g}, so there is no mean over them: give "
                    "data with targets that are not all ignored."
                )
            self._known = n, w
        return self._known

    def _numbers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def _sums(self) -> float:
        """The sum of this process's losses; samples and weights are counted."""
        samples, weight, total = 0, 0.0, 0.0
        for batch in self.batches("loss"):
            output = self.output(batch)
            samples += batch.samples
            weight += float(self.loss.weight(output, batch.targets))
            total += float(self.loss.total(output, batch.targets))
        self.remember_totals(samples, weight)
        return total

    # Values and first derivatives.

    def value(self) -> float:
        """``L`` at the parameters as they are now."""
        return float(self.totals(self._numbers([self._sums()]))) / self.weight

    def gradient(self) -> Tensor:
        """``dL/dtheta [P]``."""
        total = torch.zeros(self.space.size, dtype=self.dtype, device=self.device)
        own = list(self.parameters.values())
        with self.ready():
            for batch in self.batches("gradient"):
                loss = self.loss.total(self.output(batch), batch.targets)
                total += self.flat(torch.autograd.grad(loss, own, allow_unused=True))
        return self.totals(total) / self.weight

    def flat(self, tensors: Iterable[Tensor | None]) -> Tensor:
        """``[P]`` of one tensor a parameter, where ``None`` stands for zeros.

        Arguments:
            tensors: one for each parameter, in the order of ``space.names`` and in the parameter's
                shape; ``None`` stands for zeros.
        """
        pairs = zip(tensors, self.parameters.values(), strict=True)
        return torch.cat([(torch.zeros_like(p) if t is None else t).flatten() for t, p in pairs])

    def rows(self, tensors: Iterable[Tensor | None], k: int) -> Tensor:
        """``[k, P]`` of ``[k, *shape]`` for each parameter.

        Arguments:
            tensors: one for each parameter, ``[k, *shape]``; ``None`` stands for zeros.
            k: the number of rows.
        """
        pairs = zip(tensors, self.parameters.values(), strict=True)
        return torch.cat(
            [(p.new_zeros(k, p.numel()) if t is None else t.reshape(k, -1)) for t, p in pairs], 1
        )

    def sample_gradients(self) -> Iterator[Tensor]:
        """``[n, P]`` for each batch of this process: gradients of ``l_n`` with ``L = mean l_n``."""
        from natgrad.operators.sampling import sample_gradients

        scale = self.samples / self.weight
        for rows in sample_gradients(self):
            yield rows * scale

    def state(self) -> tuple[float, ...]:
        """Changes when a parameter or buffer does; by their sums also where ``.data`` hides it."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        sums = torch.stack([t.detach().sum().to(self.dtype) for t in tensors]).tolist()
        return *(t._version for t in tensors), *(t.data_ptr() for t in tensors), *sums

    def _check(self) -> None:
        batch = next(iter(self.data), None)
        if batch is None and self.comm.size == 1:
            raise SettingError(
                "data is empty, so there is nothing to average over: give at least one batch."
            )
        if batch is None or not self.check:
            return
        with torch.no_grad():
            outputs = [self.output(batch) for _ in range(2)]
            self.loss.total(outputs[0], batch.targets)  # which refuses targets that do not fit
        requirements.deterministic(self.model, outputs)
        requirements.mean(self.loss, outputs[0], batch)
