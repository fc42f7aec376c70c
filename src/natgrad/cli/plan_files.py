"""What `natgrad plan` writes to files: lanes of steps, memory against seconds, and all numbers."""

import json
from collections.abc import Callable
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import typer

from natgrad.cli.placements import PlacementComparison, Trained
from natgrad.cli.rank_sweep import RankSweep
from natgrad.cli.step_tables import STAGES, recommendation
from natgrad.errors import SettingError
from natgrad.placement import Kind

Picture = Callable[[str | PathLike[str]], object]

# Told apart by readers who do not see red and green apart (Okabe and Ito 2008).
_COLOURS = "56b4e9 999999 0072b2 f0e442 e69f00 b15928 d55e00 cc79a7 b8a9c9 009e73 66c2a5"
_COLOUR_OF = {s: f"#{colour}" for s, colour in zip(STAGES, _COLOURS.split(), strict=True)}
_LANES = ("compute", "communication")


def save(what: str, option: str, path: Path, draw: Picture) -> None:
    """Write a picture, and say so."""
    try:
        draw(path)
    except ModuleNotFoundError as error:
        known = "pip install" in str(error)  # says already what to do
        needs = f"{option} needs matplotlib, which is not installed: pip install 'natgrad[report]'"
        raise SettingError(str(error) if known else f"{needs}, or leave it out.") from error
    except (OSError, ValueError) as error:
        raise SettingError(
            f"{what} cannot be drawn to {option} {path} ({error}): name a file that ends in .png, "
            ".pdf or .svg in a folder that exists."
        ) from error
    typer.echo(f"\n{what} {'are' if what.endswith('s') else 'is'} drawn in {path}.")


def timeline(trained: Trained) -> Picture:
    """Both lanes of the three kinds of step with K-FAC, one below the other."""

    def drawn(path: str | PathLike[str]) -> object:
        from matplotlib.figure import Figure

        kinds = [kind for kind in Kind if kind is not Kind.WITHOUT]
        figure = Figure(figsize=(11, 6), layout="constrained")
        shown: dict[str, Any] = {}
        for axes, kind in zip(figure.subplots(len(kinds), 1), kinds, strict=True):
            step = trained.model.step(kind)
            for place, lane in enumerate(_LANES):
                for stage, colour in _COLOUR_OF.items():
                    bars = [
                        (1e3 * span.begin, 1e3 * (span.end - span.begin))
                        for span in step.spans
                        if (span.lane, span.stage) == (lane, stage)
                    ]
                    if bars:
                        shown[stage] = axes.broken_barh(bars, (place - 0.4, 0.8), color=colour)
            axes.set_yticks(range(len(_LANES)), _LANES)
            axes.invert_yaxis()
            axes.set_xlim(0, 1e3 * step.seconds)
            axes.set_title(f"{kind.value}: {1e3 * step.seconds:.4g} ms", loc="left", fontsize=10)
        axes.set_xlabel("milliseconds")
        names = [STAGES[stage] for stage in shown]
        figure.legend(list(shown.values()), names, loc="outside lower center", ncols=5, fontsize=8)
        figure.suptitle(f"Training steps of {trained.name}", fontsize=11)
        figure.savefig(path, dpi=150)
        return figure

    return drawn


def fractions(compared: PlacementComparison, title: str) -> Picture:
    """Memory against seconds of an average step, over the fractions of Hybrid (Pauloski 2021)."""
    points = fraction_points(compared)

    def drawn(path: str | PathLike[str]) -> object:
        from matplotlib.figure import Figure

        whole = compared.workload is not None
        figure = Figure(figsize=(6.5, 5.2), layout="constrained")
        times, memory = figure.subplots(2, 1, sharex=True)
        times.plot([1e3 * seconds for _, seconds, _ in points], "o-", color="#0072b2")
        times.set_ylabel(f"ms of an average\n{'training step' if whole else 'step of K-FAC'}")
        memory.plot([kept / 2**20 for _, _, kept in points], "s-", color="#d55e00")
        memory.set_ylabel(f"MiB that a rank keeps\n{'in all' if whole else 'for K-FAC'}")
        names = [name.split(" = ")[0] for name, _, _ in points]
        memory.set_xticks(range(len(points)), names, rotation=45, fontsize=8)
        times.set_title(title, fontsize=10)
        figure.savefig(path, dpi=150)
        return figure

    return drawn


def fraction_points(compared: PlacementComparison) -> list[tuple[str, float, float]]:
    """Name, seconds and bytes of every fraction, from the least workers to the most."""
    ours = ("Hybrid", "MemOpt", "CommOpt")
    if compared.workload is not None:
        return [
            (one.name, one.seconds, one.memory.total)
            for one in compared.trained
            if one.name.startswith(ours)
        ]
    every = compared.world.update_every, compared.world.refresh_every
    return [
        (name, times.step_seconds(*every), float(plan.most_memory))
        for name, plan, times in compared.named()
        if name.startswith(ours)
    ]


def write_json(
    path: Path, compared: PlacementComparison, chosen: Trained, sweep: RankSweep | None
) -> None:
    """All that was compared, in seconds and bytes."""
    world, cluster = compared.world, compared.cluster
    assert compared.workload is not None
    workload = {k: v for k, v in asdict(compared.workload).items() if k != "arrivals"}
    written = {
        "ranks": world.size,
        "update_every": world.update_every,
        "refresh_every": world.refresh_every,
        "cluster": asdict(cluster),
        "workload": workload,
        "chosen": chosen.name,
        "recommendation": recommendation(compared),
        "placements": [_placement(one) for one in compared.trained],
    }
    if sweep is not None:
        written["sweep"] = [
            asdict(one) | {"efficiency": sweep.efficiency(one)} for one in sweep.points
        ]
    try:
        path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingError(
            f"The numbers cannot be written to --json {path} ({error}): name a file in a folder "
            "that exists."
        ) from error
    typer.echo(f"\nThe numbers are in {path}.")


def _placement(one: Trained) -> dict[str, Any]:
    world, times = one.model.plan.world, one.model.times
    steps = [one.model.step(kind) for kind in Kind]
    return {
        "name": one.name,
        "training_step": one.seconds,
        "kfac_step": times.step_seconds(world.update_every, world.refresh_every),
        "steps": {
            step.kind.value: {
                "seconds": step.seconds,
                "exposed": step.exposed,
                "stages": step.stages(),
            }
            for step in steps
        },
        "sent_a_step": one.model.plan.average_sent(),
        "memory": one.memory.kinds() | {"total": one.memory.total},
    }
