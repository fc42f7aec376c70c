"""The examples run, in a few steps each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_digits(tmp_path):
    """It prints a table for each task, and writes one page that needs nothing else."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    command = [sys.executable, EXAMPLES / "digits.py"]
    options = ["--steps", "3", "--seeds", "1", "--out", tmp_path]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    for task in ("autoencoder", "classifier"):
        assert f"\n{task}: " in done.stdout
    for optimizer in ("SGD", "AdamW", "K-FAC"):
        assert len(re.findall(rf"^ *{optimizer} +[\d.]+ ", done.stdout, re.MULTILINE)) == 2

    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\(\s*['\"]?http", page)
    for fact in (
        "all at their defaults",
        "--steps 3",
        "torch 2.",
        "prefers-color-scheme",
        "viewport",
    ):
        assert fact in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 4
    # A clip path of one picture must not be that of another in the same page.
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', picture)) for picture in pictures]
    assert all(clips)
    assert len(set.union(*clips)) == sum(map(len, clips))


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
