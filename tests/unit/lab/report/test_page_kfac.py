"""Pictures of K-FAC in a run: time, drift, spectra and placement."""

import json

import pytest

from natgrad.lab.report.canvas import figure
from natgrad.lab.report.page import (
    factor_plots,
    kfac_section,
    placement_map,
    run_folder,
    stage_times,
)
from natgrad.lab.report.page.figure import Sheet
from natgrad.lab.report.page.html import Gallery, Names
from natgrad.lab.train.kfac_record import NAME as KFAC
from unit.lab.report import sample_folders as made
from unit.lab.report.read_back import curve, parsed

pytest.importorskip("matplotlib")


def shown(picture):
    """The figure, and what is marked in it."""
    with figure(picture.width, picture.height, None) as drawn:
        sheet = Sheet(drawn)
        picture.draw(sheet)
    return drawn, sheet


def test_the_rest_is_what_stages_leave(tmp_path):
    run = run_folder.read(made.run(tmp_path, made.log(pace=0.01)))
    found = stage_times.stretches(run)
    assert [(one.first, one.last) for one in found] == [(4 * i, 4 * i + 4) for i in range(10)]
    for one in found:
        parts = one.of_a_step()
        assert parts[stage_times.REST] == pytest.approx(0.0075)  # five stages take a twentieth each
        assert {name: parts[name] for name in made.STAGES} == pytest.approx(
            dict.fromkeys(made.STAGES, 0.0005)
        )
        assert sum(parts.values()) == pytest.approx(0.01)
    total = stage_times.whole(found)
    assert total.steps == 40
    assert sum(total.seconds.values()) == pytest.approx(0.4)


def test_a_run_that_went_on_is_counted_process_by_process(tmp_path):
    """The second process has begun at step 12, which its first line, of step 16, does not say."""
    first = made.log(12, pace=0.01)
    second = made.log(40, pace=0.03, start=12, before=0.12)
    found = stage_times.stretches(run_folder.read(made.run(tmp_path, first + second)))
    assert [(one.first, one.last) for one in found] == [
        *((4 * i, 4 * i + 4) for i in range(3)),
        *((4 * i, 4 * i + 4) for i in range(4, 10)),
    ]
    total = stage_times.whole(found)
    assert total.steps == 36
    oracle = 12 * 0.01 + 24 * 0.03
    assert sum(total.seconds.values()) == pytest.approx(oracle)
    assert total.seconds["apply"] == pytest.approx(oracle / 20)


def test_without_stages_there_is_nothing(tmp_path):
    assert stage_times.stretches(run_folder.read(made.run(tmp_path, kfac=False))) == []
    assert stage_times.whole([]) is None


def test_lines_that_are_odd_are_left_out(tmp_path):
    lines = made.log()
    odd = [
        {"kind": "stages", "step": 3, "elapsed": 0.03, "seconds": "many"},
        {"kind": "stages", "step": 3, "seconds": {"A": 1.0}},
    ]
    run = run_folder.read(made.run(tmp_path, odd + lines))
    assert len(stage_times.stretches(run)) == 10


def test_a_stacked_bar_has_all_stages(tmp_path):
    found = stage_times.stretches(run_folder.read(made.run(tmp_path)))
    parts = stage_times.whole(found).of_a_step()
    picture = stage_times.average(
        [("k", "K-FAC", parts), ("s", "SGD", {stage_times.REST: 0.004})], "p"
    )
    drawn, sheet = shown(picture)
    widths = [patch.get_width() for patch in drawn.axes[0].patches]
    assert widths == pytest.approx([7.5, 0.5, 0.5, 0.5, 0.5, 0.5, 4.0])
    lefts = [patch.get_x() for patch in drawn.axes[0].patches]
    assert lefts == pytest.approx([0, 7.5, 8, 8.5, 9, 9.5, 0])
    assert [text.get_text() for text in drawn.axes[0].texts] == ["10.0", "4.00"]
    titles = [mark.title for mark in sheet.marks.values() if mark.title]
    assert "K-FAC: decompositions 500 µs, 5%" in titles
    assert [mark.owner for mark in sheet.marks.values()][:7] == ["k"] * 7
    names = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert names == [stage_times.REST, *map(stage_times.meaning, made.STAGES)]
    assert picture.alt == "time of a step by stage: K-FAC 10.0 ms; SGD 4.00 ms."


def test_bars_along_the_run(tmp_path):
    found = stage_times.stretches(run_folder.read(made.run(tmp_path)))
    drawn, _ = shown(stage_times.along(found, "p"))
    patches = drawn.axes[0].patches
    assert len(patches) == 10 * 6
    tops = {}
    for patch in patches:
        tops[patch.get_x()] = max(tops.get(patch.get_x(), 0), patch.get_y() + patch.get_height())
    assert list(tops) == [4.0 * i for i in range(10)]
    assert list(tops.values()) == pytest.approx([10.0] * 10)


