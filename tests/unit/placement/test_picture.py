"""The picture of a plan."""

import re
import sys
from itertools import pairwise

import pytest

from natgrad.placement import CommOpt, Hybrid, MemOpt, World
from unit.placement.networks import linear, mixed, norm, resnet50

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def _matplotlib():
    pytest.importorskip("matplotlib").use("Agg")


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def sixty(size):
    """As many blocks as ResNet-50 with a few of its norm layers."""
    return [*resnet50(size, norms=False), *(norm(f"bn{i}", 64, size) for i in range(6))]


@pytest.mark.usefixtures("_matplotlib")
class TestDraw:
    def test_sixty_blocks_on_sixteen_ranks(self, tmp_path):
        path = tmp_path / "plan.png"
        plan = Hybrid(1 / 4)(sixty(16), World(16))
        figure = plan.draw(path)
        cells, memory = figure.axes
        assert [label.get_text() for label in cells.get_xticklabels()] == [
            b.name for b in plan.blocks
        ]
        assert list(cells.get_yticks()) == list(range(16))
        assert (cells.get_xlabel(), cells.get_ylabel()) == (
            "block, in the order of the model",
            "rank",
        )
        assert memory.get_xlabel() == "memory (MiB)"
        assert figure.get_suptitle() == "Hybrid(1/4): 60 blocks on 16 ranks"
        assert path.read_bytes().startswith(PNG)
        assert path.stat().st_size > 20_000

    def test_nothing_is_drawn_outside_and_no_names_overlap(self):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = Hybrid(1 / 4)(sixty(16), World(16)).draw()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        inside = figure.bbox
        for axes in figure.axes:
            box = axes.get_tightbbox(canvas.get_renderer())
            assert inside.x0 <= box.x0
            assert inside.y0 <= box.y0
            assert box.x1 <= inside.x1
            assert box.y1 <= inside.y1
        names = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
        assert all(one.x1 <= two.x0 for one, two in pairwise(names))

    def test_a_cell_is_marked_for_everything_a_rank_does(self):
        plan = MemOpt()(mixed(4), World(4))
        cells, memory = plan.draw().axes
        assert legend(cells) == [
            "gets the result",
            "holds inverses too",
            "preconditions",
            "keeps, decomposes A",
            "keeps, decomposes G",
            "keeps, decomposes F",
        ]
        assert legend(memory) == ["factors", "inverses", "prepared", "stacks", "passing"]
        counts = [len(marks.get_paths()) for marks in cells.collections]
        held, working = counts[1:3]
        assert working == len(plan.blocks)
        assert held == 2 * 3  # two blocks whose basis is everywhere
        assert counts[0] == 4 * len(plan.blocks) - held - working
        assert sum(counts[3:]) == len(plan.decomposers)

    def test_a_dot_is_a_factor_kept_by_a_rank_that_decomposes_nothing_of_the_block(self):
        plan = Hybrid(0.5)(mixed(4), World(4))
        cells, _ = plan.draw().axes
        assert legend(cells)[-1] == "keeps only"
        (dots,) = cells.lines
        names = {plan.blocks[int(x)].name for x in dots.get_xdata()}
        assert names <= {"rotated", "both"}

    def test_bars_are_the_memory_of_the_ranks(self):
        plan = CommOpt()(resnet50(4), World(4))
        _, memory = plan.draw().axes
        ends = [bar.get_x() + bar.get_width() for bar in memory.patches[-4:]]
        assert ends == pytest.approx([plan.memory(r).total / 2**30 for r in range(4)])

    def test_long_names_keep_their_end(self):
        name = "encoder." * 10 + "weight"
        cells, _ = MemOpt()([linear(name, 3, 2, 1)], World(1)).draw().axes
        (label,) = cells.get_xticklabels()
        assert label.get_text() == "…" + name[-27:]

    def test_thousands_of_ranks_are_shown_in_part(self, tmp_path):
        figure = Hybrid(1 / 4)(mixed(10_000), World(10_000)).draw(tmp_path / "plan.png")
        says = "Hybrid(1/4): 7 blocks on 10,000 ranks, of which the first 256 are shown"
        assert figure.get_suptitle() == says
        assert figure.axes[0].get_ylim() == (255.5, -0.5)
        assert len(figure.axes[1].patches) == 5 * 256

    def test_hundreds_of_blocks_and_ranks_leave_names_out(self):
        blocks = [linear(f"l{i}", 3, 2, 100) for i in range(200)]
        cells, _ = MemOpt()(blocks, World(100)).draw().axes
        assert [label.get_text() for label in cells.get_xticklabels()][:2] == ["l0", "l3"]
        assert list(cells.get_yticks())[:2] == [0, 2]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    says = (
        "Plan.draw needs matplotlib, which is not installed: pip install 'natgrad[report]', or "
        "print the plan as a table."
    )
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(says)}$"):
        MemOpt()([linear("one", 3, 2, 1)], World(1)).draw()
