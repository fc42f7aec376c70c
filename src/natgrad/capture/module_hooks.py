"""Hooks on modules that come and go together, and that know where they belong in copies.

A model may be copied at any time: for an average of weights, a teacher, a worker. Its hooks are
copied with it and must not report to the preconditioner of the original, so a copied hook does
nothing. Where the preconditioner is copied as well, as in ``copy.deepcopy((model, optimizer,
kfac))``, the hooks in the copied model are those of the copied preconditioner.
"""

import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_OUTSIDE = (
    "KFAC watches this model from outside of compiled code. Compile the model itself, model = "
    "torch.compile(model), not a function that calls it, and pass the compiled model to KFAC"
)


class Hook:
    """A module hook that does nothing in a copy of the module.

    It is a graph break in compiled code around the model: traced, it would see no gradient.
    """

    def __init__(self, does: Callable[..., None] | None = None) -> None:
        self.does = does
        _stay_outside()

    def __call__(self, *args: Any) -> None:
        if self.does is not None:
            self.does(*args)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


def _stay_outside() -> None:
    """Keep hooks out of compiled code, once anything can be compiled: to import the compiler takes
    half a second, which a program that does not use it need not spend."""
    if "torch._dynamo" in sys.modules and not hasattr(Hook.__call__, "_torchdynamo_disable"):
        outside = torch.compiler.disable(Hook.__call__, reason=_OUTSIDE)
        Hook.__call__ = outside  # type: ignore[method-assign]


# A module's method, such as ``register_forward_hook``, what is done, and how it is registered.
Registration = tuple[Callable[..., RemovableHandle], Callable[..., None], dict[str, bool]]


class Hooks:
    """What one object has on the modules of a model. A copy of it works on the copied modules, so
    all that its hooks do must be methods and objects, not functions that hold what they need."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self.handles: list[RemovableHandle] = []

    def add(self, wanted: Iterable[Registration]) -> None:
        for register, does, options in wanted:
            self._hooks.append(Hook(does))
            self.handles.append(register(self._hooks[-1], **options))

    def remove(self) -> None:
        for handle, hook in zip(self.handles, self._hooks, strict=True):
            handle.remove()
            hook.does = None  # a call that has begun may have it on its list
        self._hooks.clear()
        self.handles.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hooks":
        twin = memo[id(self)] = Hooks()
        twin.handles = deepcopy(self.handles, memo)
        twin._hooks = deepcopy(self._hooks, memo)  # those in the copied model, whichever is first
        for mine, its in zip(self._hooks, twin._hooks, strict=True):
            its.does = deepcopy(mine.does, memo)
        return twin


def in_backward() -> bool:
    """Whether a backward pass is running, as it is while checkpointed segments are recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)
