"""Runs that stop and go on, on as many ranks and under as many placements as a test wants."""

import io
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.training import Run, backward, batch, network, weights, wrapped
from natgrad import KFAC

SAMPLES = 12  # of a step, whatever the number of ranks


def run(layout: str = "ddp", name: str = "mlp", **kfac: Any) -> Run:
    """Saved after two or five steps, it is between two updates or two refreshes."""
    return Run(name, layout, {"update_every": 2, "refresh_every": 3, **kfac})


@dataclass
class Training:
    """A model, its optimizer and its K-FAC on this rank."""

    run: Run
    rank: int = 0
    ranks: int = 1
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        # torch says so of every Linear on sequences.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        sizes = (SAMPLES // self.ranks,) * self.ranks
        self.run = replace(self.run, batches=sizes)
        layout = self.run.layout if self.ranks > 1 else "plain"
        self.model = wrapped(network(self.run.network), layout)
        if layout != self.run.layout:
            self.run = replace(self.run, layout=layout)
        self.kfac, self.optimizer = self.run.make(self.model)

    @classmethod
    def here(cls, run: Run) -> "Training":
        import torch.distributed as dist

        return cls(run, dist.get_rank(), dist.get_world_size())

    def steps(self, first: int, end: int) -> "Training":
        for step in range(first, end):
            self.optimizer.zero_grad()
            if self.kfac.curvature.observes:
                self._observed(step)
            else:
                backward(self.run, self.model, step, self.rank, self.ranks)
            self.kfac.step()
            self.optimizer.step()
        return self

    def _observed(self, step: int) -> None:
        size = SAMPLES // self.ranks
        x, y = batch(self.run.network, step, SAMPLES)
        mine = slice(self.rank * size, (self.rank + 1) * size)
        output = self.model(x[mine])
        self.kfac.observe(output)
        F.cross_entropy(output, y[mine]).backward()

    def weights(self) -> dict[str, Tensor]:
        return weights(self.model)

    # The model and the optimizer, whole on every rank.

    def saved(self) -> dict[str, Any]:
        """Through a file, as plain tensors, numbers and strings."""
        momenta = {
            name: whole(self.optimizer.state[p]["momentum_buffer"]) for name, p in self.parameters()
        }
        return through_a_file(
            {"model": self.weights(), "momenta": momenta, "kfac": self.kfac.state_dict()}
        )

    def resume(self, saved: dict[str, Any]) -> "Training":
        self.put(saved)
        self.kfac.load_state_dict(saved["kfac"])
        return self

    @torch.no_grad()
    def put(self, saved: dict[str, Any]) -> None:
        for name, p in self.parameters():
            p.copy_(spread(saved["model"][name], p))
            momentum = spread(saved["momenta"][name], p).clone()
            self.optimizer.state[p]["momentum_buffer"] = momentum

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n.removeprefix("module."), p) for n, p in self.model.named_parameters()]


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def spread(t: Tensor, like: Tensor) -> Tensor:
    if not hasattr(like, "placements"):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, like.device_mesh, like.placements)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def held(kfac: KFAC) -> dict[str, list[tuple[str, str]]]:
    """What this rank has, and what its plan gives to it."""
    rank, plan = kfac.comm.rank, kfac.plan
    return {
        "running": sorted((b.name, n) for b in kfac.blocks for n in b.running),
        "kept": sorted(f for f, ranks in plan.keepers.items() if rank in ranks),
        "parts": sorted((b.name, n) for b in kfac.blocks for n in b.parts),
        "held": sorted(f for f, ranks in plan.holders.items() if rank in ranks),
    }
