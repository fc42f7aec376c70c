"""Who takes part in a comparison: an optimizer, what it is told, and where its learning rates lie.

A run of a contender is ``task + what is its own + learning rate + seed``: all that the settings of
a task say about one optimizer alone is taken out of them first.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any

from natgrad.errors import SettingError
from natgrad.runtime.ranges import POSITIVE, number
from natgrad.train.settings import Settings

_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_PACKAGES = dict.fromkeys(("muon", "soap", "shampoo"), "pytorch_optimizer")


def _section(*names: str) -> tuple[str, ...]:
    return tuple(one.name for one in fields(Settings) if one.metadata["section"] in names)


# What is one optimizer's own; weight decay, warm-up and schedule are the task's.
OWN = (
    *("optimizer", "lr", "momentum", "displacement", "coupled", "rescaling"),
    *_section("kfac"),
)
_ALLOWED = frozenset(_section("optimizer", "kfac")) - {"lr"}


@dataclass(frozen=True)
class Contender:
    """``settings`` are those that differ from defaults, and ``lr`` is the middle of the learning
    rates that are tried."""

    key: str
    name: str
    about: str
    settings: Mapping[str, Any] = field(hash=False)
    lr: float

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

    def told(self, task: Settings, lr: float, seed: int) -> Settings:
        """All that a run is told."""
        return replace(neutral(task), **self.settings, lr=lr, seed=seed)

    def missing(self) -> str:
        """A sentence if a library is not installed, otherwise nothing."""
        package = _PACKAGES.get(self.settings.get("optimizer", "sgd"))
        if package is None or _found(package):
            return ""
        return (
            f"{self.name} comes with {package}, which is not installed: pip install "
            "'natgrad[optimizers]'."
        )

    @property
    def preconditioned(self) -> bool:
        return bool(self.settings.get("kfac"))


def neutral(task: Settings) -> Settings:
    """``task`` without what is an optimizer's own, all of which is at its defaults; no K-FAC."""
    defaults: dict[str, Any] = {one.name: one.default for one in fields(Settings)}
    return replace(task, **{name: defaults[name] for name in OWN} | {"kfac": False})


def _contender(
    key: str, name: str, about: str, lr: float, **settings: Any
) -> tuple[str, Contender]:
    return key, Contender(key, name, about, settings, lr)


CONTENDERS: dict[str, Contender] = dict(
    [
        _contender("sgd", "SGD", "momentum 0.9", 0.1, optimizer="sgd"),
        _contender("adamw", "AdamW", "betas 0.9 and 0.999", 3e-3, optimizer="adamw"),
        _contender(
            "muon",
            "Muon",
            "momentum 0.95; AdamW for embeddings, biases and norm layers",
            0.02,
            optimizer="muon",
            momentum=0.95,
        ),
        _contender(
            "soap",
            "SOAP",
            "betas 0.95 and 0.95, a new basis every 10 steps",
            3e-3,
            optimizer="soap",
            momentum=0.95,
        ),
        _contender(
            "shampoo",
            "Shampoo",
            "momentum 0.9, new roots at every step",
            0.3,
            optimizer="shampoo",
        ),
        _contender("lamb", "LAMB", "betas 0.9 and 0.999", 1e-2, optimizer="lamb"),
        _contender(
            "kfac",
            "K-FAC, SGD",
            "natgrad.KFAC(model, optimizer) as it stands before SGD, momentum 0.9",
            0.03,
            optimizer="sgd",
            kfac=True,
        ),
        _contender(
            "kfac-adamw",
            "K-FAC, AdamW",
            "natgrad.KFAC(model, optimizer) as it stands before AdamW",
            3e-3,
            optimizer="adamw",
            kfac=True,
        ),
    ]
)

_PLAINS = [one for one in CONTENDERS.values() if not one.preconditioned]
_NAMES = {"lars": "LARS"} | {one.settings["optimizer"]: one.name for one in _PLAINS}


def own(task: Settings) -> Contender:
    """The task's own optimizer, with all that its settings say of it."""
    before, values = asdict(neutral(task)), asdict(task)
    changed = {name: values[name] for name in OWN if values[name] != before[name]}
    changed = {**changed, "optimizer": task.optimizer}
    changed.pop("lr", None)
    name = f"{'K-FAC, ' if task.kfac else ''}{_NAMES[task.optimizer]} (preset)"
    return Contender("preset", name, "as the task's own settings say", changed, task.lr)


def contenders(task: Settings) -> dict[str, Contender]:
    """All there are, by key; that of the task's own settings among them."""
    last = own(task)
    return {**CONTENDERS, last.key: last}


def _found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
