"""What folders hold, whole or in pieces, and one sentence for what is none of it."""

import json

import pytest

from natgrad.errors import CheckpointError, DataError, SettingError
from natgrad.lab.compare import Comparison
from natgrad.lab.compare.results import NAME as RESULTS
from natgrad.lab.report.page import folders, run_folder, run_plots
from natgrad.lab.report.page.curves import STEPS
from natgrad.lab.report.page.json_files import finite, numbers
from natgrad.lab.report.page.run_section import lead
from natgrad.lab.train.logs import NAME as LOG
from natgrad.lab.train.loop import SETTINGS
from unit.lab.report import sample_folders as made


def test_a_run(tmp_path):
    found = folders.read(made.run(tmp_path / "mine", seed=3))
    assert isinstance(found, run_folder.Run)
    assert (found.name, found.step, found.settings.seed) == ("mine", 40, 3)
    assert len(found.of("train")) == 40
    assert len(found.of("test")) == 10
    assert found.lines[0].seconds == pytest.approx(0.01)
    assert found.curvature.tables["memory"].footer == "1.50 KiB in all"
    assert found.problems == ()


def test_a_comparison(tmp_path):
    folder, written = made.comparison(tmp_path)
    found = folders.read(folder)
    assert isinstance(found, Comparison)
    assert [one.key for one in found.entries] == [one.key for one in written.entries]
    assert found.entries[0].runs == written.entries[0].runs


def test_points_of_a_metric(tmp_path):
    found = run_folder.read(made.run(tmp_path))
    x, y = run_plots.points(found, "fit", "loss", STEPS)
    assert x == [4.0 * i for i in range(1, 11)]
    assert y == pytest.approx([made.loss(step) for step in x])
    across = run_plots.times([found])[1]
    assert run_plots.points(found, "test", "accuracy", across)[0] == pytest.approx(
        [0.04 * i for i in range(1, 11)]
    )
    assert run_plots.metrics([found]) == ["loss", "accuracy"]


def test_a_log_without_seconds_is_drawn_against_steps_alone(tmp_path):
    lines = [{k: v for k, v in line.items() if k != "elapsed"} for line in made.log()]
    found = run_folder.read(made.run(tmp_path, lines))
    assert run_plots.times([found]) == [STEPS]
    assert len(list(run_plots.curves(found, "p"))) == 2


def test_a_log_that_ends_in_half_a_line(tmp_path):
    folder = made.run(tmp_path)
    path = folder / LOG
    path.write_text(path.read_text(encoding="utf-8")[:1500], encoding="utf-8")
    found = run_folder.read(folder)
    assert 0 < found.step < 40
    assert "steps." in lead(found)


def test_a_run_that_has_written_nothing_yet(tmp_path):
    folder = made.run(tmp_path, [], kfac=False)
    (folder / LOG).unlink()
    found = folders.read(folder)
    assert found.step == 0
    assert lead(found) == f"The run in {folder} has not written a line of its log yet."


def test_a_log_alone(tmp_path):
    folder = made.run(tmp_path / "mine")
    (folder / SETTINGS).unlink()
    found = folders.read(folder)
    assert found.settings is None
    assert found.step == 40
    assert lead(found) == "A run of mine, after 40 steps."


def test_a_step_that_is_no_number(tmp_path):
    found = run_folder.read(made.run(tmp_path, [{"kind": "train", "step": "many", "loss": "low"}]))
    assert found.step == 0
    assert str(run_plots.points(found, "train", "loss", STEPS)) == "([], [])"


def test_settings_of_another_version_are_told_of(tmp_path):
    folder = made.run(tmp_path)
    (folder / SETTINGS).write_text("[task]\nquantum = 1\n", encoding="utf-8")
    found = folders.read(folder)
    assert found.settings is None
    (problem,) = found.problems
    assert problem.startswith("quantum in the settings")


def test_a_log_that_is_no_text(tmp_path):
    folder = made.run(tmp_path)
    (folder / LOG).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError) as error:
        folders.read(folder)
    assert str(error.value).startswith(f"The log {folder / LOG} cannot be read (")
    assert str(error.value).endswith("): copy a good one there.")


def test_no_folder(tmp_path):
    with pytest.raises(SettingError) as error:
        folders.read(tmp_path / "nowhere")
    assert str(error.value) == (
        f"There is no folder {tmp_path / 'nowhere'}: name that of a run or of a comparison, which "
        "natgrad train and natgrad compare write with --out."
    )


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "letter.txt").touch()
    with pytest.raises(SettingError) as error:
        folders.read(tmp_path)
    assert str(error.value) == (
        f"The folder {tmp_path} holds neither a run (settings.toml, log.jsonl) nor a comparison "
        "(results.json): name one that natgrad train or natgrad compare has written with --out."
    )


def test_a_comparison_that_has_only_begun(tmp_path):
    (tmp_path / "comparison.toml").touch()
    with pytest.raises(DataError) as error:
        folders.read(tmp_path)
    assert str(error.value) == (
        f"The comparison in {tmp_path} has no result yet: wait for the first of its runs."
    )


@pytest.mark.parametrize("text", ["{", json.dumps({"format": 9}), json.dumps({"format": 1})])
def test_results_that_are_spoilt(tmp_path, text):
    (tmp_path / RESULTS).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"^The results .*results\.json"):
        folders.read(tmp_path)


def test_numbers():
    assert finite(3) == 3.0
    assert [finite(one) for one in (None, True, "1", float("nan"), float("inf"))] == [None] * 5
    assert numbers([1, None])[0] == 1.0
    assert numbers([1, None])[1] != numbers([1, None])[1]  # NaN


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "A run of convnet on digits, K-FAC with SGD, after all of its 40 steps."),
        (
            {"steps": 90, "optimizer": "adamw"},
            "A run of convnet on digits, K-FAC with AdamW, after 40 of 90 steps.",
        ),
        (
            {"steps": 0, "epochs": 2.0, "kfac": False, "optimizer": "muon"},
            "A run of convnet on digits, Muon, after 40 steps.",
        ),
    ],
    ids=["done", "under way", "epochs"],
)
def test_how_far_a_run_is(tmp_path, settings, said):
    assert lead(run_folder.read(made.run(tmp_path, made.log(), **settings))) == said
