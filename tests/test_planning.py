"""docs/planning.md has what its commands print, and says plainly which shapes are met."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import owners_at_scale, papers_shapes
from natgrad import Cholesky, Eigen
from natgrad.cli.step_tables import recommendation
from natgrad.placement import simulate
from unit.cli.test_plan_steps import compared

PAGE = (Path(__file__).parents[1] / "docs" / "planning.md").read_text(encoding="utf-8")


def between(mark):
    return re.search(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", PAGE, re.DOTALL)[1]


def test_the_page_has_what_the_script_prints():
    assert between("papers") == "\n".join(papers_shapes.markdown()) + "\n"


def test_the_page_has_what_the_command_recommends():
    said = recommendation(compared("resnet50", ranks=64, batch=32))
    assert between("recommendation") == f"> {said}\n"


@pytest.fixture(scope="module")
def network():
    return papers_shapes.Counted("resnet50", Eigen())


def test_sizes_are_those_of_the_paper(network):
    for _, predicted, paper in papers_shapes.sizes(network.kfac.plan.blocks):
        assert f"{predicted:,.0f}" == paper


@pytest.fixture(scope="module")
def inverted():
    return papers_shapes.Counted("resnet50", Cholesky())


def test_an_iteration_falls_to_tens_of_gpus_and_rises_past_256(inverted):
    seconds = dict(papers_shapes.iterations(inverted))
    assert seconds[1] > seconds[4] > 0.999 * seconds[16]
    assert 1.3 < seconds[1] / seconds[64] < 1.5  # 131.1% in the paper
    assert seconds[64] < seconds[256] < seconds[1024]
    assert seconds[1024] > 1.05 * seconds[256]


def test_stale_statistics_save_about_half(inverted):
    for ranks, fresh, stale, neither in papers_shapes.staleness(inverted):
        before, after = papers_shapes.STALE[ranks]
        assert 1.0 < fresh / stale < 1.6 * before / after
        assert neither < stale


def test_bert_pays_little_for_decompositions_twice_as_often():
    for batch, often, seldom, both in papers_shapes.bert():
        assert both < seldom < often
        if batch >= 32:
            assert 1 - seldom / often < 0.025  # 1.58% in the paper


def test_a_broadcast_for_each_layer_brings_both_nearer(network):
    share, gradients = papers_shapes.broadcasts(network)
    each, alone = papers_shapes.one_by_one(network.kfac.plan.blocks)
    assert 3.4 < each / alone < share / gradients


def test_fewer_messages_scale_better(network):
    found = papers_shapes.scaling(network)
    efficiency = {name: seconds[0] / seconds[-1] for name, seconds in found.items()}
    assert efficiency["K-FAC-opt"] > efficiency["K-FAC-lw"]
    assert all(seconds == sorted(seconds) for seconds in found.values())


def test_eigendecompositions_take_longer_than_gradients(network):
    share, gradients = papers_shapes.broadcasts(network)
    assert share > 3.4 * gradients


def test_the_page_has_what_sharing_out_gains():
    """Two of its rows; the others take minutes."""
    said = between("owners").splitlines()
    for ranks in (64, 1024):
        alone, shared = owners_at_scale.shared("resnet50", ranks)
        (row,) = (line for line in said if line.startswith(f"| resnet50 | {ranks:,} |"))
        times = [simulate(plan, owners_at_scale.ON) for plan in (alone, shared)]
        cells = [owners_at_scale._ms(max(one.refresh)) for one in times]
        cells += [owners_at_scale._ms(one.step_seconds(10, 100)) for one in times]
        assert row == f"| resnet50 | {ranks:,} | {' | '.join(cells)} |"
        assert shared.rows
        assert not alone.rows
