"""Results as a file: read back as they were, or refused in a sentence."""

import json
import os
from dataclasses import replace

import pytest

from natgrad.errors import CheckpointError, SettingError
from natgrad.lab.compare import Comparison
from natgrad.lab.compare.next_run import EndedRuns, assembled
from natgrad.lab.compare.results import NAME, ComparedCurve, Reached, Status
from natgrad.lab.compare.setup import Measure
from unit.lab.compare import sample_setups as made

ASKED = made.setup("sgd", "kfac", "soap", trials=2, seeds=2)
FOUND = {
    "sgd": EndedRuns(
        [made.run(0.5, 0.4), made.run(0.3, 0.2, lr=0.4)],
        [
            made.run(0.3, 0.25, lr=0.4, seed=1),
            made.diverged(lr=0.4, seed=2),
        ],
    ),
    "kfac": EndedRuns(
        [
            made.run(0.1, 0.05, kfac_share=0.4),
            made.diverged(said="It was too far."),
        ]
    ),
}


@pytest.fixture
def found():
    return assembled(ASKED, FOUND, {"machine": "a large one"})


def test_they_read_back_as_they_were(found, tmp_path):
    found.write(tmp_path)
    assert Comparison.read(tmp_path) == found
    assert Comparison.read(str(tmp_path / NAME)) == found
    assert found.entries[0].edge == 1
    assert found.entries[1].edge == -1
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_the_file(found, tmp_path):
    """Names that others read."""
    found.write(tmp_path)
    values = json.loads((tmp_path / NAME).read_text())
    assert list(values) == [
        "format",
        "name",
        "task",
        "metric",
        "on",
        "higher",
        "target",
        "target_from",
        "tuning_seed",
        "seeds",
        "trials",
        "tuning_steps",
        "facts",
        "contenders",
    ]
    assert values["format"] == 1
    assert (values["metric"], values["on"], values["higher"]) == ("loss", "fit", False)
    assert (values["target"], values["target_from"]) == (0.25, "what SGD ends with")
    assert (values["tuning_seed"], values["seeds"], values["trials"]) == (0, [1, 2], 2)
    assert values["task"]["batch_size"] == 32
    first, second, third = values["contenders"]
    assert list(first) == [
        "name",
        "key",
        "about",
        "settings",
        "chosen",
        "edge",
        "missing",
        "trials",
        "runs",
    ]
    assert (first["key"], first["chosen"], first["edge"]) == ("sgd", 0.4, True)
    assert second["settings"] == {"optimizer": "sgd", "kfac": True}
    assert third["trials"] == third["runs"] == []
    assert first["runs"][0] == {
        "lr": 0.4,
        "seed": 1,
        "folder": "folder",
        "status": "done",
        "said": "",
        "steps": 20,
        "seconds": 10.0,
        "final": 0.25,
        "reached": {"step": 20, "seconds": 10.0},
        "curve": {
            "steps": [10, 20],
            "seconds": [5.0, 10.0],
            "fit_loss": [0.3, 0.25],
            "test_accuracy": [0.5, 0.5],
        },
        "kfac_share": None,
    }
    assert (first["runs"][1]["status"], first["runs"][1]["final"]) == ("diverged", None)


@pytest.mark.parametrize(
    ("measure", "target", "final", "reached"),
    [
        (Measure("loss", "fit"), None, 0.2, None),
        (Measure("loss", "fit"), 0.5, 0.2, Reached(10, 5.0)),
        (Measure("loss", "fit"), 0.3, 0.2, Reached(30, 15.0)),
        (Measure("loss", "fit"), 0.1, 0.2, None),
        (Measure("accuracy", "test"), 0.5, 0.9, Reached(20, 10.0)),
        (Measure("accuracy", "test"), 0.95, 0.9, None),
        (Measure("dice", "test"), 0.5, None, None),
    ],
)
def test_how_a_run_is_judged(measure, target, final, reached):
    """The target is met at the first test that is as good."""
    run = made.run(0.5, 0.4, 0.2, values={"test_accuracy": (0.4, 0.5, 0.9)})
    judged = run.judged(measure, target)
    assert (judged.final, judged.reached) == (final, reached)


def test_a_run_that_diverged_may_have_met_the_target_before():
    judged = made.run(0.5, 0.4, status=Status.DIVERGED).judged(Measure("loss", "fit"), 0.45)
    assert (judged.final, judged.reached) == (None, Reached(20, 10.0))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SettingError) as error:
        Comparison.read(tmp_path)
    assert str(error.value) == (
        f"The results {tmp_path / NAME} cannot be read (No such file or directory): name the "
        "folder of a comparison."
    )


def test_a_file_that_is_cut_off(found, tmp_path):
    found.write(tmp_path)
    file = tmp_path / NAME
    text = file.read_bytes()
    for part in (text[: len(text) // 2], b"", b"\xff\xfe"):
        file.write_bytes(part)
        with pytest.raises(CheckpointError) as error:
            Comparison.read(tmp_path)
        assert str(error.value) == (
            f"The results {file} are cut off or spoilt: compare anew in another folder."
        )


@pytest.mark.parametrize(
    ("text", "known"), [('{"format": 2}', "2"), ("{}", "None"), ("[1]", "None")]
)
def test_a_file_of_another_format(text, known, tmp_path):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError) as error:
        Comparison.read(tmp_path)
    assert str(error.value) == (
        f"The results {tmp_path / NAME} have format {known} but this version of natgrad reads 1: "
        "read them with the version that wrote them."
    )


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda v: v.pop("seeds"), "KeyError: 'seeds'"),
        (lambda v: v["task"].update(steps="many"), "SettingError: steps is 'many'"),
        (lambda v: v["task"].update(colour=1), "TypeError: Settings.__init__() got an"),
        (lambda v: v["contenders"][0]["runs"][0].update(status="lost"), "ValueError: 'lost' is"),
        (lambda v: v["contenders"][0]["runs"][0]["curve"]["steps"].pop(), "columns of unlike"),
        (lambda v: v.update(target=float("nan")), "ValueError: nan is no finite number"),
        (lambda v: v.update(facts=None), "AttributeError: "),
    ],
    ids=["name", "type", "setting", "status", "curve", "nan", "facts"],
)
def test_a_file_that_lacks_something(spoil, what, found, tmp_path):
    found.write(tmp_path)
    values = json.loads((tmp_path / NAME).read_text())
    spoil(values)
    (tmp_path / NAME).write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as error:
        Comparison.read(tmp_path)
    said = str(error.value)
    assert said.startswith(f"The results {tmp_path / NAME} lack something or have it in another")
    assert said.endswith("): compare anew in another folder.")
    assert what in said


def test_a_full_disk_leaves_the_last_one(found, tmp_path, monkeypatch):
    found.write(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        replace(found, name="other").write(tmp_path)
    assert Comparison.read(tmp_path) == found


def test_what_json_has_no_word_for_is_not_written(found, tmp_path):
    run = replace(made.run(0.5), curve=ComparedCurve((10,), (1.0,), {"fit_loss": (float("nan"),)}))
    spoilt = replace(found, entries=(replace(found.entries[0], runs=(run,)),))
    with pytest.raises(ValueError, match="not JSON compliant"):
        spoilt.write(tmp_path)
