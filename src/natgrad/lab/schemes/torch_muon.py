"""`torch.optim.Muon` for a whole network, beside `torch.optim.AdamW` for what it does not take.

torch's Muon takes matrices only. A kernel ``[out, in, k, k]`` is handed to it as the matrix
``[out, in k k]`` that shares its storage, as in the other implementations; which weights are left
to AdamW is asked of the caller. Both have one learning rate: ``match_rms_adamw`` gives Muon's steps
the size of AdamW's (Liu et al. 2025, sec. 2.2).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class TorchMuon(Optimizer):
    """Muon by torch, and AdamW by torch for the rest.

    Arguments:
        groups: parameters as torch takes them, with ``weight_decay`` and ``lr`` where they differ.
        lr: the learning rate of both.
        momentum: of Muon.
        left: ids of parameters that AdamW steps; those that are no matrices or kernels it steps
            anyway.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        left: Iterable[int] = (),
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "weight_decay": 0.0})
        rest, self._matrices = set(left), dict[Tensor, nn.Parameter]()
        muon: list[dict[str, Any]] = []
        adamw: list[dict[str, Any]] = []
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.ndim > 1 and id(p) not in rest:
                    self._matrices[p] = nn.Parameter(p.detach().view(len(p), -1))
            own = [self._matrices[p] for p in group["params"] if p in self._matrices]
            others = [p for p in group["params"] if p not in self._matrices]
            muon += [{"params": own, "index": index}] if own else []
            adamw += [{"params": others, "index": index}] if others else []
        self.parts: dict[str, Optimizer] = {}
        if muon:
            self.parts["muon"] = torch.optim.Muon(
                muon, lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        if adamw:
            self.parts["adamw"] = torch.optim.AdamW(adamw, lr, betas=(0.9, 0.95))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both.

        Arguments:
            closure: computes the loss and its gradients anew, once; its value is returned.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for p, matrix in self._matrices.items():
            matrix.grad = None if p.grad is None else p.grad.reshape(matrix.shape)
        for part in self.parts.values():
            for group in part.param_groups:
                asked = self.param_groups[group["index"]]
                group["lr"], group["weight_decay"] = asked["lr"], asked["weight_decay"]
            part.step()
        return value

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {n: part.state_dict() for n, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Arguments:
            state_dict: what ``state_dict()`` has returned.
        """
        own = {name: value for name, value in state_dict.items() if name not in self.parts}
        super().load_state_dict(own)
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
