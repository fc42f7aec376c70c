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
    """Raised by a layer's constructor for a module that it cannot view as a matrix. Its message is
    the reason that coverage reports show.
    """


def register(*modules: type[nn.Module] | str) -> Callable[[T], T]:
    """Decorator of a layer class, or of a function ``(name, module)`` that gives one layer or
    several: it stands for these module classes and for their subclasses that have no ``forward`` of
    their own.

    Arguments:
        modules: classes, or strings ``"package.module.Class"`` for classes of packages that need
            not be installed. A later registration replaces an earlier one.
    """

    def add(views: T) -> T:
        _VIEWS.update(dict.fromkeys(modules, views))
        return views

    return add


def registered() -> dict[str, Views]:
    """What makes the layers of each module, by the module's name, sorted."""
    named = {m if isinstance(m, str) else m.__name__: views for m, views in _VIEWS.items()}
    return dict(sorted(named.items()))


def layers_of(name: str, module: nn.Module) -> "list[Layer[Any]] | str":
    """The layers that stand for ``module``, or the reason why there are none.

    Wrappers such as ``fully_shard`` replace ``type(module)`` by a subclass, so base classes are
    looked through, but not past one with a ``forward`` of its own: that is another computation.

    Arguments:
        name: of the module in the model, which layers get as theirs.
        module: one that has parameters of its own.
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
