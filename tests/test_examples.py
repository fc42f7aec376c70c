"""The examples run, in a few steps each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("digits")
    command = [sys.executable, EXAMPLES / "digits.py"]
    options = ["--steps", "3", "--seeds", "1", "--out", folder]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, (folder / "index.html").read_text(encoding="utf-8")


def test_digits_prints_a_table_a_task(digits):
    printed, _ = digits
    for task in ("autoencoder", "classifier"):
        assert f"\n{task}: " in printed
    for optimizer in ("SGD", "AdamW", "K-FAC"):
        assert len(re.findall(rf"^ *{optimizer} +[\d.]+ ", printed, re.MULTILINE)) == 2


def test_digits_writes_one_page_that_needs_nothing_else(digits):
    _, page = digits
    assert page.count("<svg") == 4
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\(\s*['\"]?http", page)
    for fact in ("damping = 0.01", "--steps 3", "torch 2.", "prefers-color-scheme", "viewport"):
        assert fact in page


def test_the_ids_of_the_pictures_differ(digits):
    """A clip path of one picture must not be that of another in the same page."""
    _, page = digits
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', picture)) for picture in pictures]
    assert all(clips)
    assert len(set.union(*clips)) == sum(map(len, clips))
