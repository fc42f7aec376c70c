"""The page as a whole: complete, in order, the same again, and with the numbers of its folders."""

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest

from natgrad.errors import CheckpointError, SettingError
from natgrad.lab.compare import sentences, table
from natgrad.lab.compare.results import Status
from natgrad.lab.report import page
from natgrad.lab.report.page import comparison_section
from natgrad.lab.train.kfac_record import NAME as KFAC
from unit.lab.report import sample_folders as made
from unit.lab.report.read_back import parsed, rows

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A page of a comparison: what was compared, HTML, and its elements."""
    folder, found = made.comparison(tmp_path_factory.mktemp("page") / "fast & <slow>")
    path = page.write([folder])
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    return found, text, parsed(text)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = made.run(tmp_path_factory.mktemp("page") / "mine")
    text = page.write(folder).read_text(encoding="utf-8")
    return folder, text, parsed(text)


def of_table(found, title):
    (one,) = (t for t in found.all("table") if t.one("caption").text == title)
    return one


def figures(found):
    return [one.attributes["id"] for one in found.all("figure")]


def check_whole(text, found):
    """What holds for every page."""
    assert text.startswith("<!doctype html>\n")
    assert found.one("html").attributes["lang"] == "en"
    assert found.one("head").one("title").text == found.one("h1").text
    ids = [one.attributes["id"] for one in found.all() if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    links = [one.attributes["href"] for one in found.one("nav").all("a")]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    levels = [int(one.tag[1]) for one in found.all() if re.fullmatch("h[1-6]", one.tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    for svg in found.all("svg"):
        assert svg.attributes["role"] == "img"
        assert len(svg.attributes["aria-label"]) > 20
    for figure in found.all("figure"):
        assert figure.one("figcaption").one("b").text
    # Nothing is asked of a network, and nothing is missing in the file.
    assert "http" not in text
    assert not re.search(r"\b(src|url\((?!#))", text.replace("url(#", ""))
    assert "@import" not in text


def test_a_comparison_is_whole(compared):
    _, text, found = compared
    assert found.one("h1").text == "digits-cnn: optimizers compared"
    check_whole(text, found)


def test_a_run_is_whole(ran):
    _, text, found = ran
    assert found.one("h1").text == "mine: convnet on digits, K-FAC with SGD"
    check_whole(text, found)


def test_the_table_is_that_of_the_terminal(compared):
    results, _, found = compared
    shown = table(results)
    drawn = of_table(found, shown.title)
    assert [one.text for one in drawn.one("thead").all("th")] == [c.name for c in shown.columns]
    assert rows(drawn) == list(shown.rows)
    said = [one.text for one in found.one("ul", kind="said").all("li")]
    assert said == sentences(results)
    assert made.MISSING in said


def test_sections_of_a_comparison(compared):
    _, _, found = compared
    heads = [one.text for one in found.all("h2")]
    wanted = ["Result", "Curves", "To the target", "Tuning", "Failures", "K-FAC", "Settings"]
    assert heads == wanted
    assert [one.text for one in found.all("h3")] == ["K-FAC, SGD, seed 2"]
    assert figures(found) == [
        *(
            f"comparison-{key}-{against}"
            for key in ("fit_loss", "test_loss", "test_accuracy")
            for against in ("steps", "seconds")
        ),
        "comparison-to-steps",
        "comparison-to-seconds",
        "comparison-tuning",
        "comparison-step",
        "comparison-2-drift-A",
        "comparison-2-drift-G",
        "comparison-2-spectra-A",
        "comparison-2-spectra-G",
        "comparison-2-time",
        "comparison-2-placement",
    ]


def test_the_same_folder_gives_the_same_bytes_and_pngs_are_the_same_pictures(ran, tmp_path):
    folder, text, found = ran
    again = page.write([folder], tmp_path / "again.html", png=tmp_path / "png")
    assert again.read_text(encoding="utf-8") == text
    names = sorted(path.name for path in (tmp_path / "png").iterdir())
    assert names == sorted(f"{name}.png" for name in figures(found))
    images = pytest.importorskip("PIL.Image")
    for path in (tmp_path / "png").iterdir():
        with images.open(path) as picture:
            assert picture.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)
            assert len(picture.convert("L").getcolors()) > 10


def test_cards_say_who_is_first(compared):
    _, _, found = compared
    cards = {
        one.one("dt").text: one.one("dd").text for one in found.one("dl", kind="cards").children
    }
    assert cards["fewest steps to the target"] == "K-FAC, SGD24 steps"
    assert cards["least time to the target"] == "K-FAC, SGD0.480 s"
    assert cards["lowest training loss at the end"].startswith("K-FAC, SGD0.0179; SGD 0.195")


def test_the_first_is_who_took_least(compared):
    """Not who comes first in the file: all meet an easy target, SGD later than K-FAC."""
    found, _, _ = compared
    easy = replace(
        found,
        target=0.6,
        entries=tuple(
            replace(one, runs=tuple(run.judged(found.measure, 0.6) for run in one.runs))
            for one in found.entries
        ),
    )
    steps, seconds, _ = comparison_section._cards(easy)
    assert steps == ("fewest steps to the target", "K-FAC, SGD", "12 steps; SGD 24 steps")
    assert seconds == ("least time to the target", "SGD", "0.240 s")


def test_boxes_hide_what_is_an_optimizer_s(compared):
    _, text, found = compared
    boxes = [one.attributes["data-hides"] for one in found.all("input")]
    assert boxes == ["comparison-sgd", "comparison-adamw", "comparison-kfac"]
    for key in boxes:
        assert f'body:has([data-hides="{key}"]:not(:checked)) [data-of="{key}"]' in text
        assert len(list(found.all(of=key))) > 30


def test_failures_and_trials_are_listed(compared):
    _, _, found = compared
    lost = rows(of_table(found, "Failures"))
    assert ("AdamW <3", "seed 4", "failed after 12 steps: No.") in lost
    trials = rows(of_table(found, "Trials"))
    assert ("SGD", "0.1", "0.104", "chosen") in trials
    assert ("SGD", "1", "–", "diverged") in trials
    assert ("SGD", "0.01", "0.474", "") in trials


def test_settings_of_a_comparison(compared):
    _, _, found = compared
    task = {row[0]: row[1:3] for row in rows(of_table(found, "Settings of the task"))}
    assert task["steps"] == ("40", "0")
    assert task["kfac"] == ("no", "yes")
    rest = {row[0] for row in rows(of_table(found, "Settings at their defaults"))}
    assert "network" in rest
    assert not rest & task.keys()
    own = dict(row[:2] for row in rows(of_table(found, "Contenders")))
    assert own["K-FAC, SGD"] == "kfac yes"
    facts = [one.text for one in found.one("dl", kind="listed").children]
    assert facts == ["command", "natgrad compare", "torch", "2"]


def test_a_run_s_tables_and_numbers(ran):
    _, _, found = ran
    assert [one.text for one in found.all("h2")] == ["Result", "Curves", "K-FAC", "Settings"]
    cards = {one.one("dt").text: one.one("dd") for one in found.one("dl", kind="cards").children}
    assert cards["test loss"].one("b").text == f"{1.2 * made.loss(40):#.3g}"
    assert cards["training accuracy"].one("b").text == f"{1 - made.loss(40) / 5:.1%}"
    assert cards["time of a step"].one("b").text == "10.0 ms"
    assert cards["K-FAC's share of it"].one("b").text == "25%"
    assert cards["coverage"].one("b").text == "90.0%"
    assert rows(of_table(found, "Coverage"))[1] == ("<b>", "left to the optimizer: odd")
    assert rows(of_table(found, "Memory")) == [("layer0.conv", "1.50 KiB")]
    folded = [one.one("summary").text for one in found.all("details")]
    assert folded == ["Placement as a table", "Timings", "Drift", folded[-1]]
    assert folded[-1].endswith("settings at their defaults")
    assert {
        "run-loss-steps",
        "run-loss-seconds",
        "run-accuracy-steps",
        "run-lr",
        "run-stages",
    } <= set(figures(found))


def test_a_run_without_k_fac(tmp_path):
    folder = made.run(tmp_path, losses(1.0), kfac=False)
    found = parsed(page.write(folder).read_text(encoding="utf-8"))
    assert [one.text for one in found.all("h2")] == ["Result", "Curves", "Settings"]
    assert "run-stages" not in figures(found)


def test_a_run_that_is_spoilt_has_a_page_that_says_so(tmp_path):
    folder = made.run(tmp_path, [{"kind": "train", "step": 1, "loss": float("nan")}])
    (folder / KFAC).write_text("{", encoding="utf-8")
    found = parsed(page.write(folder).read_text(encoding="utf-8"))
    (warning,) = found.all("p", kind="warning")
    assert "kfac.json cannot be read" in warning.text
    card = found.one("dl", kind="cards")
    assert card.one("b").text == "not finite"


def test_a_test_that_is_not_finite_is_said_to_be(tmp_path):
    lines = [{"kind": "test", "step": 1, "loss": float("inf")}]
    found = parsed(page.write(made.run(tmp_path, lines, kfac=False)).read_text(encoding="utf-8"))
    assert found.one("dl", kind="cards").one("b").text == "not finite"


def test_a_run_that_has_not_begun(tmp_path):
    found = parsed(page.write(made.run(tmp_path, [], kfac=False)).read_text(encoding="utf-8"))
    words = [one.text for one in found.all("p")]
    assert "There is nothing to draw yet." in words
    assert not figures(found)


def test_a_comparison_under_way(tmp_path):
    first, *others = made.entries()
    begun = replace(first, runs=(replace(first.runs[0], status=Status.RUNNING, final=None),))
    folder, _ = made.comparison(
        tmp_path, [begun, *(replace(one, runs=(), trials=()) for one in others)], target=None
    )
    found = parsed(page.write(folder).read_text(encoding="utf-8"))
    (warning,) = found.all("p", kind="warning")
    assert warning.text == "The comparison is under way: not all runs have ended."
    assert not [name for name in figures(found) if "-to-" in name]


def test_who_is_under_way(compared):
    found, _, drawn = compared
    assert not list(drawn.all("p", kind="warning"))
    done = found.entries[0]
    running = replace(done.runs[0], status=Status.RUNNING)
    for one, under_way in (
        (done, False),
        (replace(done, trials=done.trials[:2]), True),
        (replace(done, runs=done.runs[:2]), True),
        (replace(done, runs=(), chosen=None), False),
        (replace(done, runs=(*done.runs[:2], running)), True),
        (replace(done, trials=(*done.trials[:2], running)), True),
    ):
        assert comparison_section._under_way(found, one) == under_way


def test_a_run_of_a_comparison_that_is_gone(tmp_path):
    folder, _ = made.comparison(tmp_path, [made.slim(made.entries()[2])], target=None)
    shutil.rmtree(folder / "runs")
    found = parsed(page.write(folder).read_text(encoding="utf-8"))
    assert "K-FAC" not in [one.text for one in found.all("h2")]


def losses(speed):
    """Lines of a log on the loss of test data alone, without seconds."""
    return [{"kind": "test", "step": i, "loss": made.loss(i, speed)} for i in (1, 2, 3)]


def test_several_runs_are_drawn_together(tmp_path):
    one, two = (
        made.run(tmp_path / name / "run", losses(speed), kfac=False, seed=seed)
        for name, speed, seed in (("a", 1.0, 0), ("b", 2.0, 5))
    )
    path = page.write([one, two], tmp_path / "both.html", title="Fast & slow")
    text = path.read_text(encoding="utf-8")
    found = parsed(text)
    assert found.one("h1").text == "Fast & slow"
    assert [h.text for h in found.all("h2")] == ["Runs together", "a/run", "b/run"]
    assert [h.text for h in found.all("h3")] == ["Result", "Curves", "Settings"] * 2
    assert figures(found) == ["together-test-loss-steps", "run1-loss-steps", "run2-loss-steps"]
    plot = next(f for f in found.all("figure", id="together-test-loss-steps"))
    assert [g.one("title").text for g in plot.all(kind="curve")] == [
        "a/run, test loss",
        "b/run, test loss",
    ]
    differ = of_table(found, "Where their settings differ")
    assert rows(differ) == [("seed", "0", "5")]
    assert "2 runs" not in text
    check_whole(text, found)


def test_several_comparisons_are_compared(tmp_path):
    few = [made.slim(made.entries()[0])]
    one, _ = made.comparison(tmp_path / "one", few, target=None)
    two, _ = made.comparison(tmp_path / "two", few, name="other", target=None)
    text = page.write([one, two], tmp_path / "both.html").read_text(encoding="utf-8")
    drawn = parsed(text)
    assert drawn.one("h1").text == "2 comparisons"
    steps = of_table(drawn, "Steps to the target")
    assert rows(steps) == [("SGD", "never", "never")]
    keys = [box.attributes["data-hides"] for box in drawn.all("input")]
    assert keys == ["comparison1-sgd", "comparison2-sgd"]
    check_whole(text, drawn)


def test_the_same_folder_twice(tmp_path):
    folder = made.run(tmp_path / "run", [], kfac=False)
    text = page.write([folder, folder], tmp_path / "twice.html").read_text(encoding="utf-8")
    assert [h.text for h in parsed(text).all("h2")][1:] == ["run (1)", "run (2)"]


def test_no_folder_at_all():
    with pytest.raises(SettingError, match=r"^A page needs something to show: name the folder of"):
        page.write([])


def test_a_page_that_cannot_be_written(tmp_path):
    folder = made.run(tmp_path / "run", [], kfac=False)
    away = tmp_path / "nowhere" / "page.html"
    with pytest.raises(SettingError) as error:
        page.write(folder, away)
    assert str(error.value) == (
        f"The page cannot be written to {away}, as there is no folder {away.parent}: make it, or "
        "name a file elsewhere."
    )
    with pytest.raises(CheckpointError, match=r"cannot be written to \(Is a directory\)"):
        page.write(folder, tmp_path)


def test_pictures_that_cannot_be_written(tmp_path):
    folder = made.run(tmp_path / "run", [], kfac=False)
    (tmp_path / "file").touch()
    with pytest.raises(SettingError) as error:
        page.write(folder, png=tmp_path / "file")
    assert str(error.value) == (
        f"The pictures cannot be written to {tmp_path / 'file'} (File exists): name another folder."
    )


def test_names_from_files_are_no_markup(tmp_path):
    folder = made.run(tmp_path / "<script>", [], found=json.loads(_hostile()))
    text = page.write(folder).read_text(encoding="utf-8")
    assert text.count("<script>") == 1  # its own
    assert "&lt;script&gt;" in text
    assert "<img" not in text
    other = made.run(tmp_path / "<b>", [], kfac=False)
    both = page.write([folder, other], tmp_path / "both.html", title="<i>").read_text("utf-8")
    assert [one.text for one in parsed(both).all("h2")][1:] == ["<script>", "<b>"]
    assert "<i>" not in both


def _hostile():
    return json.dumps(made.record()).replace("layer0.conv", "<img src=x onerror=alert(1)>")
