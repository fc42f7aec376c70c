"""A model, a loss and data: ``L = Σ_batches total / Σ_batches weight``, and its first derivatives.

``L`` is the mean loss over all data as if they were one batch, however they are cut into batches.
Several processes hold a part of the data each; sums over them are made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from natgrad.comm import Communicator, connect
from natgrad.curvature.losses import as_loss
from natgrad.errors import SettingError
from natgrad.operators import checks
from natgrad.operators.data import Batch, Data
from natgrad.operators.progress import track
from natgrad.operators.space import Space, chosen
from natgrad.runtime import agreement
from natgrad.runtime.wrappers import Compiled, unwrapped


class Problem:
    """``parameters``: patterns of names, for a matrix over some of the trainable parameters.

    ``check=False`` leaves out the forward passes that tell whether the model is deterministic and
    the loss a mean over samples. ``group``: of the processes that hold the data together.
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
        checks.model(model)
        # A matrix is made of eager passes: hooks and second derivatives do not go through compiled
        # code, and data-parallel wrappers would average what is summed here.
        self.model, self.loss, self.data = unwrapped(model), as_loss(loss), Data(data)
        self.parameters = chosen(self.model, parameters)
        self.space = Space(self.parameters)
        self._compiled = Compiled(self.model)
        self.progress = progress
        self.check = check
        self.unseen: str | None = None  # not looked for yet
        self._own: tuple[float, float] | None = None  # this process's part of N and W
        self._known: tuple[float, float] | None = None  # N and W
        first = next(iter(self.parameters.values()))
        self.dtype, self.device = checks.precision(self.parameters), first.device
        with agreement.Together(self.comm, "Problem") as agreed:
            agreed.words = {"parameters": str(self.space.shapes)}
            self._check()

    @classmethod
    def of(cls, model: nn.Module | Problem, loss: Any, data: Any, **options: Any) -> Problem:
        """A problem as it is, or a new one."""
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
        return track(self.data, label, self.progress)

    @contextmanager
    def ready(self, *, twice: bool = False) -> Iterator[None]:
        """Gradients are on, for the chosen parameters only. ``twice``: they will be differentiated
        again, which fused attention kernels cannot."""
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
        """The sum over all processes of ``numbers``, of any shape."""
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

    def know(self, samples: float, weight: float) -> None:
        """What a pass over this process's data has counted by the way. The sum over processes is
        made when it is needed: then all of them do, whichever way their passes went."""
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
        self.know(samples, weight)
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
        """``[P]`` of one tensor a parameter, where ``None`` stands for zeros."""
        pairs = zip(tensors, self.parameters.values(), strict=True)
        return torch.cat([(torch.zeros_like(p) if t is None else t).flatten() for t, p in pairs])

    def rows(self, tensors: Iterable[Tensor | None], k: int) -> Tensor:
        """``[k, P]`` of ``[k, *shape]`` for each parameter."""
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
        checks.deterministic(self.model, outputs)
        checks.mean(self.loss, outputs[0], batch)
