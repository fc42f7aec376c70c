"""The table and the sentences of comparisons whose outcome is known."""

from dataclasses import replace

import pytest

from natgrad.lab.compare import sentences, table
from natgrad.lab.compare.next_run import EndedRuns, assembled
from natgrad.lab.compare.results import Status
from natgrad.lab.compare.summary import narrow
from natgrad.lab.schemes import optimizers_by_name
from natgrad.tables import Column, Table
from unit.lab.compare import sample_setups as made


def seeds(*curves):
    return [made.run(*curve, seed=i + 1) for i, curve in enumerate(curves)]


def slow(run):
    """Steps of 1.4 seconds."""
    return replace(run, seconds=28.0, curve=replace(run.curve, seconds=(14.0, 28.0)))


FOUND = {
    "sgd": EndedRuns(
        [made.run(1.0, 0.5)], seeds((0.9, 0.6, 0.5), (0.9, 0.6, 0.4), (0.9, 0.6, 0.6))
    ),
    "adamw": EndedRuns(
        [made.diverged(), made.run(1.0, 0.5)],
        [*seeds((0.5, 0.3, 0.2), (0.9, 0.8, 0.7)), made.diverged(seed=3)],
    ),
    "kfac": EndedRuns(
        [made.run(1.0), made.diverged()],
        seeds((0.45, 0.1), (0.6, 0.2), (0.6, 0.15)),
    ),
}


@pytest.fixture
def found():
    """Tests every 10 steps and 5 seconds."""
    asked = made.setup("sgd", "adamw", "kfac", trials=2, name="toy")
    had = {**FOUND, "kfac": EndedRuns(FOUND["kfac"].trials, [*map(slow, FOUND["kfac"].runs)])}
    had["sgd"] = EndedRuns([made.run(0.4), made.run(0.5)], FOUND["sgd"].runs)
    return assembled(asked, had, {})


def test_the_table(found):
    seen = table(found)
    assert seen.title == (
        "toy: 4 steps of 32 samples, 2 learning rates tried by each, then 3 seeds"
    )
    assert [column.name for column in seen.columns] == [
        "optimizer",
        "lr",
        "training loss",
        "test accuracy",
        "a step",
        "steps to target",
        "seconds to target",
        "failures",
    ]
    assert seen.rows == (
        (
            "SGD",
            "≤ 0.1",
            "0.500 (0.400–0.600)",
            "50.0% (50.0%–50.0%)",
            "500 ms",
            "30, 1 of 3 reach it",
            "15.0, 1 of 3 reach it",
            "none",
        ),
        (
            "AdamW",
            "≥ 0.012",
            "0.450 (0.200–0.700), 2 of 3 end",
            "50.0% (50.0%–50.0%), 2 of 3 end",
            "500 ms",
            "20, 1 of 3 reach it",
            "10.0, 1 of 3 reach it",
            "1 of 2 trials diverged, 1 of 3 runs diverged",
        ),
        (
            "K-FAC, SGD",
            "≤ 0.03",
            "0.150 (0.100–0.200)",
            "50.0% (50.0%–50.0%)",
            "1.40 s",
            "20 (20–20)",
            "28.0 (28.0–28.0)",
            "1 of 2 trials diverged",
        ),
    )
    assert seen.footer == "Target: training loss 0.450, what AdamW ends with."


def test_the_sentences(found):
    """AdamW is sooner there on one seed of three, and counts less than who is there on all."""
    assert sentences(found)[:3] == [
        "First at the target in steps: K-FAC, SGD, 20 (20–20); in seconds: K-FAC, SGD, 28.0 "
        "(28.0–28.0).",
        "None of the others is ahead of K-FAC, SGD.",
        "≥ or ≤: the best learning rate was the outermost that SGD; AdamW; K-FAC, SGD tried, and a "
        "better one may lie beyond: give more --trials, or another middle with --rates.",
    ]


