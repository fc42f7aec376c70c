"""K-FAC switched on and off by phase of a BERT's training (Pauloski 2022, tables 3 and 4)."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np

from natgrad.lab import data
from natgrad.lab.data.masked_words import MaskedWords
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.train.loop import train
from natgrad.lab.train.settings import Settings
from natgrad.tables import Column, Table

LAMB, KFAC = "LAMB", "K-FAC"
# Phase 1 lasts for a share of its steps, by what trains it: 7,038 and 6,000 in the paper.
FIRST = {LAMB: 1.0, KFAC: 0.85}
# And phase 2, by what has trained phase 1: 1,000 and 1,200 of 1,563.
SHARES = {LAMB: (0.64, 1.0), KFAC: (0.77, 1.0)}
RATES = (0.008, 0.024)  # of phase 1, for each of the two
SECOND_RATE = 2 / 3  # of that of phase 1, as 4e-3 to 6e-3
STEPS = (120, 80)

_TASK: dict[str, Any] = {
    "data": "wikitext2",
    "vocabulary": 512,
    "network": "bert",
    "width": 64,
    "layers": 2,
    "heads": 2,
    "loss": "masked-tokens",
    "metric": "loss",
    "test_samples": 400,
    "optimizer": "lamb",
    "weight_decay": 0.01,
    "schedule": "polynomial",
    "decay_power": 0.5,
    "kl_clip": 0.0,  # LAMB gives every layer a length of its own
    "damping": 3e-3,
    "update_every": 5,
    "refresh_every": 50,
    "exclude": ("*embeddings*", "*decoder*"),
    "evaluate_every": 10_000,
    "checkpoint_every": 10_000,
    "log_every": 10_000,
}
_PHASES: tuple[dict[str, Any], ...] = (
    {"context": 32, "batch_size": 16, "warmup_share": 0.2843},
    {"context": 64, "batch_size": 8, "warmup_share": 0.128},
)


class BertPhases(Item):
    """Masked words of WikiText-2 in short windows, then in long ones. LAMB takes the steps, with
    or without K-FAC's preconditioner."""

    name = "bert"
    title = "K-FAC on or off by phase of BERT's training"
    papers = "Pauloski 2022, sec. 6.3.3 and tables 3 and 4"
    printed = (
        "LAMB alone needs all 1,563 steps of phase 2 for an F1 of 90.1%; with K-FAC in phase 2 "
        "1,000 are enough (90.12%), with K-FAC in phase 1 6,000 steps there and 1,200 of LAMB "
        "(90.52%), with K-FAC in both 5,000 and 1,400."
    )
    cluster = (
        "natgrad train --preset bert-phase1 --out first, then natgrad train --preset bert-phase2 "
        "--start-from first --out second"
    )
    remark = (
        "**These runs are too short to decide anything**: all end at about the loss of guessing "
        "pieces by their frequency, which a BERT leaves only after many more steps than fit into "
        "minutes on one core, so that findings that hold or do not hold here are differences "
        "between seeds. `natgrad compare --preset bert-wikitext2 --optimizers lamb,kfac-lamb` is "
        "the longer run. Here: a BERT of two layers of 64 units and 512 pieces; 120 steps of 16 "
        "windows of 32 tokens, or 102 with K-FAC, then 80 of 8 windows of 64. The target is the "
        "loss on hidden words of the validation text that LAMB has at the end of both phases, in "
        "place of SQuAD's F1, and the schedule of each run ends with it, as in the paper. Each of "
        "the two has the learning rates 0.008 and 0.024 in phase 1, and keeps two thirds of the "
        "better of them in phase 2; damping (0.003) and intervals (5 and 50) are those of the "
        "preset, and were not tuned. CPU seconds are those of a whole run of phase 2, with reading "
        "and testing."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        rates = RATES[:1] if smoke else RATES
        task = {"seed": seed, **(_TINY if smoke else {})}
        steps = (4, 4) if smoke else STEPS
        firsts: dict[str, dict[str, float]] = {}
        seconds: dict[str, dict[str, float]] = {}
        with TemporaryDirectory() as folder:
            for name, share in FIRST.items():
                tried = {}
                for rate in rates:
                    tell(f"phase 1, {name}, learning rate {rate}")
                    out = Path(folder) / f"{name}-{rate}"
                    length = round(share * steps[0])
                    tried[rate] = _run(out, task, 0, name, lr=rate, steps=length)["loss"]
                best = min(tried, key=lambda rate: tried[rate])
                firsts[name] = {"rate": best, "loss": tried[best], "steps": round(share * steps[0])}
            for before, first in firsts.items():
                for name in firsts:
                    for share in SHARES[before][-1:] if smoke else SHARES[before]:
                        tell(f"phase 2, {share:.0%}, {name} after {before}")
                        key = _key(before, name, share)
                        seconds[key] = _run(
                            Path(folder) / key,
                            task,
                            1,
                            name,
                            lr=SECOND_RATE * firsts[name]["rate"],
                            steps=round(share * steps[1]),
                            start_from=str(Path(folder) / f"{before}-{first['rate']}"),
                        )
        return {"first": firsts, "second": seconds}

    def findings(self) -> tuple[Finding, ...]:
        def reaches(before: str, name: str, share: float, *, sign: int = 1) -> Any:
            def margin(result: Result) -> float:
                second = result["second"]
                target = float(second[_key(LAMB, LAMB, 1.0)]["loss"])
                least = share if _key(before, name, share) in second else 1.0
                return sign * (target - float(second[_key(before, name, least)]["loss"]))

            return margin

        below = "loss below that by"
        return (
            Finding(
                "with K-FAC in phase 2 alone 64% of its steps reach what LAMB reaches in all",
                reaches(LAMB, KFAC, 0.64),
                below,
            ),
            Finding(
                "LAMB itself does not in as few",
                reaches(LAMB, LAMB, 0.64, sign=-1),
                "loss above that by",
            ),
            Finding(
                "with K-FAC in phase 1 alone, 85% of that and 77% of LAMB's phase 2 do",
                reaches(KFAC, LAMB, 0.77),
                below,
            ),
            Finding(
                "with K-FAC in both, 85% and 77% do not",
                reaches(KFAC, KFAC, 0.77, sign=-1),
                "loss above that by",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for before in FIRST:
            first = [result["first"][before] for result in results]
            for name in FIRST:
                for share in SHARES[before]:
                    key = _key(before, name, share)
                    if key not in results[0]["second"]:
                        continue
                    runs = [result["second"][key] for result in results]
                    rows.append(
                        (
                            f"{before}, {first[0]['steps']}",
                            f"{name}, {runs[0]['steps']}",
                            middle([run["loss"] for run in runs], ".3f"),
                            middle([run["cpu"] for run in runs], ".1f"),
                        )
                    )
        names = ("test loss", "CPU seconds of phase 2")
        columns = (
            Column("phase 1, steps"),
            Column("phase 2, steps"),
            *(Column(name, "right") for name in names),
        )
        footer = "median over seeds, with the least and the most"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, before in enumerate(FIRST):
            for name, line in ((LAMB, "--"), (KFAC, "-")):
                keys = [_key(before, name, share) for share in SHARES[before]]
                runs = [results[0]["second"].get(key) for key in keys]
                points = [(run["steps"], run["loss"]) for run in runs if run is not None]
                x, y = zip(*points, strict=True)
                axes.plot(x, y, f"o{line}", color=f"C{index}", label=f"{before}, then {name}")
        axes.axhline(results[0]["second"][_key(LAMB, LAMB, 1.0)]["loss"], color="0.6", linewidth=1)
        axes.set_xlabel("steps of phase 2, each a run of its own (first seed)")
        axes.set_ylabel("test loss")
        axes.legend(frameon=False)


def _run(
    folder: Path, task: dict[str, Any], phase: int, name: str, **others: Any
) -> dict[str, float]:
    """Test loss, steps and CPU seconds of a run in a folder."""
    settings = {**_TASK, **_PHASES[phase], **task, "kfac": name == KFAC, **others}
    begin = process_time()
    outcome = train(Settings(**settings), folder)
    loss, spent = float(outcome.metrics["loss"]), round(process_time() - begin, 2)
    return {"loss": loss, "steps": outcome.step, "cpu": spent}


def _key(before: str, name: str, share: float) -> str:
    return f"{before}, {name}, {share:.0%}"


def drawn_words() -> tuple[MaskedWords, MaskedWords]:
    """Windows of words that are drawn at random, for a run of seconds."""
    words = np.random.default_rng(0).choice(["an", "and", "ant", "tan", "nat"], 400)
    text = " ".join(words.tolist())
    train, test = data.masked_words(data.Split(text, text), length=16, pieces=40)
    return train, test


_TINY: dict[str, Any] = {
    "data": f"{__name__}:{drawn_words.__name__}",
    "vocabulary": 0,
    "width": 8,
    "batch_size": 4,
    "test_samples": 4,
}