def test_many_stretches_are_joined(tmp_path):
    found = stage_times.stretches(run_folder.read(made.run(tmp_path, made.log(400, every=4))))
    drawn, _ = shown(stage_times.along(found, "p"))
    assert len(drawn.axes[0].patches) == 34 * 6
    assert max(p.get_y() + p.get_height() for p in drawn.axes[0].patches) == pytest.approx(10)


def test_drift_shows_quantiles(tmp_path):
    run = run_folder.read(made.run(tmp_path))
    pictures = list(factor_plots.drift(run, "p1-drift"))
    assert [one.name for one in pictures] == ["p1-drift-A", "p1-drift-G"]
    limits = []
    for picture, times in zip(pictures, (1, 2), strict=True):
        plot = parsed(picture.drawn(None)).one(kind="plot")
        limits.append(plot.attributes["data-y"].split()[1:3])
        lines = list(plot.all(kind="curve"))
        assert len(lines) == 5
        for line, factor in zip(lines, (0.2, 0.5, 1.0, 2.0, 4.0), strict=True):
            values = curve(plot, line)
            # matplotlib leaves out points that are not seen to be there
            assert len(values) > 10
            for x, y in values:
                assert y == pytest.approx(times * factor / x, rel=2e-2)
    assert limits[0] == limits[1]
    assert "the median over blocks goes from 1 to 0.025" in pictures[0].alt


@pytest.mark.parametrize(
    "values",
    [[1, 2, 3], "many", [0.0, 0, 0, 0, 0], [1, 2, None, 4, 5], [1, 2, float("nan"), 4, 5]],
    ids=["short", "text", "zero", "none", "nan"],
)
def test_drift_that_cannot_be_drawn_is_left_out(tmp_path, values):
    line = {"kind": "drift", "step": 1, "elapsed": 0.1, "A": values, "G": [1, 2, 3, 4, 5]}
    run = run_folder.read(made.run(tmp_path, [line]))
    assert list(factor_plots.changes(run)) == ["G"]


def test_spectra_are_curves_by_layer(tmp_path):
    found = run_folder.read(made.run(tmp_path)).curvature
    pictures = list(factor_plots.spectra(found.spectra, "p1-spectra", 1200))
    assert [one.title for one in pictures] == ["Eigenvalues of A", "Eigenvalues of G"]
    plot = parsed(pictures[0].drawn(None)).one(kind="plot")
    for i, line in enumerate(plot.all(kind="curve")):
        assert line.one("title").text == f"layer{i}.conv: 20 eigenvalues"
        values = curve(plot, line)
        assert values[0] == pytest.approx((0, i + 1), rel=1e-2, abs=1e-2)
        assert values[-1] == pytest.approx((100, (i + 1) * 10**-4.75), rel=2e-2)
    assert pictures[0].caption == "After step 1,200; a curve for each layer."
    assert "the largest is 1 in layer0.conv and 3 in layer2.conv" in pictures[0].alt


def test_what_is_not_above_zero_has_no_logarithm():
    some = run_folder.FactorSpectrum("a", "A", 4, (2.0, 1.0, 0.0, -1e-9))
    none = [
        run_folder.FactorSpectrum("b", "G", 2, (0.0, 0.0)),
        run_folder.FactorSpectrum("c", "G", 2, ()),
    ]
    (picture,) = factor_plots.spectra([some, *none], "p", 1)
    plot = parsed(picture.drawn(None)).one(kind="plot")
    read = curve(plot, plot.one(kind="curve"))
    assert [x for x, _ in read] == pytest.approx([0, 100 / 3], abs=0.1)
    assert [y for _, y in read] == pytest.approx([2, 1], rel=1e-2)


def test_many_layers_have_a_short_legend():
    many = [run_folder.FactorSpectrum(f"layer{i}", "A", 3, (3.0, 2.0, 1.0)) for i in range(60)]
    (picture,) = factor_plots.spectra(many, "p", 1)
    drawn, _ = shown(picture)
    names = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert len(names) <= 12
    assert (names[0], names[-1]) == ("layer0", "layer59")
    assert len({line.get_color() for line in drawn.axes[0].lines}) == 60


def placement(tmp_path, ranks, blocks, workers):
    folder = made.run(tmp_path, [], found=made.record(ranks, blocks, workers))
    return run_folder.read(folder).curvature.placement


