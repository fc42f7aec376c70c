"""Curves of the page show the numbers they were given."""

import math

import pytest

from natgrad.lab.report.canvas import INK
from natgrad.lab.report.page import curves
from natgrad.lab.report.page.colours import Owner, depth, owners
from natgrad.lab.report.page.curves import STEPS, Curve, Plot
from unit.lab.report.read_back import curve, parsed

pytest.importorskip("matplotlib")

ONE, TWO = Owner("one", "first & best", "#0072b2"), Owner("two", "second", INK, "dashed")
X = [2.0, 5.0, 9.0, 30.0]
FALLING = [8.0, 0.5, 0.02, 0.0013]


def drawn(plot, png=None):
    text = plot.picture("p1-loss", "Loss", 'the "loss" falls').drawn(png)
    return text, parsed(text)


@pytest.mark.parametrize(
    ("y", "scale"),
    [(FALLING, "log"), ([0.5, 0.7, 0.8, 0.9], "linear"), ([-1.0, 3.0, 500.0, 2.0], "linear")],
    ids=["log", "linear", "negative"],
)
def test_the_numbers_can_be_read_from_the_picture(y, scale):
    _, found = drawn(Plot("loss", STEPS, [Curve(ONE, "first", X, y)]))
    plot = found.one(kind="plot")
    assert plot.attributes["data-y"].split()[0] == scale
    read = curve(plot, plot.one(kind="curve"))
    span = math.log(max(y) / min(y)) if scale == "log" else max(y) - min(y)
    for (x, value), given_x, given in zip(read, X, y, strict=True):
        assert x == pytest.approx(given_x, abs=0.01)
        if scale == "log":
            assert math.log(value / given) == pytest.approx(0, abs=2e-4 * span)
        else:
            assert value == pytest.approx(given, abs=2e-4 * span)


def test_a_curve_has_its_owner_its_name_and_its_colour():
    text, found = drawn(Plot("loss", STEPS, [Curve(ONE, "a < b", X, FALLING, faint=True)]))
    (group,) = found.all(kind="curve")
    assert group.attributes["data-of"] == "one"
    assert group.one("title").text == "a < b"
    assert "#0072b2" in group.one("path").attributes["style"]
    assert found.one("svg").attributes["aria-label"] == 'the "loss" falls'
    assert found.one("svg").attributes["role"] == "img"
    assert "a &lt; b" in text


def test_black_is_the_colour_of_the_text_around():
    text, found = drawn(Plot("loss", STEPS, [Curve(TWO, "second", X, FALLING)]))
    style = found.one(kind="curve").one("path").attributes["style"]
    assert "stroke: currentColor" in style
    assert "stroke-dasharray" in style
    assert INK not in text
    assert "<style" not in text  # that of matplotlib would be for the whole page
    assert "http" not in text
    assert "DejaVu" not in text


def test_letters_stay_letters():
    _, found = drawn(Plot("loss of a batch", STEPS, [Curve(ONE, "first", X, FALLING)]))
    words = {text.text for text in found.all("text")}
    assert {"loss of a batch", "step", "0.01", "1", "10"} <= words


def test_a_legend_hides_with_its_owner():
    several = [Curve(ONE, "1", X, FALLING), Curve(TWO, "2", X, X), Curve(ONE, "3", X, X)]
    _, found = drawn(Plot("loss", STEPS, several))
    assert len(list(found.all(kind="curve"))) == 3
    words = [group.text for group in found.all("g", of="one")]
    assert "first & best" in words
    # Two curves, and the line and the name in the legend.
    assert len(words) == 4


def test_a_target_is_a_dashed_line():
    _, found = drawn(Plot("loss", STEPS, [Curve(ONE, "first", X, FALLING)], target=0.1))
    (line,) = (group for group in found.all("g") if _title(group) == "target: 0.1")
    assert "stroke-dasharray" in line.one("path").attributes["style"]
    plot = found.one(kind="plot")
    assert all(y == pytest.approx(0.1, rel=2e-3) for _, y in curve(plot, line))


def _title(group):
    return next((child.text for child in group.children if child.tag == "title"), None)


def test_what_is_clipped_is_clipped_by_something():
    _, found = drawn(Plot("accuracy", STEPS, [Curve(ONE, "first", X, X)], falling=False))
    known = {one.attributes["id"] for one in found.all() if "id" in one.attributes}
    used = {
        one.attributes["clip-path"][5:-1] for one in found.all() if "clip-path" in one.attributes
    }
    assert used
    assert used <= known
    assert all(name.startswith("p1-loss-") for name in known)


def test_what_is_not_finite_is_left_out():
    y = [8.0, math.nan, 0.02, math.inf]
    _, found = drawn(Plot("loss", STEPS, [Curve(ONE, "first", X, y)]))
    plot = found.one(kind="plot")
    assert [round(x) for x, _ in curve(plot, plot.one(kind="curve"))] == [2, 9]


