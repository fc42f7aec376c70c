"""`natgrad reproduce`: what there is, one item in seconds, and one sentence for what is wrong."""

from importlib import import_module

import pytest

from natgrad.lab.reproduce import ITEMS


def test_what_there_is(natgrad):
    said = natgrad("reproduce", "--list")
    assert said.code == 0
    for name, item in ITEMS.items():
        assert name in said.out
        assert item.title.split(":")[0] in said.out


def test_one_in_seconds(natgrad, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- sizes -->\n<!-- /sizes -->\n")
    options = ("--smoke", "--out", str(tmp_path / "found"), "--page", str(page))
    said = natgrad("reproduce", "sizes", *options)
    assert said.code == 0
    assert "60,965,224" in said.out
    assert "held (no chance in it; by a factor" in said.out
    assert "sizes, seed 1 of 1" in said.err
    assert (tmp_path / "found" / "sizes-smoke.json").exists()
    assert page.read_text() == "<!-- sizes -->\n<!-- /sizes -->\n"  # numbers that mean nothing


def test_errors_are_one_sentence(natgrad):
    said = natgrad("reproduce", "--seeds", "2")
    assert said.code == 2
    assert said.err.startswith("natgrad: natgrad reproduce is given no name: name some of sizes, ")
    said = natgrad("reproduce", "nothing")
    assert said.code == 2
    assert said.err.startswith(
        "natgrad: There is nothing called 'nothing' to measure: name some of sizes, change-rates, "
    )


@pytest.mark.parametrize("there", [True, False])
def test_all_leaves_out_what_needs_a_package_that_is_not_there(monkeypatch, capsys, there):
    command = import_module("natgrad.cli.reproduce")
    monkeypatch.setattr(command, "find_spec", lambda name: there or None)
    asked = command._asked([], True)
    assert ("mask-rcnn" in asked) == there
    assert len(asked) == len(ITEMS) - (not there)
    said = "" if there else "torchvision is not installed: pip install torchvision."
    assert capsys.readouterr().err.strip().endswith(said)
    assert command._asked(["mask-rcnn"], False) == ["mask-rcnn"]
