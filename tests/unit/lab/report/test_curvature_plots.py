"""Pictures show the numbers they were given."""

import numpy as np
import pytest
import torch

from natgrad.errors import SettingError
from natgrad.lab.report import curvature_plots as pictures
from natgrad.lab.report.quality import Cell, Distance, Quality
from natgrad.linalg.density import Quadrature
from natgrad.operators import Spectrum

pytest.importorskip("matplotlib")


def spectrum(values):
    nodes = torch.tensor([values], dtype=torch.float64)
    rule = nodes, torch.full_like(nodes, 1 / len(values))
    return Spectrum("matrix", Quadrature(*rule, rule, len(values), True, 0, "exact"))


def named(name, values, k=2):
    top = torch.tensor(sorted(values, reverse=True)[:k])
    return pictures.NamedSpectrum(name, spectrum(values), top)


def test_a_lone_eigenvalue_is_a_peak_of_height_one():
    made = pictures.spectra([named("H", [0.0, 0.0, 0.0, 5.0, 10.0])])
    (axes,) = made.axes
    grid, count = axes.lines[0].get_xdata(), axes.lines[0].get_ydata()
    for value, height in ((0.0, 3.0), (5.0, 1.0), (10.0, 1.0)):
        at = np.abs(grid - value).argmin()
        assert count[at] == pytest.approx(height, rel=0.03)
    assert count.min() == pytest.approx(0.1)
    assert axes.get_yscale() == "log"


def test_lines_stand_at_the_largest():
    made = pictures.spectra([named("H", [0.0, 1.0, 5.0, 10.0])])
    (lines,) = (c for c in made.axes[0].collections if hasattr(c, "get_segments"))
    assert sorted(float(segment[0][0]) for segment in lines.get_segments()) == [5.0, 10.0]
    assert "the 2 largest" in made.axes[0].texts[0].get_text()
    assert "10" in made.axes[0].texts[0].get_text()


def test_spectra_share_their_axes():
    made = pictures.spectra([named("H", [-2.0, 0.0, 1.0]), named("G", [0.0, 0.5, 3.0])])
    first, second = made.axes
    assert [axes.get_title() for axes in made.axes] == ["H", "G"]
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[0] < -2
    assert first.get_xlim()[1] > 3
    assert first.get_ylim() == second.get_ylim()


