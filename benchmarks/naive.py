"""K-FAC as a textbook has it, slow and plain: the yardstick of `python -m benchmarks.step_cost`.

    A = sum a aT / (N T)        inputs (with a 1 for the bias) over N samples and T positions
    G = N sum g gT              gradients of a mean loss, undone to per-sample ones (N^2 / N)
    eigen:    QG [(QGT W QA) / (vG vAT + damping)] QAT
    cholesky: (G + sqrt(damping)/pi I)^-1 W (A + pi sqrt(damping) I)^-1,
              pi^2 = (tr A / dim A) / (tr G / dim G)

The mathematics is the library's, so preconditioned gradients are comparable. The means are not:
module hooks are always there, convolutions are unfolded, factors are dense and every product
allocates its result. Linear and Conv2d only; norm layers keep their gradients.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inverse = Literal["eigen", "cholesky"]


class NaiveKFAC:
    """`step()` replaces gradients; `seconds` holds the time spent in A, G, refresh and apply."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        damping: float = 1e-3,
        decay: float = 0.95,
        kl_clip: float | None = 1e-3,
        update_every: int = 10,
        refresh_every: int = 100,
        inverse: Inverse = "eigen",
    ) -> None:
        self.optimizer, self.inverse = optimizer, inverse
        self.damping, self.decay, self.kl_clip = damping, decay, kl_clip
        self.update_every, self.refresh_every = update_every, refresh_every
        self.steps = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.averages: dict[tuple[nn.Module, str], Tensor] = {}
        self.inverses: dict[nn.Module, tuple[Tensor, ...]] = {}
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        # The network's inputs need no gradient, of which the first layer's hook would warn.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        for layer in self.layers:
            layer.register_forward_pre_hook(self._save_input)
            layer.register_full_backward_hook(self._save_output_gradient)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    @torch.no_grad()
    def _save_input(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.steps % self.update_every or not layer.training:
            return
        with self.stage("A"):
            a = args[0].detach()
            if isinstance(layer, nn.Conv2d):
                assert not isinstance(layer.padding, str)
                window = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
                a = F.unfold(a, *window).transpose(1, 2)
            a = a.reshape(-1, a.shape[-1])
            if layer.bias is not None:
                a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            self._average((layer, "A"), a.T @ a / len(a))

    @torch.no_grad()
    def _save_output_gradient(self, layer: nn.Module, _: object, args: tuple[Tensor, ...]) -> None:
        if self.steps % self.update_every or not layer.training:
            return
        with self.stage("G"):
            g = args[0].detach()
            samples = len(g)
            if isinstance(layer, nn.Conv2d):
                g = g.permute(0, 2, 3, 1)
            g = g.reshape(-1, g.shape[-1])
            self._average((layer, "G"), g.T @ g * samples)

    def _average(self, key: tuple[nn.Module, str], new: Tensor) -> None:
        old = self.averages.get(key, torch.zeros_like(new))
        self.averages[key] = self.decay * old + (1 - self.decay) * new

    @torch.no_grad()
    def step(self) -> None:
        if self.steps % self.refresh_every == 0:
            with self.stage("refresh"):
                self._refresh()
        with self.stage("apply"):
            self._apply()
        self.steps += 1

    def _refresh(self) -> None:
        updates = self.steps // self.update_every + 1
        correction = 1 - self.decay**updates  # the averages started at zero
        for layer in self.layers:
            a = self.averages[layer, "A"] / correction
            g = self.averages[layer, "G"] / correction
            if self.inverse == "eigen":
                values_a, vectors_a = torch.linalg.eigh(a)
                values_g, vectors_g = torch.linalg.eigh(g)
                values = torch.outer(values_g.clamp(min=0), values_a.clamp(min=0))
                self.inverses[layer] = (vectors_g, values, vectors_a)
            else:
                pi = (a.trace() / len(a) / (g.trace() / len(g))).sqrt()
                root = self.damping**0.5
                a = a + pi * root * torch.eye(len(a), dtype=a.dtype)
                g = g + root / pi * torch.eye(len(g), dtype=g.dtype)
                self.inverses[layer] = (
                    torch.cholesky_inverse(torch.linalg.cholesky(g)),
                    torch.cholesky_inverse(torch.linalg.cholesky(a)),
                )

    def _apply(self) -> None:
        new: dict[nn.Module, Tensor] = {}
        agreement = 0.0
        for layer in self.layers:
            assert layer.weight.grad is not None
            matrix = layer.weight.grad.flatten(1)
            if layer.bias is not None:
                assert layer.bias.grad is not None
                matrix = torch.cat([matrix, layer.bias.grad[:, None]], 1)
            if self.inverse == "eigen":
                vectors_g, values, vectors_a = self.inverses[layer]
                rotated = vectors_g.T @ matrix @ vectors_a / (values + self.damping)
                new[layer] = vectors_g @ rotated @ vectors_a.T
            else:
                inverse_g, inverse_a = self.inverses[layer]
                new[layer] = inverse_g @ matrix @ inverse_a
            agreement += (new[layer] * matrix).sum().abs().item()
        scale = 1.0
        if self.kl_clip is not None and agreement > 0:
            lr = self.optimizer.param_groups[0]["lr"]
            scale = min(1.0, (self.kl_clip / (lr**2 * agreement)) ** 0.5)
        for layer in self.layers:
            matrix = scale * new[layer]
            if layer.bias is not None:
                layer.bias.grad = matrix[:, -1].clone()
                matrix = matrix[:, :-1]
            layer.weight.grad = matrix.reshape(layer.weight.shape)
