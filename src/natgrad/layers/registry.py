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
# Finds the layers of a module that no class is registered for; a string says why there are none.
Fallback = Callable[[str, nn.Module], "Layer[Any] | Sequence[Layer[Any]] | str | None"]
_FALLBACKS: list[Fallback] = []
_FIRST: list[Fallback] = []


class Unknown(str):
    """Why a module has no layer, where nothing is known of what it does with its parameters."""


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


def by_behaviour(find: Fallback) -> Fallback:
    """Decorator of a function that is asked for modules whose class is not registered.

    Arguments:
        find: from a name and a module to its layers, to why it has none, or to None for "I do not
            know it".
    """
    _FALLBACKS.append(find)
    return find


def first_of_all(find: Fallback) -> Fallback:
    """Decorator of a function that is asked before classes are looked at: a module may compute its
    weight without a class of its own.

    Arguments:
        find: as for `by_behaviour`.
    """
    _FIRST.append(find)
    return find


def views_of_base(cls: type[nn.Module]) -> tuple[type[nn.Module], Views] | None:
    """The next class that a class derives from and that is registered, with what makes its layers.

    Arguments:
        cls: of a module with a ``forward`` of its own.
    """
    for base in cls.__mro__:
        if (views := _VIEWS.get(base)) is not None:
            return base, views
    return None


def registered() -> dict[str, Views]:
    """What makes the layers of each module, by the module's name, sorted."""
    named = {m if isinstance(m, str) else m.__name__: views for m, views in _VIEWS.items()}
    return dict(sorted(named.items()))


def layers_of(name: str, module: nn.Module) -> "list[Layer[Any]] | str":
    """The layers that stand for ``module``, or the reason why there are none.

    Wrappers such as ``fully_shard`` replace ``type(module)`` by a subclass, so base classes are
    looked through, but not past one with a ``forward`` of its own: that may be another computation,
    which is then found out by trying it (`natgrad.layers.behaviour`).

    Arguments:
        name: of the module in the model, which layers get as theirs.
        module: one that has parameters of its own.
    """
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        return "its numbers are complex"
    try:
        for find in _FIRST:
            if (found := find(name, module)) is not None:
                return found if isinstance(found, str) else _listed(found)
        for cls in type(module).__mro__:
            views = _VIEWS.get(cls) or _VIEWS.get(f"{cls.__module__}.{cls.__qualname__}")
            if views is not None:
                return _listed(views(name, module))
            if "forward" in vars(cls):
                break
        for find in _FALLBACKS:
            if (found := find(name, module)) is not None:
                return found if isinstance(found, str) else _listed(found)
    except NotCovered as why:
        return str(why)
    none = f"no layer is registered for {_name_of(type(module))}"
    # What torch's own modules do is known: none of them uses a parameter in an expression.
    return none if type(module).__module__.startswith("torch.") else Unknown(none)


def _listed(made: "Layer[Any] | Sequence[Layer[Any]]") -> "list[Layer[Any]]":
    return list(made) if isinstance(made, Sequence) else [made]


def _name_of(cls: type[nn.Module]) -> str:
    """With its module where a class of the same name is registered: "no layer for Linear" would
    not be believed."""
    return f"{cls.__module__}.{cls.__qualname__}" if cls.__name__ in registered() else cls.__name__
