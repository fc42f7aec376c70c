"""An optimizer around another one: ``step()`` of the one within, and something after it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.errors import SettingError


class Wrapper(Optimizer):
    """Has the parameter groups and the state of ``optimizer``, not copies of them.

    So schedulers, gradient scalers, checkpoints and `KFAC` take either of the two. What a wrapper
    remembers of a parameter stands beside what ``optimizer`` does, under a name of its own.

    Arguments:
        optimizer: the one within; its groups and state are used, not copied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise SettingError(
                f"optimizer is a {type(optimizer).__name__} but must be a torch.optim.Optimizer: "
                f"pass the one that {type(self).__name__} goes around."
            )
        # Not Optimizer.__init__, which would make groups and state anew.
        self.__setstate__({"optimizer": optimizer})

    optimizer: Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer within.

        Arguments:
            param_group: a group as torch takes it, with ``params`` and what differs from the
                defaults.
        """
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of the optimizer within.

        Arguments:
            set_to_none: whether gradients become ``None`` instead of zeros.
        """
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state, the wrapper's own included, which stand among those of the
        optimizer within.

        Arguments:
            state_dict: what `state_dict` has returned.
        """
        self.optimizer.load_state_dict(state_dict)

    def inner_step(self, closure: Callable[[], float] | None) -> float | None:
        """A step of the optimizer within.

        Arguments:
            closure: computes the loss anew, with gradients, and returns it; ``None`` steps by the
                gradients that are there.
        """
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def copies(self, wanted: Callable[[Tensor], bool]) -> dict[Tensor, Tensor]:
        """Copies of trainable parameters as they are now.

        Arguments:
            wanted: from a parameter to whether it is copied.
        """
        parameters = (p for group in self.param_groups for p in group["params"])
        with torch.no_grad():
            return {p: p.detach().clone() for p in parameters if p.requires_grad and wanted(p)}

    def remembered(self, parameter: Tensor) -> dict[str, Any]:
        """What is kept of a parameter; nothing is made for one that has nothing yet, as optimizers
        take an entry for a sign that they have been there.

        Arguments:
            parameter: one of the groups'.
        """
        found: dict[str, Any] = self.state.get(parameter, {})
        return found
