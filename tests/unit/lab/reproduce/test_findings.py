"""Findings, tables and predictions of items on results that are written down here: each finding
can come out as not held, and tables have the numbers of the runs."""

import json
from copy import deepcopy
from dataclasses import asdict
from math import inf
from types import SimpleNamespace

import pytest

from natgrad.errors import NatgradError
from natgrad.lab.reproduce import ITEMS, Finding, Item, rank_runs, reproduce
from natgrad.lab.reproduce.critical_batch import fitted_size, geometric
from natgrad.lab.reproduce.processes import scaled
from natgrad.lab.reproduce.training_schemes import ALL, NONE, WITHOUT, _task, ablated
from natgrad.tables import Column, Table


def run(losses, dice=(), seconds=None, **others):
    """A course tested after every ten steps, with accuracies that mirror the losses."""
    steps = [10 * (i + 1) for i in range(len(losses))]
    return {
        "lr": 0.1,
        "steps": steps,
        "seconds": seconds or [step / 100 for step in steps],
        "fit_loss": list(losses),
        "test_loss": list(losses),
        "fit_accuracy": [1 - loss for loss in losses],
        "test_accuracy": [1 - loss for loss in losses],
        "test_dice": [1 - loss for loss in losses],
        "ended": True,
        **others,
    }


def critical(sgd, kfac, scales=(100.0, 140.0)):
    runs = {
        key: {
            str(batch): {"lr": 0.1, "steps": count, "edge": batch == 16}
            for batch, count in zip((16, 64, 256, 1024), steps, strict=True)
        }
        for key, steps in (("sgd", sgd), ("kfac", kfac))
    }
    return {"target": 0.7, "runs": runs, "noise_scales": list(scales)}


def intervals(accuracies, seconds, decompositions=(80, 20, 8, 4, 2, 10, 5)):
    names = ("at every step", *(f"every {n} steps" for n in (5, 10, 20, 40)))
    names += ("Drift(0.1)", "Drift(0.3)", "SGD")
    runs = {}
    for name, accuracy, spent, count in zip(
        names, accuracies, seconds, (*decompositions, None), strict=True
    ):
        runs[name] = run([1 - accuracy], seconds=[spent])
        if count is not None:
            runs[name]["decompositions"] = count
    return {"runs": runs}


def processes(sgd, kfac, steps=(40, 20)):
    return {
        "runs": {
            str(count): {
                "sgd": {"steps": [steps[0]], "accuracy": [a]},
                "kfac": {"steps": [steps[1]], "accuracy": [b]},
            }
            for count, a, b in zip((1, 2, 4), sgd, kfac, strict=True)
        }
    }


def schemes(worth, gap=0.1, grown=2.0):
    """``worth``: of every scheme, in accuracy."""

    def of(accuracy, gap, norm):
        return run(
            [1 - accuracy],
            fit_accuracy=[accuracy + gap],
            norms=[norm / 2, norm],
        )

    runs = {ALL: of(0.8, 0.1, 5.0)}
    for name in WITHOUT:
        without = f"without {name}"
        norm = 5.0 * grown if name == "weight rescaling" else 5.0
        runs[without] = of(0.8 - worth, gap, norm)
    return {"runs": {**runs, NONE: of(0.8 - worth, 0.3, 9.0)}}


# By item, one result of which everything the paper says is true, and one of which nothing is.
BOTH = {
    "critical-batch": (
        critical((500, 200, 100, 70), (300, 90, 32, 12)),
        critical((100, 100, 100, 100), (120, 120, 120, None), (1e6,)),
    ),
    "intervals": (
        intervals((0.9, 0.9, 0.905, 0.9, 0.85, 0.9, 0.9, 0.9), (10, 7, 5, 4.5, 4, 5, 5, 20)),
        intervals(
            (0.9, 0.9, 0.8, 0.9, 0.95, 0.7, 0.9, 0.9),
            (10, 11, 9, 9, 9, 5, 5, 2),
            (80, 20, 8, 4, 2, 30, 5),
        ),
    ),
    "curves": (
        {"runs": {"sgd": run([0.9, 0.5, 0.3]), "kfac": run([0.6, 0.3, 0.1])}},
        {"runs": {"sgd": run([0.9, 0.5, 0.3]), "kfac": run([1.0, 0.6, 0.4])}},
    ),
    "processes": (
        processes((0.9, 0.9, 0.9), (0.91, 0.9, 0.905)),
        processes((0.9, 0.9, 0.9), (0.91, 0.9, 0.85)),
    ),
    "schemes": (schemes(0.05, gap=0.2), schemes(-0.05, gap=0.05, grown=1.0)),
    "unet": (
        {"runs": {"adam": run([0.9, 0.5, 0.3]), "kfac": run([0.6, 0.2, 0.1])}},
        {"runs": {"adam": run([0.9, 0.5, 0.3]), "kfac": run([0.9, 0.8, 0.7])}},
    ),
}


