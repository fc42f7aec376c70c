"""Every item of the papers names a test or a command that exists, and items run in seconds."""

import json
import re
import shlex
import subprocess
from dataclasses import fields
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

import forked
from natgrad.cli.main import ABOUT
from natgrad.errors import SettingError
from natgrad.lab.marks import write_between
from natgrad.lab.models.planned import PLANNED
from natgrad.lab.names import NETWORKS, PLACEMENTS
from natgrad.lab.reproduce import ITEMS, Finding, Item, rank_runs, reproduce
from natgrad.lab.reproduce.runner import write_page
from natgrad.lab.train import PRESETS, Settings
from natgrad.placement import CLUSTERS
from natgrad.tables import Column, Table

PLAN = "natgrad.cli.plan"
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
ROW = re.compile(r"^\| `([OPKSY]\d+)` \| (.+?) \| `(.+)` \|$", re.MULTILINE)


def rows():
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


def problem(shown):
    """What is wrong with a test or a command, or nothing."""
    if shown.startswith("tests/"):
        file, _, name = shown.partition("::")
        if not (ROOT / file).exists():
            return "no such file"
        return "" if f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") else "no such test"
    words = shlex.split(shown)
    if words[:2] == ["python", "-m"]:
        return "" if (ROOT / f"{words[2].replace('.', '/')}.py").exists() else "no such module"
    if words[0] != "natgrad" or words[1] not in ABOUT:
        return "no such command"
    if words[1] == "reproduce" and words[2] not in ITEMS:
        return "no such item"
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        if flag == "--preset" and value not in PRESETS:
            return "no such preset"
        known = {f"--{one.name.replace('_', '-')}" for one in fields(Settings)}
        known |= {flag.replace("--", "--no-", 1) for flag in known} | {"--preset", "--out"}
        if words[1] == "train" and flag.startswith("--") and flag not in known:
            return "no such flag"
    return ""


def test_every_item_names_what_exists():
    found = rows()
    ids = [name for name, _, _ in found]
    assert len(ids) == len(set(ids)) > 95
    wrong = {name: why for name, _, shown in found if (why := problem(shown))}
    assert not wrong


def test_what_does_not_exist_is_noticed():
    for shown in (
        "tests/nowhere.py::test_it",
        "tests/test_papers.py::test_nowhere",
        "natgrad reproduce nothing",
        "natgrad train --preset mnst --out run",
        "natgrad train --never 3",
        "natgrad retrain",
        "python -m benchmarks.nowhere",
    ):
        assert problem(shown).startswith("no such "), shown


def commands(text):
    """Those of an item's own settings, which are prose with commands in it."""
    return [part.partition(" (")[0] for part in re.split(r", then |, with ", text) if part]


def wrong_plan(words):
    """What `natgrad plan` would not know of these words."""
    known = {
        f"--{name.replace('_', '-')}" for name in signature(import_module(PLAN).plan).parameters
    }
    allowed = {"--placement": PLACEMENTS, "--network": (*NETWORKS, *PLANNED), "--cluster": CLUSTERS}
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        if flag.startswith("--") and flag not in known:
            return f"no such flag: {flag}"
        if flag in allowed and value not in allowed[flag]:
            return f"no such value of {flag}: {value}"
    return ""


def test_settings_of_the_papers_are_commands_that_exist():
    for item in ITEMS.values():
        for text in commands(item.cluster):
            if not text.startswith("natgrad "):
                continue
            words = shlex.split(text)
            wrong = wrong_plan(words) if words[1] == "plan" else problem(text)
            assert not wrong, (item.name, text)
    assert wrong_plan(["natgrad", "plan", "--placement", "comm-opt"])
    assert wrong_plan(["natgrad", "plan", "--sweep", "3"])


def test_the_page_has_what_was_measured():
    """Every finding as the committed results of three seeds give it."""
    page = PAGE.read_text(encoding="utf-8")
    measured = 0
    for name, item in ITEMS.items():
        (section,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page, re.DOTALL)
        file = ROOT / "docs" / "reproduced" / f"{name}.json"
        if not file.exists():
            assert section == "Not measured yet.\n"
            continue
        kept = json.loads(file.read_text(encoding="utf-8"))
        assert len(kept["results"]) == (3 if item.chance else 1)
        assert f"### {item.title}" in section
        for finding in item.findings():
            assert finding.line(kept["results"]) in section
        measured += 1
    assert measured >= 2


# Whose processes tests/distributed starts.
ON_PROCESSES = ("fractions", "stages")