def test_where_kfac_loses():
    asked = made.setup("sgd", "adamw", "kfac", trials=1, seeds=1)
    had = {
        "sgd": EndedRuns([made.run(1.0)], seeds((0.9, 0.7, 0.5))),
        "adamw": EndedRuns([made.run(1.0)], seeds((0.9, 0.3, 0.05))),
        "kfac": EndedRuns([made.run(1.0)], seeds((0.9, 0.6, 0.1))),
    }
    seen = assembled(asked, had, {})
    assert sentences(seen) == [
        "First at the target in steps: AdamW, 30; in seconds: AdamW, 15.0.",
        "Ahead of K-FAC, SGD: in steps AdamW; in seconds AdamW; in the training loss at the end "
        "AdamW.",
    ]
    had["kfac"] = EndedRuns([made.run(1.0)], seeds((0.9, 0.8, 0.7)))
    assert sentences(assembled(asked, had, {}))[1] == (
        "Ahead of K-FAC, SGD: in steps AdamW; in seconds AdamW; in the training loss at the end "
        "SGD and AdamW."
    )


def test_being_as_good_is_no_loss():
    asked = made.setup("sgd", "kfac", trials=1, seeds=1)
    same = {key: EndedRuns([made.run(1.0)], seeds((0.9, 0.5))) for key in ("sgd", "kfac")}
    assert "None of the others is ahead of K-FAC, SGD." in sentences(assembled(asked, same, {}))


def test_nobody_is_there():
    asked = made.setup("sgd", "kfac", trials=1, seeds=1, target=0.01)
    had = {key: EndedRuns([made.run(1.0)], seeds((0.9, 0.5))) for key in ("sgd", "kfac")}
    seen = assembled(asked, had, {})
    assert sentences(seen)[0] == "No run met the target."
    assert table(seen).column("steps to target") == ("never", "never")
    assert table(seen).footer == "Target: training loss 0.0100, given."


def test_failures_and_what_is_missing_are_told(monkeypatch):
    monkeypatch.setattr(optimizers_by_name, "find_spec", lambda name: None)
    asked = made.setup("sgd", "kfac", "soap", trials=2, seeds=1)
    no = [made.run(status=Status.FAILED, said="RuntimeError: no room") for _ in range(2)]
    had = {
        "sgd": EndedRuns([made.run(0.5), made.run(0.6)], []),
        "kfac": EndedRuns(no),
    }
    seen = assembled(asked, had, {})
    assert table(seen).column("failures") == ("none", "2 of 2 trials failed", "not installed")
    assert table(seen).rows[1][1:-1] == ("–",) * 6
    assert table(seen).rows[2][1:-1] == ("–",) * 6
    assert table(seen).footer == "There is no target, as no run has come to its end."
    assert sentences(seen) == [
        "SOAP comes with pytorch_optimizer, which is not installed: pip install "
        "'natgrad[optimizers]'.",
        "≥ or ≤: the best learning rate was the outermost that SGD tried, and a better one may lie "
        "beyond: give more --trials, or another middle with --rates.",
        "K-FAC, SGD failed: RuntimeError: no room",
    ]


def test_on_test_data_there_is_one_column():
    asked = made.setup("sgd", trials=1, seeds=1, metric="accuracy", on="test")
    had = {"sgd": EndedRuns([made.run(1.0)], seeds((0.9, 0.5)))}
    seen = table(assembled(asked, had, {}))
    assert seen.columns[2].name == "test accuracy"
    assert seen.columns[3].name == "a step"
    assert seen.rows[0][2] == "50.0%"
    assert seen.title.endswith("1 learning rate tried by each, then 1 seed")


def test_a_run_that_is_under_way_counts_for_nothing():
    asked = made.setup("sgd", trials=1, seeds=2)
    runs = [*seeds((0.9, 0.5)), made.run(0.9, seed=2, status=Status.RUNNING)]
    seen = table(assembled(asked, {"sgd": EndedRuns([made.run(1.0)], runs)}, {}))
    assert seen.column("steps to target") == ("20",)


WIDE = Table(
    "title",
    (Column("a"), Column("bb"), Column("ccc"), Column("d")),
    (("1" * 10, "2" * 5, "3" * 5, "4"), ("x", "y", "z", "w")),
    "footer",
)


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (100, ["a bb ccc d"]),
        (33, ["a bb ccc d"]),
        (32, ["a bb ccc", "a d"]),
        (25, ["a bb", "a ccc d"]),
        (3, ["a bb", "a ccc", "a d"]),
    ],
)
def test_a_narrow_screen(width, parts):
    found = narrow(WIDE, width)
    assert [" ".join(c.name for c in one.columns) for one in found] == parts
    assert (found[0].title, found[-1].footer) == ("title", "footer")
    assert "".join(one.title + one.footer for one in found) == "titlefooter"
    for one in found:
        for column in one.columns:
            assert one.column(column.name) == WIDE.column(column.name)
