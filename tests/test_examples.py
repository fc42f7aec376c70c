"""The examples run, in a few steps each."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from natgrad import cli

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_the_demo(tmp_path, capsys):
    """What `make demo` runs, with fewer steps: two tables, and one page of both. The commands run
    in this process, which has imported torch already."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    recipe = subprocess.run(
        ["make", "-n", "demo", "BIN=BIN", "VENV=VENV", f"DEMO={tmp_path}", "ARGS="],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    commands = re.findall(r"BIN/python (-m natgrad .*)", recipe.stdout)
    assert [command.split()[2] for command in commands] == ["compare", "compare", "report"]
    for command in commands:
        few = "--optimizers sgd,kfac --trials 1 --seeds 1 --steps 3"
        given = f"{command} {few if 'compare' in command else ''}".split()
        with pytest.raises(SystemExit) as ended:
            cli.run(given[2:])  # after -m natgrad
        assert ended.value.code == 0
    said = capsys.readouterr().out
    for task in ("digits-autoencoder", "digits-cnn"):
        assert f"{task}: 3 steps of 256 samples" in said
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "digits-autoencoder" in page
    assert "digits-cnn" in page
    assert not re.search(r"""(src|href)="(?!#|data:)|<iframe|@import|url\(\s*['"]?http""", page)


@pytest.mark.slow
def test_curvature_tour(tmp_path, monkeypatch, capsys):
    """It prints all its tables, and draws."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "120")  # so that no row is folded
    script = str(EXAMPLES / "curvature_tour.py")
    options = ["--steps", "1", "--samples", "20", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [script, *options])
    runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out

    for title in ("Sizes of a matrix over 666 parameters", "After 0 steps, ", "After 1 steps, "):
        assert title in printed
    for name in "HGC":
        trace = rf"^ *{name} +[\d.]+ ± [\d.e-]+ +[\d.]+, [\d.]+, [\d.]+ "
        assert len(re.findall(trace, printed, re.MULTILINE)) == 2
    assert len(re.findall(r"^ *Kronecker\(.*\) +0\.\d+ +0\.\d+$", printed, re.MULTILINE)) == 1
    for measure in ("B_noise", "TIC", "sharpness"):
        assert measure in printed
    names = {"spectra.png", "layers.png", "blocks.png", "quality.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
