"""Module hooks that stay behind when the module is copied."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_OUTSIDE = (
    "KFAC watches this model from outside of compiled code. Compile the model itself, model = "
    "torch.compile(model), not a function that calls it, and pass the compiled model to KFAC"
)


class Hook:
    """A module hook that a copy of the module does not take along: it does nothing there.

    Compiled code around the model breaks off for it: traced, it would see no gradient.
    """

    def __init__(self, does: Callable[..., None] | None = None) -> None:
        self.does = does

    @torch.compiler.disable(reason=_OUTSIDE)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> None:
        if self.does is not None:
            self.does(*args)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


def remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def in_backward() -> bool:
    """Whether this runs inside of a backward pass, as recomputed segments do."""
    return bool(torch._C._current_graph_task_id() != -1)
