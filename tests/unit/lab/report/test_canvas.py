"""How pictures become files."""

import sys

import pytest

from natgrad.errors import SettingError
from natgrad.lab.report import canvas


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")]
)
def test_the_ending_says_what_a_picture_becomes(tmp_path, name, start):
    pytest.importorskip("matplotlib")
    with canvas.figure(2, 1, tmp_path / name) as made:
        made.subplots().set_title("letters")
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_same_picture_is_the_same_file(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        with canvas.figure(2, 1, tmp_path / name) as made:
            made.subplots().plot([1, 2])
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert "<date>" not in text


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with canvas.figure(2, 1, None) as made:
        made.subplots()
    assert not list(tmp_path.iterdir())


def test_an_unknown_ending():
    with pytest.raises(SettingError) as error:
        canvas.check("picture.bmp")
    assert str(error.value) == (
        "A picture cannot be written to 'picture.bmp', whose ending says nothing: name a file that "
        "ends in .png, .svg or .pdf."
    )


def test_a_folder_that_is_not_there(tmp_path):
    path = tmp_path / "nowhere" / "a.png"
    with pytest.raises(SettingError) as error:
        canvas.check(path)
    assert str(error.value) == (
        f"A picture cannot be written to {str(path)!r}, as there is no folder "
        f"{str(path.parent)!r}: make it, or name a file elsewhere."
    )


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with (
        pytest.raises(
            SettingError,
            match=r"^Pictures need matplotlib, which is not installed: "
            r"pip install 'natgrad\[report\]'\.$",
        ),
        canvas.figure(1, 1, None),
    ):
        pass


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (1, 1)), (4, (1, 4)), (5, (2, 3)), (6, (2, 3)), (9, (3, 3))]
)
def test_panels_stand_in_rows(count, shape):
    pytest.importorskip("matplotlib")
    assert canvas.shape(count) == shape
    with canvas.figure(2, 2, None) as made:
        row = canvas.panels(made, count)
    assert len(row) == count
    assert all(axes.axison for axes in row)
    assert sum(not axes.axison for axes in made.axes) == shape[0] * shape[1] - count


def test_long_names_keep_their_end():
    assert canvas.short("conv1") == "conv1"
    assert canvas.short("encoder.layers.11.attention.output") == "…ers.11.attention.output"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.02, "0.02"),
        (-0.5, "-0.5"),
        (20000.0, "20,000"),
        (999999.0, "999,999"),
        (1e6, "10⁶"),
        (1e-4, "0.0001"),
        (2e-5, "2·10⁻⁵"),
        (1e-12, "10⁻¹²"),
        (-3.5e9, "-3.5·10⁹"),
        (1 / 3, "0.333333"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
    ],
)
def test_numbers_are_written_as_one_writes_them(value, text):
    assert canvas.number(value) == text


def test_numbers_of_few_digits():
    assert canvas.number(0.012345, 3) == "0.0123"
    assert canvas.number(123456, 2) == "120,000"
    assert canvas.number(9.999e-5, 2) == "0.0001"  # rounded first


@pytest.mark.parametrize(
    ("low", "high", "some"),
    [
        (1e-6, 1.0, {"10⁻⁶", "0.0001", "0.01", "1"}),
        (0.02, 1.0, {"0.02", "0.05", "0.1", "0.2", "0.5", "1"}),
        (1.0, 4.0, {"1", "1.5", "2", "3"}),
    ],
    ids=["many", "few", "less than one"],
)
def test_a_logarithmic_axis_has_numbers_to_read_it_by(low, high, some):
    pytest.importorskip("matplotlib")
    with canvas.figure(4, 3, None) as made:
        axes = made.subplots()
        axes.set_ylim(low, high)
        canvas.logarithmic(axes.yaxis)
        made.draw_without_rendering()
        shown = {
            text.get_text()
            for text, at in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
            if low * 0.999 <= at <= high * 1.001
        }
    assert axes.get_yscale() == "log"
    assert some <= shown
    assert len(shown) <= 8