# Those that need a package besides are tested where it is (tests/integrations).
HERE = [name for name, item in ITEMS.items() if name not in ON_PROCESSES and not item.needs]
# Those that start processes here.
STARTS = {"processes": [pytest.mark.slow, pytest.mark.distributed]}


@pytest.mark.parametrize("name", [pytest.param(n, marks=STARTS.get(n, [])) for n in HERE])
def test_items_in_seconds(name, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_runs, "subprocess", SimpleNamespace(run=launched))
    measure_in_seconds(name, tmp_path)


def launched(command, **_):
    """What torchrun would start, forked from what has imported torch."""
    *_, count, as_module, module, folder = command
    count = int(count.removeprefix("--nproc-per-node="))
    assert (as_module, module) == ("-m", rank_runs.__name__)
    done = forked.ranks(count, forked.module, module, folder)
    code = max(abs(one.code) for one in done)
    return subprocess.CompletedProcess(command, code, done[0].out, done[0].err)


def measure_in_seconds(name, tmp_path):
    """Measured once, kept, shown and drawn; a second call measures nothing."""
    told, seeds = [], 2 if name == "change-rates" else 1
    found = reproduce(ITEMS[name], tmp_path, seeds, told.append, smoke=True)
    assert len(found.results) == seeds
    assert len(found.findings()) == len(ITEMS[name].findings())
    assert all(line.startswith(("held (", "**not held** (")) for line in found.findings())
    assert found.table().rows
    if name == "processes":
        assert all(of["processes"] == 2 for of in found.results[0]["runs"]["2"].values())
    count = len(told)
    again = reproduce(ITEMS[name], tmp_path, seeds, told.append, smoke=True)
    assert again.results == found.results
    assert len([text for text in told[count:] if "seed" in text]) == 0
    page = tmp_path / "page.md"
    page.write_text(f"above\n<!-- {name} -->\n<!-- /{name} -->\nbelow\n")
    write_page(page, found, tmp_path)
    said = page.read_text()
    assert said.startswith("above\n")
    assert said.endswith("below\n")
    assert f"### {ITEMS[name].title}" in said


class Counting(Item):
    """Is interrupted once, in its second seed."""

    name, title, papers, printed = "counting", "Counting", "nobody", "nothing"
    interrupted = False

    def measure(self, seed, smoke, tell):
        if seed == 1 and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return {"seed": seed}

    def findings(self):
        return (Finding("it counts", lambda result: 1.0 + result["seed"], "to"),)

    def table(self, results):
        return Table("", (Column("seed"),), tuple((str(r["seed"]),) for r in results))

    def draw(self, axes, results):
        axes.plot([r["seed"] for r in results])


def test_an_item_goes_on_where_it_was_interrupted(tmp_path):
    told, item = [], Counting()
    with pytest.raises(KeyboardInterrupt):
        reproduce(item, tmp_path, 3, told.append)
    assert told == ["counting, seed 1 of 3", "counting, seed 2 of 3"]
    found = reproduce(item, tmp_path, 3, told.append)
    assert told[2:4] == ["counting, seed 2 of 3", "counting, seed 3 of 3"]
    assert found.table().rows == (("0",), ("1",), ("2",))
    assert found.findings() == ["held (3 of 3 seeds; to 1 to 3): it counts"]


def test_a_finding_says_on_how_many_seeds_it_held():
    finding = Finding("it grows", lambda result: result["x"], "by")
    held = finding.line([{"x": 1.0}, {"x": 3.0}])
    assert held == "held (2 of 2 seeds; by 1 to 3): it grows"
    not_held = finding.line([{"x": 1.0}, {"x": -0.5}, {"x": 2.0}])
    assert not_held == "**not held** (2 of 3 seeds; by -0.5 to 2): it grows"
    assert finding.line([{"x": 2.0}]) == "held (no chance in it; by 2): it grows"


def test_errors_are_one_sentence(tmp_path):
    file = tmp_path / "sizes.json"
    file.write_text("{}")
    with pytest.raises(SettingError) as error:
        reproduce(ITEMS["sizes"], tmp_path, 1, print)
    assert str(error.value) == (
        f"{file} is no file of results (KeyError): move it away to measure anew."
    )
    with pytest.raises(SettingError, match="seeds is 0 but must be at least 1: pass such a number"):
        reproduce(ITEMS["sizes"], tmp_path, 0, print)
    with pytest.raises(SettingError, match="has no lines <!-- a --> and <!-- /a -->: write them"):
        write_between(file, "a", "text")
