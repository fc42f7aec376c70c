"""The examples run, in a few steps each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_demo(tmp_path):
    """What `make demo` runs, with fewer steps: two tables, and one page of both."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    recipe = subprocess.run(
        ["make", "-n", "demo", "BIN=BIN", "VENV=VENV", f"DEMO={tmp_path}"],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    commands = re.findall(r"BIN/python (-m natgrad .*)", recipe.stdout)
    assert [command.split()[2] for command in commands] == ["compare", "compare", "report"]
    said = ""
    for command in commands:
        few = "--optimizers sgd,kfac --trials 1 --seeds 1 --steps 3"
        given = f"{command} {few if 'compare' in command else ''}".split()
        done = subprocess.run([sys.executable, *given], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    for task in ("digits-autoencoder", "digits-cnn"):
        assert f"{task}: 3 steps of 256 samples" in said
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "digits-autoencoder" in page
    assert "digits-cnn" in page
    assert not re.search(r"""(src|href)="(?!#|data:)|<iframe|@import|url\(\s*['"]?http""", page)


def test_curvature_tour(tmp_path, monkeypatch):
    """It prints all its tables, and draws."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "120")  # so that no row is folded
    command = [sys.executable, EXAMPLES / "curvature_tour.py"]
    options = ["--steps", "1", "--samples", "20", "--out", tmp_path]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    for title in ("Sizes of a matrix over 666 parameters", "After 0 steps, ", "After 1 steps, "):
        assert title in done.stdout
    for name in "HGC":
        trace = rf"^ *{name} +[\d.]+ ± [\d.e-]+ +[\d.]+, [\d.]+, [\d.]+ "
        assert len(re.findall(trace, done.stdout, re.MULTILINE)) == 2
    assert len(re.findall(r"^ *Kronecker\(.*\) +0\.\d+ +0\.\d+$", done.stdout, re.MULTILINE)) == 1
    for measure in ("B_noise", "TIC", "sharpness"):
        assert measure in done.stdout
    names = {"spectra.png", "layers.png", "blocks.png", "quality.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
