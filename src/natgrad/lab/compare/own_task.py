"""A comparison on objects of the user's: a network, a loss and data as they are in a notebook.

    found = compare_own(build, F.cross_entropy, (train, test), steps=500, folder="compared")

A run is told by `Settings`, in words, so that it can be written down and gone on with. While a
comparison runs, the user's objects stand behind the words ``natgrad.lab.compare.own_task:NAME``,
as objects in a module of one's own stand behind ``module:function``. They do so for the thread that
compares alone, so that two comparisons in two threads do not see each other's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from natgrad.errors import SettingError
from natgrad.lab.compare.contender import CONTENDERS, Contender, chosen_contenders, key_of
from natgrad.lab.compare.progress_bar import ComparisonProgress
from natgrad.lab.compare.results import Comparison
from natgrad.lab.compare.runner import compare
from natgrad.lab.compare.setup import ComparisonSetup
from natgrad.lab.schemes.optimizers_by_name import own_optimizer
from natgrad.lab.train.settings import Settings

USUAL = ("adamw", "muon", "soap", "naturalmuon")
MOST_TRIALS = 9
_given: ContextVar[Mapping[str, Any]] = ContextVar("_given")
_OPTIMIZER = "optimizer_"  # before the key of an optimizer of the user's
_SETUP = frozenset(one.name for one in fields(ComparisonSetup)) - {"task", "contenders"}
_OWN = ("network", "loss", "data")

Optimizers = Sequence[str | Contender] | Mapping[str, str | Contender | Callable[..., Any]]


def compare_own(
    build: Callable[..., Any],
    loss: Callable[..., Any] | str,
    data: tuple[Any, Any],
    optimizers: Optimizers = USUAL,
    *,
    folder: Path | str,
    rates: Mapping[str, float] | None = None,
    progress: ComparisonProgress | None = None,
    resume: bool = False,
    **settings: Any,
) -> Comparison:
    """Several optimizers on the user's own network, loss and data, with as many trials for each.

    Arguments:
        build: returns the network; without arguments, or of the `TaskShapes` of the data.
        loss: function of ``(output, target)``, the mean over samples; or the name of one, such as
            ``"cross-entropy"``, which has an accuracy as well.
        data: training and test data, each a pair of tensors ``(inputs, targets)``, a data set of
            samples ``(input, target)``, or a `DataLoader` over one.
        optimizers: names, as ``natgrad compare`` takes them, and `Contender` objects; or a mapping
            from names of one's own to these, to optimizer classes, and to functions
            ``(params, lr)`` that return an optimizer.
        folder: for the results; each run has a folder below it.
        rates: the middle of the learning rates that are tried, by name; 0.01 for an optimizer of
            the user's that is not among them.
        progress: is told how far it is; ``None`` tells nobody.
        resume: whether to go on with a comparison in ``folder``, with the same objects.
        settings: fields of `ComparisonSetup` (``trials``, ``seeds``, ``target``, ``threads``) and
            of `Settings` (``steps`` or ``epochs``, ``batch_size``, ``weight_decay``, ``schedule``),
            by name.
    """
    own: dict[str, Any] = {"build": build, "data": lambda: data}
    if callable(loss):
        own["loss"] = loss
    chosen, functions = _contenders(optimizers, rates or {})
    asked = {name: value for name, value in settings.items() if name in _SETUP}
    if "trials" not in asked:
        asked = {"most_trials": MOST_TRIALS, **asked}
    with _standing({**own, **functions}):
        setup = ComparisonSetup(_task(own, loss, settings), chosen, **asked)
        return compare(setup, folder, progress, resume=resume)


def _task(own: Mapping[str, Any], loss: Any, settings: Mapping[str, Any]) -> Settings:
    told = {name: value for name, value in settings.items() if name not in _SETUP}
    known = {one.name for one in fields(Settings)} - {*_OWN, "lr", "optimizer"}
    for name in told:
        if name not in known:
            raise SettingError(
                f"compare_own() has no argument {name}: pass fields of ComparisonSetup or Settings "
                "that are the same for all optimizers, such as steps=500 or batch_size=64."
            )
    if "steps" in told:
        told.setdefault("epochs", 0.0)
    name = _path("loss") if "loss" in own else loss
    return Settings(network=_path("build"), data=_path("data"), loss=name, **told)


def _contenders(
    optimizers: Optimizers, rates: Mapping[str, float]
) -> tuple[tuple[Contender, ...], dict[str, Any]]:
    """And the functions of the user's, by the names under which they stand here."""
    pairs = (
        list(optimizers.items())
        if isinstance(optimizers, Mapping)
        else [("", one) for one in optimizers]
    )
    found, functions = [], {}
    for name, one in pairs:
        if isinstance(one, str):
            (made,) = chosen_contenders([one], CONTENDERS)
        elif isinstance(one, Contender):
            made = one
        else:
            place = f"{_OPTIMIZER}{key_of(name).replace('-', '_')}"
            functions[place] = one
            usual = own_optimizer(_path(place), one)
            made = Contender(key_of(name), name, name, {"optimizer": _path(place)}, usual.lr)
        lr = rates.get(made.key, rates.get(name, made.lr))
        found.append(
            replace(made, key=key_of(name) if name else made.key, name=name or made.name, lr=lr)
        )
    names = {key for one in found for key in (one.key, one.name)}
    for name in rates:
        if name not in names:
            raise SettingError(
                f"There is a learning rate of {name!r} but no such optimizer: name one of "
                f"{', '.join(one.key for one in found)}."
            )
    return tuple(found), functions


def _path(name: str) -> str:
    return f"{__name__}:{name}"


@contextmanager
def _standing(objects: Mapping[str, Any]) -> Iterator[None]:
    token = _given.set(objects)
    try:
        yield
    finally:
        _given.reset(token)


def __getattr__(name: str) -> Any:
    """The user's objects while a comparison of theirs runs, as attributes of this module."""
    objects = _given.get({})
    if name in objects:
        return objects[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
