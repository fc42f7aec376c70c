"""What K-FAC can tell of a run, for a page about it: how fast factors change, how long stages take,
and what is where.

All of it is the same on every number of processes: each tells what it keeps, and the first one
writes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.inverses import Diagonalization
from natgrad.lab.train.state import write_text
from natgrad.linalg.block_diagonal import BlockDiagonal
from natgrad.preconditioner import KFAC
from natgrad.tables import Table

NAME = "kfac.json"
FORMAT = 1
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
VALUES = 200  # of a spectrum, picked evenly
LARGEST = 1024  # of a factor that is decomposed for the record alone


def drift(kfac: KFAC) -> dict[str, list[float]]:
    """Quantiles over blocks of the change rate ``‖Xₜ - Xₜ₋₁‖ / ‖Xₜ₋₁‖`` in the last update,
    by the name of the factor (Osawa 2019, eq. 19). Collective."""
    own = {
        (block.name, name): running.change
        for block in kfac.blocks
        for name, running in block.running.items()
    }
    numbers = torch.stack(list(own.values())).tolist() if own else []
    every: dict[tuple[str, str], float] = {}
    for part in kfac.comm.gather(dict(zip(own, numbers, strict=True))):
        every |= part
    found: dict[str, list[float]] = {}
    for factor in sorted({name for _, name in every}):
        # Before its second update a factor has not changed.
        changes = [v for (_, name), v in every.items() if name == factor and v > 0]
        if changes:
            spread = torch.tensor(changes, dtype=torch.float64)
            wanted = torch.tensor(QUANTILES, dtype=torch.float64)
            found[factor] = spread.quantile(wanted).tolist()
    return found


def stages(kfac: KFAC) -> dict[str, dict[str, Any]]:
    """Seconds and calls of this process, since it was started."""
    return {"seconds": dict(kfac.watch.seconds), "calls": dict(kfac.watch.calls)}


def record(kfac: KFAC) -> dict[str, Any]:
    """Tables, spectra and the plan. Collective."""
    tables = {
        "coverage": kfac.coverage(),
        "memory": kfac.memory(),
        "timings": kfac.timings(),
        "drift": kfac.drift(),
        "traffic": kfac.traffic(),
    }
    spectra: dict[tuple[str, str], list[float]] = {}
    for part in kfac.comm.gather(_spectra(kfac)):
        spectra |= part
    return {
        "format": FORMAT,
        "step": kfac.steps,
        **{name: _plain(table) for name, table in tables.items()},
        "spectra": [
            {"block": block.name, "factor": name, "size": block.forms[name].spec.dim, "values": v}
            for block in kfac.blocks
            for name in block.forms
            if (v := spectra.get((block.name, name)))
        ],
        "placement": _placement(kfac),
    }


def write(folder: Path, found: dict[str, Any]) -> None:
    write_text(folder / NAME, json.dumps(found))


def _spectra(kfac: KFAC) -> dict[tuple[str, str], list[float]]:
    """Of the factors that this process keeps, the largest eigenvalue first."""
    found = {}
    for block in kfac.blocks:
        for name, mean in block.kept().items():
            if (values := _eigenvalues(block, name, mean)) is not None:
                found[block.name, name] = _picked(values)
    return found


def _eigenvalues(block: Block, name: str, mean: Tensor) -> Tensor | None:
    """``[batch · dim]``; those of the last decomposition, where it has them."""
    spec = block.forms[name].spec
    if name in block.structure.in_basis or spec.diagonal:
        return mean
    if isinstance(block.inverse, Diagonalization) and name in block.parts:
        return block.inverse.basis_of(block.decomposed_factors()[name]).values
    if spec.dim > LARGEST:
        return None
    try:
        entries = block.forms[name].entries(mean)
        dense = entries.sections if isinstance(entries, BlockDiagonal) else (entries,)
        found = [torch.linalg.eigvalsh(one.double()).flatten() for one in dense]
        values: Tensor = torch.cat(found)
    # A record is no reason to end a run.
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    return values.clamp(min=0.0)


def _picked(values: Tensor) -> list[float]:
    """Descending, at most ``VALUES`` of them with the first and the last."""
    ordered = values.flatten().double().cpu().sort(descending=True).values
    count = min(VALUES, len(ordered))
    at = torch.linspace(0, len(ordered) - 1, count).round().long()
    picked: list[float] = ordered[at].tolist()
    return picked


def _placement(kfac: KFAC) -> dict[str, Any]:
    plan = kfac.plan
    blocks = [
        {
            "name": block.name,
            "workers": list(plan.workers[block.name]),
            "factors": [
                {
                    "name": name,
                    "size": spec.dim,
                    "decomposers": list(plan.decomposers.get((block.name, name), ())),
                    "keepers": list(plan.keepers[block.name, name]),
                }
                for name, spec in block.factors
            ],
        }
        for block in plan.blocks
    ]
    return {"strategy": plan.strategy, "ranks": plan.world_size, "blocks": blocks}


def _plain(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "columns": [{"name": one.name, "align": one.align} for one in table.columns],
        "rows": [list(row) for row in table.rows],
        "footer": table.footer,
    }
