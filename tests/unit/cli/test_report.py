"""`natgrad report`: a page from folders, and one sentence for what is wrong."""

import re
import sys
import webbrowser

import pytest

from unit.lab.report import sample_folders as made


@pytest.fixture
def run(tmp_path):
    pytest.importorskip("matplotlib")
    return made.run(tmp_path / "run", [{"kind": "test", "step": 1, "loss": 2.0}], kfac=False)


def test_help_fits_a_screen_and_has_an_example(natgrad, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = natgrad("report", "--help")
    assert said.code == 0
    lines = said.out.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert "natgrad report run --png pictures" in said.out
    flags = {"--out", "--png", "--title", "--open", "--help"}
    assert set(re.findall(r"--[a-z]+", said.out)) == flags


def test_nothing_given_is_help(natgrad):
    assert "Usage: natgrad report" in natgrad("report").err


def test_the_page_is_in_the_folder(natgrad, run):
    said = natgrad("report", str(run))
    assert said.code == 0
    assert said.out == f"The page is {run / 'report.html'}.\n"
    assert not said.err
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_another_place_pictures_and_a_title(natgrad, run, tmp_path):
    file, pictures = tmp_path / "page.html", tmp_path / "some" / "pictures"
    said = natgrad(
        "report", str(run), "--out", str(file), "--png", str(pictures), "--title", "My run"
    )
    assert said.code == 0
    assert said.out == f"The page is {file}.\nThe pictures are in {pictures}.\n"
    assert "<h1>My run</h1>" in file.read_text(encoding="utf-8")
    assert (pictures / "run-loss-steps.png").stat().st_size > 1000
    assert not (run / "report.html").exists()


def test_open_shows_it(natgrad, run, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert not natgrad("report", str(run), "--open").err
    assert opened == [(run / "report.html").as_uri()]


def test_no_browser(natgrad, run, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    said = natgrad("report", str(run), "--open")
    assert said.code == 0
    assert said.err == "There is no browser to show it in: open the file in one.\n"


def test_without_matplotlib(natgrad, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = natgrad("report", str(run))
    assert said.code == 2
    assert said.err == (
        "natgrad: Pictures need matplotlib, which is not installed: pip install "
        "'natgrad[report]'.\n"
    )


def test_a_folder_that_holds_nothing(natgrad, tmp_path):
    pytest.importorskip("matplotlib")
    said = natgrad("report", str(tmp_path))
    assert said.code == 2
    assert said.err.startswith(f"natgrad: The folder {tmp_path} holds neither a run")
    assert said.err.count("\n") == 1


def test_results_that_are_spoilt(natgrad, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "results.json").write_text("{", encoding="utf-8")
    said = natgrad("report", str(tmp_path))
    assert said.code == 1
    assert said.err.startswith("natgrad: The results ")
    assert said.err.count("\n") == 1
