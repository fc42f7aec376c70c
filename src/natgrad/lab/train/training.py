"""All that a run is made of, and what it does in a step."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from natgrad.comm import Communicator
from natgrad.comm.agreement import raise_on_all_ranks
from natgrad.errors import CheckpointError, SettingError
from natgrad.kfac.attaching import KEY
from natgrad.lab.data.dataset import Rows
from natgrad.lab.names import SECOND_PASSES
from natgrad.lab.schemes import WeightRescaling, averaged_weights, normalized_layers
from natgrad.lab.schemes.second_pass import SecondPass, frozen_statistics
from natgrad.lab.train import kfac_record, optimizers, shared_mean_image
from natgrad.lab.train.mixing import DROPOUT, Mixing
from natgrad.lab.train.sample_order import Cut, Micro, Stream, number
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.tasks import Task, task
from natgrad.preconditioner import KFAC
from natgrad.schedules import LevenbergMarquardt

EVALUATED = 256  # samples at once, where nothing else is said
CALIBRATED = 8  # batches from which batch norm learns its means for averaged weights

Batches = list[tuple[Micro, Any]]
Mixed = tuple[Micro, Any, Any]


class Training:
    """Made on all ranks alike; ``steps`` is the length of the run."""

    def __init__(self, settings: Settings, comm: Communicator, device: torch.device) -> None:
        self.settings, self.comm, self.device = settings, comm, device
        # Data may be missing on one of the machines.
        self.cut, self.task, network = raise_on_all_ranks(comm, lambda: _prepared(settings, comm))
        self.task = shared_mean_image.centred(self.task, comm, device)
        self.objective = self.task.objective
        self.steps_per_epoch = len(self.task.train) / settings.batch_size
        self.steps = settings.steps or ceil(settings.epochs * self.steps_per_epoch - 1e-9)
        self.network = network.to(device)
        self.model: nn.Module = self.network
        if comm.size > 1:
            devices = None if device.type == "cpu" else [device]
            self.model = DistributedDataParallel(self.network, device_ids=devices)
        self.lr = optimizers.rate(settings, self.steps_per_epoch, self.steps)
        self.optimizer = optimizers.optimizer(
            settings, self.network, self.lr, self.objective, self.model
        )
        self.kfac = optimizers.preconditioner(
            settings, self.model, self.optimizer, self.objective, self.steps_per_epoch
        )
        self.second_pass: SecondPass | None = None
        if settings.second_pass:
            trained = [p for p in self.network.parameters() if p.requires_grad]
            self.second_pass = SECOND_PASSES[settings.second_pass](trained)
        adapts = None if self.kfac is None else self.kfac.settings.damping
        self.adapts = isinstance(adapts, LevenbergMarquardt)
        self.stream = Stream(self.task.train, settings.batch_size, settings.seed)
        self.rescaling = self._rescaling() if settings.rescaling else None
        self.mixing = Mixing(settings, self.task.shapes.classes, self.cut)

    def batches(self, start: int) -> Iterator[tuple[int, Batches]]:
        """Every step from ``start`` on with what this rank reads for it."""
        micros = chain.from_iterable(map(self.cut.micros, range(start, self.steps)))
        reading = self.stream.read(micros, self.settings.workers)
        for step in range(start, self.steps):
            yield step, [next(reading) for _ in self.cut.micros(step)]

    def step(self, step: int, batches: Batches) -> Tensor:
        """Train on this rank's micro-batches (Osawa 2019, sec. 5.1). Returns its mean loss."""
        optimizers.set_rate(self.settings, self.optimizer, self.lr, step)
        self.model.train()
        averaged_weights.to_training(self.optimizer)
        self.optimizer.zero_grad()
        # Running mixup mixes a batch once, however often it is passed.
        mixed: Iterable[Mixed] = (self._mixed(*one) for one in batches)
        if self.second_pass is not None or self.adapts:
            mixed = list(mixed)
        share = sum(len(micro) for micro, _ in batches)
        last = batches[-1][0]
        total = self._pass(step, mixed, share, last)
        if self.second_pass is not None:
            if kfac := self._kfac():
                kfac.discard()
            with self.second_pass.perturbed(), frozen_statistics(self.network):
                self._pass(step, mixed, share, last)
        if self.kfac is not None and self.kfac.attachment is None:
            self.kfac.step()
        self.optimizer.step()
        if self.kfac is not None and self.adapts and self.kfac.prediction.remembered:
            with torch.no_grad(), frozen_statistics(self.network):
                after = self._pass(step, mixed, share, last)
            self.kfac.adapt(self.mean(total), self.mean(after))
        if self.rescaling is not None:
            self.rescaling.step()
        return total

    def _pass(self, step: int, mixed: Iterable[Mixed], share: int, last: Micro) -> Tensor:
        """Forward, and backward unless gradients are off; the mean loss. The same units are dropped
        in every pass of a step."""
        torch.manual_seed(number(self.settings.seed, step, DROPOUT, self.comm.rank))
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for micro, inputs, targets in mixed:
            # Gradients and curvature leave a rank only in the last of its passes.
            with nullcontext() if micro is last else self._no_sync():
                loss = self._loss(inputs, targets) * (len(micro) / share)
                if torch.is_grad_enabled():
                    loss.backward()
            total += loss.detach()
        return total

    def _mixed(self, micro: Micro, batch: Any) -> Mixed:
        return micro, *self.mixing(micro, *self.task.prepared(batch, self.device))

    def _kfac(self) -> KFAC | None:
        """That in front of the optimizer, or inside of it."""
        return self.kfac or getattr(self.optimizer, "kfac", None)

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        # Without gradients nothing is measured, so DDP need not know of the pass either.
        model = self.model if torch.is_grad_enabled() else self.network
        with self._autocast():
            output = self.objective.output(model, inputs, targets)
        kfac = self._kfac() if torch.is_grad_enabled() else None
        if kfac is not None and isinstance(output, Tensor):
            # Also where a hook would see the output: it would not know which targets count.
            kfac.observe(output, None if targets.is_floating_point() else targets)
        return self.objective.loss(output, targets)

    def tested(self) -> AbstractContextManager[None]:
        """Meanwhile the network has the weights that are to be judged."""
        return averaged_weights.while_tested(self.optimizer, self.network, self._calibrate)

    def _calibrate(self) -> None:
        """Training data through the network, for batch norm; the same on all ranks."""
        data, size = self.task.train, min(self.settings.micro_batch or EVALUATED, EVALUATED)
        self.network.train()
        for first in range(0, min(len(data), CALIBRATED * size), size):
            some = list(range(first, min(first + size, len(data))))
            batch = data.take(some, self.stream.drawn(data, some))
            inputs, targets = self.task.prepared(batch, self.device)
            with self._autocast():
                self.objective.output(self.network, inputs, targets)

    @torch.no_grad()
    def evaluate(self, data: Rows) -> dict[str, float]:
        """Metrics over all ``data``, of which each rank takes a share; the same on all ranks."""
        self._share_buffers()
        self.network.eval()
        count, comm = len(data), self.comm
        rows = list(range(count * comm.rank // comm.size, count * (comm.rank + 1) // comm.size))
        at_once = min(self.settings.micro_batch or EVALUATED, EVALUATED)
        parts: list[dict[str, Any]] = []
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            batch = data.take(some, self.stream.drawn(data, some))
            inputs, targets = self.task.prepared(batch, self.device)
            with self._autocast():
                output = self.objective.output(self.network, inputs, targets)
            parts.append(self.objective.sums(output, targets))
        return self.objective.metrics(_added(comm.gather(_added(parts))))

    def fit(self) -> dict[str, float]:
        """Metrics over training data, if the settings ask for them."""
        return {} if self.task.fit is None else self.evaluate(self.task.fit)

    def drift(self) -> dict[str, list[float]]:
        return {} if self.kfac is None else kfac_record.drift(self.kfac)

    def stages(self) -> dict[str, Any]:
        return {} if self.kfac is None else kfac_record.stages(self.kfac)

    def write_record(self, folder: Path) -> None:
        """What there is to tell of K-FAC as it is now. Collective."""
        if self.kfac is None:
            return
        found = kfac_record.record(self.kfac)
        write = partial(kfac_record.write, folder, found) if self.comm.rank == 0 else None
        raise_on_all_ranks(self.comm, write or (lambda: None))

    def _share_buffers(self) -> None:
        """Those of the first rank, which are saved, for all: batch norm's averages are of a rank's
        own samples until the next step."""
        buffers = list(self.network.buffers())
        if self.comm.size == 1 or not buffers:
            return
        parts = [buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
        size, ranks, first = sum(map(len, parts)), self.comm.size, self.comm.rank == 0
        own = torch.cat(parts).repeat(ranks) if first else parts[0].new_empty(0)
        sizes = [size if first else 0] * ranks
        received = self.comm.exchange(own, sizes, [size] + [0] * (ranks - 1), "buffers").wait()
        for buffer, part in zip(buffers, received.split([len(p) for p in parts]), strict=True):
            # A copy begins where numbers of any kind may.
            buffer.copy_(part.clone().view(buffer.dtype).reshape(buffer.shape))

    def mean(self, loss: Tensor) -> float:
        """Of all ranks."""
        summed = self.comm.total(loss.reshape(1), "loss").wait()
        return float(summed) / self.comm.size

    def any(self, number: int) -> int:
        """The largest of all ranks' numbers, none of which is below 0."""
        if self.comm.size == 1:
            return number
        # Mostly all are 0, which a sum finds out faster than messages of any kind.
        if not int(self.comm.total(torch.tensor([number], device=self.device), "stop").wait()):
            return 0
        return max(int(one) for one in self.comm.gather(number))

    def state(self) -> dict[str, Any]:
        """All that cannot be derived from the settings and the number of steps. Collective."""
        trained = averaged_weights.training_weights(self.optimizer)
        with self.tested():
            kfac = None if self.kfac is None else self.kfac.state_dict()
            optimizer = self.optimizer.state_dict()
            if kfac is not None:  # which hangs on the optimizer, or does not
                optimizer.pop(KEY, None)
            return {
                # A copy where it is not what is trained.
                "model": self._weights(copied=trained is not None),
                "optimizer": optimizer,
                "kfac": kfac,
                **({} if trained is None else {"trained": trained}),
            }

    def _weights(self, *, copied: bool) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.network.state_dict()
        return {name: one.clone() for name, one in found.items()} if copied else found

    def load(self, state: dict[str, Any], shares: list[Any]) -> None:
        if (state["kfac"] is None) != (self.kfac is None):
            raise CheckpointError(
                f"The checkpoint was written {'without' if state['kfac'] is None else 'with'} "
                "K-FAC but the run is not: go on with the same settings."
            )
        self.network.load_state_dict(state["model"])
        if self.kfac is not None:
            self.kfac.load_state_dict(state["kfac"])
        self.optimizer.load_state_dict(state["optimizer"])
        if "trained" in state:
            averaged_weights.restore(self.optimizer, state["trained"])
        self.mixing.load_state_dict([piece for share in shares for piece in share])

    def _no_sync(self) -> Any:
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def _autocast(self) -> Any:
        wanted = self.settings.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=wanted)

    def _rescaling(self) -> WeightRescaling:
        some = self.task.test.take([0], self.stream.drawn(self.task.test, [0]))
        inputs, _ = self.task.prepared(some, self.device)
        return WeightRescaling(normalized_layers(self.network, inputs).values())


def _added(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Numbers and lists by name, in the order of the parts."""
    total: dict[str, Any] = {}
    for one in parts:
        for name, value in one.items():
            total[name] = total[name] + value if name in total else value
    return total


def _prepared(settings: Settings, comm: Communicator) -> tuple[Cut, Task, nn.Module]:
    cut, found = _cut(settings, comm), task(settings)
    return cut, found, found.network()


def _cut(settings: Settings, comm: Communicator) -> Cut:
    if settings.batch_size % comm.size:
        raise SettingError(
            f"batch_size is {settings.batch_size} but {comm.size} processes must divide it: pass "
            "another number of samples, or of processes."
        )
    share = settings.batch_size // comm.size
    return Cut(settings.batch_size, comm.rank, comm.size, settings.micro_batch or share)
