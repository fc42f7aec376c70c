"""Who takes part in a comparison: an optimizer, what it is told, and where its learning rates lie.

A run of a contender is ``task + what is its own + learning rate + seed``: all that the settings of
a task say about one optimizer alone is taken out of them first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from natgrad.checks import POSITIVE, number
from natgrad.errors import SettingError
from natgrad.lab.names import OPTIMIZERS
from natgrad.lab.registry import PATH, is_path
from natgrad.lab.train.settings import Settings

_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_KFAC = "kfac-"  # before the name of an optimizer: K-FAC in front of it


def _section(*names: str) -> tuple[str, ...]:
    return tuple(one.name for one in fields(Settings) if one.metadata["section"] in names)


KFAC_SETTINGS = _section("kfac")
# What is one optimizer's own; weight decay, warm-up and schedule are the task's.
OPTIMIZER_SETTINGS = (
    *("optimizer", "lr", "momentum", "displacement", "coupled", "rescaling"),
    *KFAC_SETTINGS,
)
_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(Settings)}
_ALLOWED = frozenset(_section("optimizer", "kfac")) - {"lr"}


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Arguments:
        key: names its folder: small letters and digits, with single dashes between them.
        name: for tables.
        about: what it is, for tables.
        settings: fields of `Settings` that differ from the defaults: of the optimizer and of K-FAC
            only, and not ``lr``.
        lr: ``> 0``, the middle of the learning rates that are tried.
        tuned: whether others are tried at all; otherwise it runs with ``lr``.
    """

    key: str
    name: str
    about: str
    settings: Mapping[str, Any] = field(hash=False)
    lr: float
    tuned: bool = True

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise SettingError(
                f"The key of a contender is {self.key!r} but must be small letters and digits with "
                "single dashes between them, as it names a folder: write one such as my-adamw."
            )
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in self.settings.items()}
        object.__setattr__(self, "settings", given)
        number(self.lr, f"The learning rate of {self.key}", POSITIVE)
        for name in self.settings:
            if name not in _ALLOWED:
                raise SettingError(
                    f"The contender {self.key} has a {name} of its own, which all must share: "
                    "leave it out, or set it for the task."
                )

    def settings_for(self, task: Settings, lr: float, seed: int) -> Settings:
        """All that a run is told.

        Arguments:
            task: what all share; what it says of its own optimizer is taken out.
            lr: the learning rate of the run.
            seed: of the run.
        """
        return replace(neutral(task), **self.settings, lr=lr, seed=seed)

    def missing(self) -> str:
        """A sentence if a library is not installed, otherwise nothing."""
        name = self.settings.get("optimizer", "sgd")
        return OPTIMIZERS[name].missing() if name in OPTIMIZERS else ""

    @property
    def is_natgrads(self) -> bool:
        """Whether it is of this library, and not one that it is compared with."""
        return self.preconditioned or self.settings.get("optimizer") == "naturalmuon"

    @property
    def preconditioned(self) -> bool:
        return bool(self.settings.get("kfac"))


def neutral(task: Settings) -> Settings:
    """``task`` without what is an optimizer's own, all of which is at its defaults; no K-FAC."""
    return replace(task, **{name: _DEFAULTS[name] for name in OPTIMIZER_SETTINGS} | {"kfac": False})


def contender_of(word: str) -> Contender:
    """An optimizer, or K-FAC in front of one, as a contender with its usual settings.

    Arguments:
        word: a name of an optimizer or a path ``module:name``, with ``kfac-`` before it for K-FAC
            in front of it: ``"adamw"``, ``"my_module:Adan"``, ``"kfac-adamw"``,
            ``"kfac-my_module:Adan"``; ``"kfac"`` is K-FAC in front of SGD.
    """
    name = "sgd" if word == "kfac" else word.removeprefix(_KFAC)
    found = OPTIMIZERS[name]
    settings: dict[str, Any] = {"optimizer": name}
    if found.momentum != _DEFAULTS["momentum"]:
        settings["momentum"] = found.momentum
    if name == word:
        return Contender(key_of(word), found.title, found.about, settings, found.lr)
    about = f"natgrad.KFAC(model, optimizer) as it stands before {found.title}, {found.about}"
    lr = found.lr if found.lr_with_kfac is None else found.lr_with_kfac
    return Contender(key_of(word), f"K-FAC, {found.title}", about, settings | {"kfac": True}, lr)


def key_of(word: str) -> str:
    """'kfac-my_module:Adan' -> 'kfac-my-module-adan', as a folder may be called"""
    return "-".join(re.findall("[a-z0-9]+", word.lower()))


# Those that take part if none are named.
USUAL = (
    *("sgd", "adamw", "schedulefree", "muon", "muon-hidden", "torch-muon", "soap", "soap-1"),
    *("shampoo", "lamb", "kfac", "kfac-adamw", "naturalmuon"),
)
CONTENDERS: dict[str, Contender] = {word: contender_of(word) for word in USUAL}


# Further ones: for tasks whose loss says how targets are drawn, and what nobody has tuned.
MORE: dict[str, Contender] = {
    "naturalmuon-mc": Contender(
        "naturalmuon-mc",
        "NaturalMuon, MC",
        "natgrad.NaturalMuon(model, curvature=natgrad.MonteCarloFisher(…))",
        {"optimizer": "naturalmuon", "fisher": "monte-carlo"},
        OPTIMIZERS["naturalmuon"].lr,
    ),
    "naturalmuon-untuned": Contender(
        "naturalmuon-untuned",
        "NaturalMuon, untuned",
        "natgrad.NaturalMuon(model), its learning rate as well",
        {"optimizer": "naturalmuon"},
        OPTIMIZERS["naturalmuon"].lr,
        tuned=False,
    ),
}


def preset_contender(task: Settings) -> Contender:
    """The task's own optimizer, with all that its settings say of it."""
    before, values = asdict(neutral(task)), asdict(task)
    changed = {name: values[name] for name in OPTIMIZER_SETTINGS if values[name] != before[name]}
    changed = {**changed, "optimizer": task.optimizer}
    changed.pop("lr", None)
    name = f"{'K-FAC, ' if task.kfac else ''}{OPTIMIZERS[task.optimizer].title} (preset)"
    return Contender("preset", name, "as the task's own settings say", changed, task.lr)


def chosen_contenders(
    words: Sequence[str], known: Mapping[str, Contender]
) -> tuple[Contender, ...]:
    """Those of ``words``, each of which is a key of ``known``, any optimizer, or K-FAC before
    one."""
    found = []
    known = {**known, **MORE}
    for word in words:
        name = word.removeprefix(_KFAC)
        if word not in known and name not in OPTIMIZERS and not is_path(name):
            raise SettingError(
                f"There is no optimizer {word!r}: name some of {', '.join(known)}, with commas, or "
                f"your own as {PATH}; kfac- before the name of an optimizer puts K-FAC in front of "
                "it."
            )
        key = key_of(word)
        found.append(known[key] if key in known else contender_of(word))
    return tuple(found)