@pytest.mark.parametrize("name", BOTH)
def test_findings_hold_or_do_not(name):
    good, bad = (json.loads(json.dumps(one)) for one in BOTH[name])
    for finding in ITEMS[name].findings():
        assert finding.margin(good) > 0, finding.text
        assert not finding.margin(bad) > 0, finding.text
        assert finding.line([good, good]).startswith("held (2 of 2 seeds; ")
        assert finding.line([good, bad]).startswith("**not held** (1 of 2 seeds; ")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        (
            "critical-batch",
            ("1024", "100 (70–100)", "0.1 (0.1–0.1)", "not reached (12–not reached)"),
        ),
        ("intervals", ("every 10 steps", "90.50% (80.00%–90.50%)", "9.0 (5.0–9.0)")),
        ("curves", ("K-FAC", "0.1 (0.1–0.1)", "0.400 (0.100–0.400)", "90.0% (60.0%–90.0%)")),
        ("processes", ("4", "128", "0.08", "90.00% (90.00%–90.00%) in 40")),
        ("schemes", ("without weight rescaling", "85.00% (75.00%–85.00%)")),
        ("unet", ("K-FAC", "0.1 (0.1–0.1)", "0.900 (0.300–0.900)", "not reached (20–not reached)")),
    ],
)
def test_tables_have_the_numbers_of_the_runs(name, row):
    table = ITEMS[name].table(BOTH[name])
    (found,) = [one for one in table.rows if one[0] == row[0]]
    assert found[: len(row)] == row


def test_rates_on_the_edge_of_those_tried_are_counted():
    footer = ITEMS["critical-batch"].table(BOTH["critical-batch"]).footer
    assert footer.endswith(
        "In 4 of 16 cases the best rate is the lowest or the highest of those tried"
    )
    assert "predicted 1,000,000 (120–1,000,000)" in footer


def test_the_critical_batch_size_of_steps_that_have_one():
    runs = {str(batch): {"steps": 40 * (1 + 150 / batch)} for batch in (16, 64, 256, 1024)}
    assert fitted_size(runs) == pytest.approx(150, rel=0.02)
    runs["16"] = {"steps": None}  # beyond the limit
    assert fitted_size(runs) == pytest.approx(150, rel=0.02)
    assert fitted_size({"16": {"steps": None}, "32": {"steps": 3}}) == inf
    assert sorted(geometric(30, 0.2)) == [*range(1, 11), 12, 14, 16, 19, 22, 26, 30]


def test_every_scheme_is_left_out_once():
    """And nothing else is changed, but the damping that then does not fall."""
    task = _task(0, smoke=False)
    found = ablated(task)
    whole = asdict(task)
    changed = {}
    for name, settings in found.items():
        now = asdict(settings)
        changed[name] = " ".join(sorted(key for key in now if now[key] != whole[key]))
    every = set(" ".join(changed.values()).split())
    assert set(changed.pop(NONE).split()) == every
    assert changed == {
        ALL: "",
        "without running mixup": "mixup",
        "without random erasing": "erasing",
        "without damping warm-up": "damping damping_steps damping_target",
        "without more damping of norm layers": "norm_damping",
        "without polynomial decay": "schedule",
        "without momentum coupling": "coupled",
        "without displacement momentum": "displacement",
        "without weight rescaling": "rescaling",
        "without HeNormal weights": "he_normal",
    }
    none = asdict(found[NONE])
    assert none["damping"] == task.damping_target < task.damping


def test_rates_and_batches_grow_with_processes():
    one, four = (scaled("kfac", count, 0) for count in (1, 4))
    assert (four.batch_size, four.lr) == (4 * one.batch_size, 4 * one.lr)
    sgd = scaled("sgd", 4, 0)
    assert (sgd.batch_size, sgd.lr, sgd.epochs) == (four.batch_size, four.lr, 2 * four.epochs)


def test_processes_that_fail_are_said(monkeypatch):
    done = SimpleNamespace(returncode=3, stderr="Traceback\nDataError: There are none.\n")
    monkeypatch.setattr(rank_runs.subprocess, "run", lambda *args, **named: done)
    with pytest.raises(NatgradError) as error:
        rank_runs.on_processes(2, {"sgd": scaled("sgd", 2, 0)})
    assert str(error.value) == (
        "Runs on 2 processes ended with code 3 (DataError: There are none.): try natgrad train "
        "with the same settings to see why."
    )


class Interrupted(Item):
    """Fails at one of its seeds, once."""

    name, title, papers, printed = "interrupted", "T", "P", "nothing."

    def __init__(self, at):
        self.at, self.seeds = at, []

    def measure(self, seed, smoke, tell):
        self.seeds.append(seed)
        if seed == self.at:
            self.at = None
            raise KeyboardInterrupt
        return {"x": float(seed)}

    def findings(self):
        return (Finding("it is there", lambda result: result["x"] - 0.5, "by"),)

    def table(self, results):
        return Table("T", (Column("x"),), tuple((f"{r['x']}",) for r in results))

    def draw(self, axes, results): ...


def test_what_was_measured_is_not_measured_again(tmp_path):
    item = Interrupted(at=2)
    with pytest.raises(KeyboardInterrupt):
        reproduce(item, tmp_path, 3, lambda text: None)
    kept = json.loads((tmp_path / "interrupted.json").read_text())
    assert [one["x"] for one in kept["results"]] == [0, 1]
    found = reproduce(item, tmp_path, 3, lambda text: None)
    assert item.seeds == [0, 1, 2, 2]
    assert [row[0] for row in found.table().rows] == ["0.0", "1.0", "2.0"]
    assert found.findings() == ["**not held** (2 of 3 seeds; by -0.5 to 1.5): it is there"]


def test_results_are_not_changed_by_who_reads_them():
    for name, results in BOTH.items():
        before = deepcopy(results)
        ITEMS[name].table(results)
        assert results == before