def test_nothing_finite_at_all():
    _, found = drawn(Plot("loss", STEPS, [Curve(ONE, "first", [1.0], [math.nan])]))
    assert found.one(kind="plot")


def test_a_run_that_goes_astray_leaves_the_axis():
    values = [[2.0, 1.0, 0.1], [2.5, 1e9, 1e12]]
    _, found = drawn(Plot("loss", STEPS, [Curve(ONE, "", [1.0, 2.0, 3.0], y) for y in values]))
    bottom, top = map(float, found.one(kind="plot").attributes["data-y"].split()[1:3])
    assert 0.05 < bottom < 0.1
    assert 7.5 <= top < 10


def test_limits():
    assert curves.limits([[2.0, 1.0, 0.1], [2.5, 1e9]], None) == (0.1, 1e9)
    assert curves.limits([[2.0, 1.0]], 0.3) == (0.3, 2.0)
    assert curves.limits([[1.0, 1.0]], None) == (0.5, 1.5)
    assert curves.limits([], None) == (0.0, 1.0)


def test_the_first_steps_of_what_rises_may_be_below_the_axis():
    y = [0.1] + [0.8 + 0.01 * i for i in range(19)]
    _, found = drawn(Plot("accuracy", STEPS, [Curve(ONE, "a", list(range(20)), y)], falling=False))
    bottom = float(found.one(kind="plot").attributes["data-y"].split()[1])
    assert 0.7 < bottom < 0.81


@pytest.mark.parametrize("count", [100, 600, 601, 12345])
def test_thinning_keeps_the_ends_and_the_extremes(count):
    x = [float(i) for i in range(count)]
    y = [math.sin(i * 1.7) for i in range(count)]
    y[count // 3], y[count // 2] = 7.0, -7.0
    few, values = curves.thinned(x, y)
    assert len(few) <= 610
    assert (few[0], few[-1]) == (x[0], x[-1])
    assert {7.0, -7.0} <= set(values)
    assert few == sorted(set(few))
    assert all(y[int(at)] == value for at, value in zip(few, values, strict=True))


@pytest.mark.parametrize(
    ("longest", "label", "unit"),
    [(179.0, "s", 1.0), (181.0, "min", 60.0), (10_801.0, "h", 3600.0)],
)
def test_seconds_have_a_unit_that_suits_them(longest, label, unit):
    across = curves.seconds(longest)
    assert (across.name, across.label, across.short) == (
        "seconds",
        f"training time ({label})",
        label,
    )
    _, found = drawn(Plot("loss", across, [Curve(ONE, "first", [unit, 3 * unit], [2.0, 3.0])]))
    plot = found.one(kind="plot")
    assert [round(x, 2) for x, _ in curve(plot, plot.one(kind="curve"))] == [1.0, 3.0]


def test_the_same_picture_is_the_same_text_with_a_png_or_without(tmp_path):
    plot = Plot("loss", STEPS, [Curve(ONE, "1", X, FALLING), Curve(TWO, "2", X, X)])
    text, _ = drawn(plot)
    assert drawn(plot)[0] == text
    assert drawn(plot, tmp_path)[0] == text
    pixels = pytest.importorskip("PIL.Image").open(tmp_path / "p1-loss.png").convert("RGBA")
    assert pixels.getpixel((0, 0)) == (255, 255, 255, 255)
    assert pixels.width > 600


def test_many_owners_look_different():
    many = owners([(str(i), str(i)) for i in range(30)])
    assert len({(one.colour, one.dash) for one in many}) == 30
    assert len({one.colour for one in many[:9]}) == 9
    assert [one.ink for one in many if one.colour == INK] == ["currentColor"] * 3


def test_layers_go_from_blue_to_orange():
    assert (depth(0.0), depth(0.5), depth(1.0)) == ("#0072b2", "#009e73", "#e69f00")
    assert depth(0.25) == "#008892"  # half of both, rounded


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 20])
def test_legends_fit_the_picture(count):
    names = ["a name of some length"[: 3 + 5 * i % 18] for i in range(count)]
    across = curves.columns(names)
    assert 1 <= across <= count
    assert curves.rows(names) == -(-count // across)
    several = [Curve(Owner(str(i), n, "#0072b2"), n, X, X) for i, n in enumerate(names)]
    picture = Plot("loss", STEPS, several).picture("p", "", "")
    from natgrad.lab.report.canvas import figure
    from natgrad.lab.report.page.figure import Sheet

    with figure(picture.width, picture.height, None) as made:
        picture.draw(Sheet(made))
        made.draw_without_rendering()
        for legend in made.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= made.bbox.x1
