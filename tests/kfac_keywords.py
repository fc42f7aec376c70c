"""Keywords of KFAC in their groups, from the flat ones by which tests are parametrised."""

from dataclasses import fields
from typing import Any

from natgrad import Distributed, MeanLoss, SumLoss

LOSSES = {"mean": MeanLoss, "sum": SumLoss}


def grouped(reduction: str = "mean", **flat: Any) -> dict[str, Any]:
    """``loss=`` of ``reduction`` and what else is a loss's, ``distributed=``, and all others."""

    def of(group: type) -> Any:
        return group(**{f.name: flat.pop(f.name) for f in fields(group) if f.name in flat})

    return {"loss": of(LOSSES[reduction]), "distributed": of(Distributed), **flat}
