"""Which layer type stands for a module: one decorated class per family."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from natgrad.layers.base import Layer


class Views(Protocol):
    """Makes the layers of one module: usually one, the layer class itself."""

    def __call__(self, name: str, module: Any) -> "Layer[Any] | Sequence[Layer[Any]]": ...


T = TypeVar("T", bound=Views)
_VIEWS: dict[type[nn.Module] | str, Views] = {}


class NotCovered(Exception):  # noqa: N818 (it is an answer, not an error)
    """Raised by a layer's constructor for a module that it cannot view as a matrix; says why."""


def register(*modules: type[nn.Module] | str) -> Callable[[T], T]:
    """Class decorator: the layer stands for these module classes and their subclasses.

    A string ``"package.module.Class"`` names a class of a package that need not be installed.
    """

    def add(views: T) -> T:
        _VIEWS.update(dict.fromkeys(modules, views))
        return views

    return add


def registered() -> list[str]:
    return sorted(m if isinstance(m, str) else m.__name__ for m in _VIEWS)


def layers_of(name: str, module: nn.Module) -> "list[Layer[Any]] | str":
    """The layers that stand for ``module``, or the reason why there are none.

    Wrappers such as ``fully_shard`` replace ``type(module)`` by a subclass, so base classes are
    looked through, but not past one with a ``forward`` of its own: that is another computation.
    """
    for cls in type(module).__mro__:
        views = _VIEWS.get(cls) or _VIEWS.get(f"{cls.__module__}.{cls.__qualname__}")
        if views is not None:
            try:
                made = views(name, module)
            except NotCovered as why:
                return str(why)
            return list(made) if isinstance(made, Sequence) else [made]
        if "forward" in vars(cls):
            break
    return f"no layer is registered for {type(module).__name__}"