@pytest.mark.parametrize(
    ("ranks", "blocks", "workers"),
    [(1, 3, 1), (4, 6, 2), (20, 9, 5)],
    ids=["one", "four", "twenty"],
)
def test_every_cell_of_the_map_is_as_placed(tmp_path, ranks, blocks, workers):
    found = placement(tmp_path, ranks, blocks, workers)
    drawn, _ = shown(placement_map.picture(found, "p"))
    axes = drawn.axes[0]
    every, working, *strips = (patch.get_path() for patch in axes.patches)
    colours = [patch.get_facecolor() for patch in axes.patches]
    assert len({colour[:3] for colour in colours}) == len(colours)
    for row, block in enumerate(found.blocks):
        for rank in range(ranks):
            inside = (rank, row - 0.4)  # above the strips of few ranks
            assert every.contains_point(inside)
            assert working.contains_point(inside) == (rank in block.workers)
            for i, factor in enumerate(block.factors):
                beside = (rank - 0.25 + 0.5 * i, row)
                above = (rank, row - 0.25 + 0.5 * i)
                at = above if ranks > 16 else beside
                for j, path in enumerate(strips):
                    there = i == j and rank in factor.decomposers
                    assert path.contains_point(at) == there
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == [f"layer{i}.conv" for i in range(blocks)]
    sizes = [patch.get_width() for patch in drawn.axes[1].patches]
    assert sizes == [10 + 7 * i for i in range(blocks)] * 2


def test_those_who_keep_only_have_dots(tmp_path):
    record = made.record(4, 2, 2)
    record["placement"]["blocks"][1]["factors"][0]["keepers"] = [0, 3]
    found = run_folder.read(made.run(tmp_path, [], found=record)).curvature.placement
    drawn, _ = shown(placement_map.picture(found, "p"))
    busy = {r for factor in found.blocks[1].factors for r in factor.decomposers}
    dots = [(0, 1)] if 0 not in busy else []
    dots += [(3, 1)] if 3 not in busy else []
    (line,) = drawn.axes[0].lines
    assert list(zip(*line.get_data(), strict=True)) == dots
    assert "keeps only" in [text.get_text() for text in drawn.legends[0].get_texts()]


def test_a_large_map_is_readable_and_no_large_file(tmp_path):
    picture = placement_map.picture(placement(tmp_path, 64, 160, 16), "p")
    text = picture.drawn(None)
    assert len(text) < 250_000
    drawn, _ = shown(picture)
    names = [one.get_text() for one in drawn.axes[0].get_yticklabels()]
    assert names[0] == "layer0.conv"
    assert 50 <= len(names) <= 100
    assert list(drawn.axes[0].get_xticks()) == [0, 8, 16, 24, 32, 40, 48, 56]
    assert picture.height < 15
    assert "160 blocks on 64 ranks; 16 ranks precondition a block" in picture.alt


def test_ranks_in_a_row_are_one_box():
    assert placement_map._boxes(2, [5, 1, 2, 3], 0.0, 1.0) == [
        (0.5, 1.5, 3.0, 1.0),
        (4.5, 1.5, 1.0, 1.0),
    ]
    assert placement_map._boxes(0, [], 0.0, 1.0) == []


def test_a_placement_in_words(tmp_path):
    found = placement_map.table(placement(tmp_path, 4, 2, 2))
    assert found.rows[0] == ("layer0.conv", "A", "10", "0", "0", "0,1")
    assert found.rows[3] == ("layer1.conv", "G", "17", "2", "2", "2,3")
    alone = placement_map.picture(placement(tmp_path, 1, 2, 1), "p")
    assert alone.alt == "placement Hybrid(1): One rank does all of the work for 2 blocks."


def test_no_blocks_no_map(tmp_path):
    assert placement_map.picture(placement(tmp_path, 2, 0, 1), "p") is None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda found: found.update(format=7), "has format 7 but this version of natgrad reads 1"),
        (lambda found: found.pop("spectra"), "is not as natgrad writes it ('spectra' is missing)"),
        (lambda found: found.update(placement=[]), "is not as natgrad writes it (list indices"),
        (
            lambda found: found["placement"]["blocks"][0].update(workers=[1]),
            "is not as natgrad writes it (a rank is not one of 1)",
        ),
    ],
    ids=["format", "missing", "form", "rank"],
)
def test_a_record_that_is_spoilt_is_told_of(tmp_path, spoil, said):
    folder = made.run(tmp_path)
    record = made.record()
    spoil(record)
    (folder / KFAC).write_text(json.dumps(record), encoding="utf-8")
    run = run_folder.read(folder)
    assert run.curvature is None
    (problem,) = run.problems
    assert problem.startswith(f"The file {folder / KFAC} {said}")


def test_a_record_that_is_cut_off(tmp_path):
    folder = made.run(tmp_path)
    (folder / KFAC).write_text('{"format": 1, ', encoding="utf-8")
    (problem,) = run_folder.read(folder).problems
    assert problem.startswith(f"The file {folder / KFAC} cannot be read (Expecting property name")
    assert problem.endswith("): copy a good one there, or make the run again.")


def test_factors_without_a_spectrum_are_named(tmp_path):
    folder = made.run(tmp_path)
    assert "are not known" not in text_of(folder)
    file = folder / KFAC
    found = json.loads(file.read_text())
    gone = found["spectra"].pop(0)
    file.write_text(json.dumps(found))
    assert (
        f"Eigenvalues of 1 factors are not known: {gone['factor']} of {gone['block']}."
        in text_of(folder)
    )


def text_of(folder):
    part = kfac_section.section(run_folder.read(folder), "run", "K-FAC", Gallery(None))
    return part.html(2, Names())
