"""The benchmark of the walk counts calls and changes of file as it says, and of natgrad alone."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import walk, walk_picture
from benchmarks.walk import Walk


def module(path: Path, text: str, **names: Callable[..., object]) -> ModuleType:
    """A module of its own file, whose functions know `names`."""
    made = ModuleType(path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.__dict__.update(names)
    exec(compile(text, str(path), "exec"), made.__dict__)
    return made


@pytest.fixture
def hand_made(tmp_path):
    """`start` of a.py calls `below` of rooms/b.py twice, itself, and something of elsewhere."""
    package = tmp_path / "package"
    outside = module(tmp_path / "outside.py", "def far(): return len('abc')")
    b = module(package / "rooms" / "b.py", "def below(): return 1")
    text = (
        "def start():\n    below(); below(); own(); far(); own(); below()\n    return 'done'\n"
        "def own(): return abs(-1)\n"
        "def counting():\n    for i in range(2):\n        yield below()\n"
        "def resumed(): return sum(counting())\n"
    )
    return package, module(package / "a.py", text, below=b.below, far=outside.far)


def test_calls_and_changes_of_a_hand_made_sequence(hand_made):
    package, a = hand_made
    result, seen = walk.traced(a.start, package)
    assert result == "done"
    below = "rooms/b.py"
    # What is outside of the package neither counts nor separates the two calls around it.
    assert seen.files == ("a.py", below, below, "a.py", "a.py", below)
    assert seen.counts == {"calls": 6, "files": 2, "changes": 3}


def test_every_resumption_of_a_generator_is_a_call(hand_made):
    package, a = hand_made
    _, seen = walk.traced(a.resumed, package)
    below = "rooms/b.py"
    assert seen.files == ("a.py", "a.py", below, "a.py", below, "a.py")
    assert seen.changes == 4


def test_the_profile_that_was_there_is_put_back_even_after_an_error():
    def fails() -> None:
        raise KeyError

    before = sys.getprofile()
    with pytest.raises(KeyError):
        walk.traced(fails)
    assert sys.getprofile() is before


def test_no_walk_has_no_changes():
    assert Walk().counts == {"calls": 0, "files": 0, "changes": 0}
    assert Walk(("a.py",)).changes == 0


def test_parts_of_a_step_begin_with_their_files_in_order():
    files = ("top.py", "x/refresh.py", "x/update.py", "y.py", "x/refresh.py", "x/apply.py", "y.py")
    pieces = walk.parts(Walk(files))
    assert [name for name, _ in pieces] == ["step", "update", "refresh", "apply"]
    assert [len(piece.files) for _, piece in pieces] == [2, 2, 1, 2]
    assert sum((piece for _, piece in pieces), Walk()) == Walk(files)


def test_repeats_and_rounds_are_told_once():
    assert walk.merged(["a.py", "a.py", "b.py"]) == ["a", "b"]
    assert walk.merged(["a.py", "b.py"] * 3 + ["a.py", "c.py"]) == ["(a -> b) x3", "a", "c"]


def test_rooms_are_folders_or_files_of_the_package():
    files = ("preconditioner.py", "linalg/forms.py", "kfac/ranks/team.py")
    assert [walk_picture.room(file) for file in files] == ["preconditioner", "linalg", "kfac/ranks"]


def test_walk_of_a_tiny_model(tmp_path):
    threads = torch.get_num_threads()
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    walks, facts = walk.measure(model, nn.Conv2d(3, 2, 3))
    assert torch.get_num_threads() == threads
    assert facts["resnet blocks"] == 1
    # Hooks are gone between updates, so the passes of other steps call nothing.
    assert not walks[walk.IDLE].files
    assert walks[walk.FORWARD].files
    assert walks[walk.BACKWARD].files
    assert len(walks[walk.BOTH].files) > len(walks[walk.APPLY].files) > 0
    for seen in walks.values():
        assert all((walk.PACKAGE / file).is_file() for file in seen.files)
    assert [name for name, _ in walk.parts(walks[walk.BOTH])] == ["step", *walk.PARTS]
    text = walk.table(facts, facts, markdown=True)
    assert f"{len(walks[walk.BOTH].files):,}" in text
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for picture in pictures:
        walk_picture.draw(walk.steps(walks), {"now": facts["stages"]}, picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert ">linalg</text>" in pictures[0].read_text()


def test_the_same_training_walks_the_same_way():
    first, second = (walk.stages(nn.Conv2d(3, 4, 3, padding=1)) for _ in range(2))
    # The first of a process may fill caches while it constructs.
    assert {k: v for k, v in first.items() if k != walk.CONSTRUCT} == {
        k: v for k, v in second.items() if k != walk.CONSTRUCT
    }


def test_a_step_stays_short(tmp_path):
    """Calls of natgrad's functions are what a small network waits for: a step that only applies has
    at most a dozen for each block, and one that updates and refreshes does not wander about."""
    file = tmp_path / "counts.json"  # of a new process: what others have cached changes them
    command = [sys.executable, "-m", "benchmarks.walk", "--json", str(file)]
    root = Path(__file__).resolve().parents[1]
    picture = ["--picture", str(tmp_path / "walk.svg")]
    subprocess.run([*command, *picture], check=True, cwd=root, capture_output=True)
    facts = json.loads(file.read_text(encoding="utf-8"))
    assert facts["stages"][walk.BOTH]["changes"] <= 258
    assert facts["resnet blocks"] == 39
    assert facts["stages"][walk.RESNET]["calls"] <= 12 * 39