def test_a_matrix_of_zeros_can_be_drawn(tmp_path):
    pictures.spectra([named("H", [0.0, 0.0])], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_layers_are_curves_by_rank():
    layers = {"first": torch.tensor([3.0, 2.0, -1.0]), "second": torch.tensor([0.5, 0.25])}
    made = pictures.layer_spectra([pictures.LayerSpectra("G", layers)])
    one, two = made.axes[0].lines
    assert list(one.get_xdata()) == [1, 2]  # what is not above zero has no logarithm
    assert list(one.get_ydata()) == [3.0, 2.0]
    assert list(two.get_ydata()) == [0.5, 0.25]
    assert one.get_color() != two.get_color()
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["first", "second"]


def test_many_layers_have_a_short_legend(tmp_path):
    layers = {f"layer{i}": torch.tensor([1.0 + i]) for i in range(40)}
    path = tmp_path / "a.svg"
    made = pictures.layer_spectra([pictures.LayerSpectra("G", layers)], path)
    shown = [text.get_text() for text in made.legends[0].get_texts()]
    assert len(shown) <= 12
    assert (shown[0], shown[-1]) == ("layer0", "layer39")
    assert len({line.get_color() for line in made.axes[0].lines}) == 40


def test_norms_are_a_heat_map_with_numbers_and_names():
    norms = torch.tensor([[2.0, 0.01], [0.01, 1e-9]])
    made = pictures.block_norms([pictures.BlockNorms("H", ["conv", "linear"], norms)])
    axes = made.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["conv", "linear"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["conv", "linear"]
    assert [text.get_text() for text in axes.texts] == ["2", "0.01", "0.01", "1e-9"]
    assert [text.get_color() for text in axes.texts] == ["black", "black", "black", "white"]
    image = axes.images[0]
    assert image.norm.vmax == 2.0
    assert image.norm.vmin == pytest.approx(2e-6)  # six powers of ten below
    assert image.get_array().min() == pytest.approx(2e-6)


def test_heat_maps_share_one_scale():
    names = ["a", "b"]
    large, small = (torch.full((2, 2), value) for value in (9.0, 0.1))
    given = [pictures.BlockNorms("H", names, large), pictures.BlockNorms("G", names, small)]
    made = pictures.block_norms(given)
    for axes in made.axes[:2]:
        assert axes.images[0].norm.vmin == pytest.approx(0.1)
        assert axes.images[0].norm.vmax == 9.0


def test_many_layers_have_no_numbers(tmp_path):
    names = [f"a.rather.long.name.of.layer.{i}" for i in range(50)]
    given = pictures.BlockNorms("H", names, torch.rand(50, 50))
    made = pictures.block_norms([given], tmp_path / "a.png")
    assert not made.axes[0].texts
    assert len(made.axes[0].get_xticks()) <= 40


def test_norms_without_a_row_for_each_layer():
    given = pictures.BlockNorms("H", ["a"], torch.ones(2, 2))
    with pytest.raises(
        SettingError,
        match=r"^The norms of H have the shape \[2, 2\] but there are 1 layers: give a row and a "
        r"column for each of them\.$",
    ):
        pictures.block_norms([given])


def state(label, shift=0.0):
    cells = [
        Cell(matrix, structure, Distance(shift + i, 1 - i / 10), Distance(2 * i, -i / 10))
        for i, (matrix, structure) in enumerate(
            (matrix, structure) for matrix in ("H", "C") for structure in ("full", "diagonal")
        )
    ]
    return Quality(label, 0.1, tuple(cells))


def bars(axes):
    return sorted((patch.get_x(), patch.get_height()) for patch in axes.patches)


@pytest.mark.parametrize(
    ("draw", "errors", "cosines"),
    [
        (pictures.approximation, [0, 1, 2, 3], [1, 0.9, 0.8, 0.7]),
        (pictures.approximation_of_fisher, [0, 2, 4, 6], [0, -0.1, -0.2, -0.3]),
    ],
)
def test_approximations_are_bars_by_matrix_and_structure(draw, errors, cosines, tmp_path):
    made = draw([state("before"), state("after", 0.5)], tmp_path / "a.png")
    before, after, below, _ = made.axes
    assert [axes.get_title() for axes in (before, after)] == ["before", "after"]
    assert [height for _, height in bars(before)] == pytest.approx(errors)
    assert [height for _, height in bars(below)] == pytest.approx(cosines)
    assert [text.get_text() for text in below.get_xticklabels()] == ["H", "C"]
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["full", "diagonal"]
    assert below.get_ylim()[0] <= min(cosines)
    assert "damping 0.1" in made.get_suptitle()


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (pictures.spectra, "spectra"),
        (pictures.layer_spectra, "layer spectra"),
        (pictures.block_norms, "block norms"),
        (pictures.approximation, "qualities"),
    ],
)
def test_nothing_to_draw(draw, what):
    with pytest.raises(SettingError, match=f"^There are no {what} to draw: give at least one\\.$"):
        draw([])


def distance_between(one, other):
    """Of two colours, in the eyes of someone who lacks green receptors (Machado et al., 2009)."""
    seen = np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.04294, 0.968881],
        ]
    )
    return float(np.abs(seen @ (np.array(one) - np.array(other))).max())


def test_colours_are_told_apart_without_red_and_green():
    from matplotlib.colors import to_rgb

    seen = [to_rgb(colour) for colour in pictures.COLOURS]
    pairs = [(a, b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(distance_between(a, b) for a, b in pairs) > 0.1
