"""NaturalMuon with one of its choices changed, for `benchmarks.ablation`.

Each is an optimizer that a run names as ``benchmarks.ablation_variants:NAME``, so that variants are
trained, tuned and resumed as any other optimizer is.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

import natgrad
from natgrad.geometry import Elementwise, Euclidean
from natgrad.lab.compare import Contender
from natgrad.lab.schemes.optimizers_by_name import NamedOptimizer, OptimizerRequest
from natgrad.schedules import Doubling

LR = 0.01


@dataclass(frozen=True)
class Variant:
    """One choice: the ``factor`` that it belongs to, its ``value`` in words, what `NaturalMuon` is
    told (``arguments``) and what the run is (``settings``)."""

    factor: str
    value: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def optimizer(self) -> NamedOptimizer:
        def build(asked: OptimizerRequest) -> Optimizer:
            usual = {"momentum": asked.momentum, "curvature": asked.curvature}
            return natgrad.NaturalMuon(
                asked.model, asked.lr, params=asked.params, **{**usual, **self.arguments}
            )

        return NamedOptimizer(self.title, f"natgrad.NaturalMuon, {self.title}", build, LR)

    @property
    def title(self) -> str:
        return f"{self.factor} {self.value}"

    def contender(self, name: str) -> Contender:
        """``name``: of the optimizer in this module."""
        told = {"optimizer": f"{__name__}:{name}", **self.settings}
        return Contender(name.lower().replace("_", "-"), self.title, self.title, told, LR)


def _every(update: Any, refresh: Any) -> dict[str, Any]:
    return {"update_every": update, "refresh_every": refresh}


def _variants() -> dict[str, Variant]:
    found = {"DEFAULT": Variant("as it is", "")}
    found |= {
        "EUCLIDEAN": Variant("geometry", "Euclidean(1)", {"geometry": Euclidean()}),
        "EUCLIDEAN_HALF": Variant("geometry", "Euclidean(0.5)", {"geometry": Euclidean(0.5)}),
        "ELEMENTWISE": Variant("geometry", "Elementwise()", {"geometry": Elementwise()}),
    }
    for power in (0, 0.25, 0.75, 1):
        name = f"POWER_{round(100 * power)}"
        found[name] = Variant("power", f"{power:g}", {"geometry": natgrad.Spectral(power)})
    for floor in (0.002, 0.01, 0.05, 0.1):
        name = f"FLOOR_{round(1000 * floor):03}"
        found[name] = Variant("floor", f"{floor:g}", {"geometry": natgrad.Spectral(floor=floor)})
    found["MONTE_CARLO"] = Variant("Fisher", "Monte-Carlo", {}, {"fisher": "monte-carlo"})
    found["MONTE_CARLO_POWER_1"] = Variant(
        "Fisher",
        "Monte-Carlo, power 1",
        {"geometry": natgrad.Spectral(1)},
        {"fisher": "monte-carlo"},
    )
    for share in (0.01, 0.03, 0.3, 1.0):
        name = f"DAMPING_{round(100 * share)}"
        found[name] = Variant("damping", f"{share:g}", {"damping": natgrad.Relative(share)})
    found["OUTPUT_CHANGE"] = Variant("length", "OutputChange()", {"length": natgrad.OutputChange()})
    for update, refresh in ((1, 1), (2, 10), (4, 40), (10, 20), (10, 100)):
        found[f"EVERY_{update}_{refresh}"] = Variant(
            "interval", f"{update}, {refresh}", _every(update, refresh)
        )
    found["EVERY_DOUBLING"] = Variant(
        "interval", "Doubling(10), Doubling(100)", _every(Doubling(10), Doubling(100))
    )
    for momentum in (0.85, 0.95):
        name = f"MOMENTUM_{round(100 * momentum)}"
        found[name] = Variant("momentum", f"{momentum:g}", {"momentum": momentum})
    if "statistics" in inspect.signature(natgrad.NaturalMuon).parameters:
        for share in (0.25, 0.5):
            name = f"SHARE_{round(100 * share)}"
            found[name] = Variant("share of the batch", f"{share:g}", {"statistics": share})
    return found


VARIANTS = _variants()
globals().update({name: one.optimizer() for name, one in VARIANTS.items()})
