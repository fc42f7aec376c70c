"""docs/planning.md has what its commands print, and says plainly which shapes are met."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import papers_shapes
from natgrad import Eigen
from natgrad.cli.step_tables import recommendation
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
    return papers_shapes.ResNet50(Eigen())


def test_sizes_are_those_of_the_paper(network):
    for _, predicted, paper in papers_shapes.sizes(network.kfac.plan.blocks):
        assert f"{predicted:,.0f}" == paper


def test_an_iteration_falls_to_tens_of_gpus_and_rises_past_256():
    seconds = dict(papers_shapes.iterations())
    assert seconds[1] > seconds[4] > seconds[16]
    assert seconds[1] / seconds[64] > 1.3
    assert seconds[1024] > seconds[256]


def test_fewer_messages_scale_better(network):
    found = papers_shapes.scaling(network)
    efficiency = {name: seconds[0] / seconds[-1] for name, seconds in found.items()}
    assert efficiency["K-FAC-opt"] > efficiency["K-FAC-lw"]
    assert all(seconds == sorted(seconds) for seconds in found.values())


def test_eigendecompositions_take_longer_than_gradients(network):
    share, gradients = papers_shapes.broadcasts(network)
    assert share > 3.4 * gradients
