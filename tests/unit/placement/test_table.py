"""What a plan prints."""

import sys

import pytest

from natgrad.placement import CommOpt, Hybrid, MemOpt, Route, World
from natgrad.placement.table import ranks_text
from natgrad.specs import as_ranks
from unit.placement.networks import ekfac, linear, mixed, norm, tied


@pytest.fixture
def no_rich(monkeypatch):
    for name in ("rich", "rich.box", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 4, 8), "0,4,8"),
        ((0, 1, 2, 3), "0..3"),
        ((1, 5, 9, 13), "1,5..13"),
        ((0, 1, 5, 6), "0,1,5,6"),
        ((0, 1, 3, 4, 6, 7, 9, 10), "0,1,3,4,6,7 and 2 more"),
        (tuple(range(16)), "all"),
    ],
)
def test_ranks_are_short(ranks, text):
    assert ranks_text(as_ranks(ranks), 16) == text


def test_the_only_rank_has_its_number():
    assert ranks_text(range(1), 1) == "0"


PLAIN = """\
Plan Hybrid(1/2)
block  layer      factor       size  kept by  decomposed by  parts at  preconditioned by
-----  ---------  ------  ---------  -------  -------------  --------  -----------------
fc     Linear     A         41 x 41  0        0              0,2       0,2
fc     Linear     G         40 x 40  2        2              0,2       0,2
ln     LayerNorm  F       3 x 2 x 2  3        3              1,3       1,3
head   Linear     A           5 x 5  3        3              all       1,3
head   Linear     G           6 x 6  1        1              all       1,3
head   Linear     S              30  1,3                     1,3       1,3
3 blocks with 6 factors on 4 ranks, 1 exchange per update

Ranks
rank  factors kept  inverses kept"""


def test_a_plan_prints_as_two_tables(no_rich):
    blocks = [linear("fc", 40, 40, 4), norm("ln", 3, 4), ekfac("head", 6, 5, 4)]
    text = str(Hybrid(0.5)(blocks, World(4)))
    assert text.startswith(PLAIN)
    assert text.splitlines()[-1].startswith("memory: ")


def test_ranks_with_the_same_numbers_have_one_row():
    plan = CommOpt()([linear("one", 3, 2, 2)], World(2))
    same = ("24 B", "96 B", "72 B", "288 B", "24 B", "48 B", "0 B", "6.75e-07", "2.16e-07")
    assert plan.by_rank().rows == (("0,1", *same),)
    plan = MemOpt()([linear("one", 3, 2, 5)], World(5))
    owner, others = plan.by_rank().rows
    assert owner == (
        "0",
        "48 B",
        "96 B",
        "72 B",
        "336 B",
        "0 B",
        "0 B",
        "160 B",
        "1.35e-06",
        "2.16e-07",
    )
    assert others == ("1..4", "0 B", "0 B", "0 B", "120 B", "48 B", "0 B", "0 B", "0", "0")


def test_a_table_of_many_ranks_is_short():
    plan = Hybrid(1 / 100)(mixed(10_000), World(10_000))
    assert len(plan.by_rank().rows) < 30


def test_what_goes_in_even_slices_is_named():
    blocks = [linear("one", 3, 2, 4)]
    assert "slices" not in MemOpt()(blocks, World(4, route=Route.DIRECT)).by_rank().footer
    even = MemOpt()(blocks, World(4, route=Route.BALANCED)).by_rank().footer
    assert even.endswith("; in even slices: factors, inverses, sums, results")


def test_every_factor_has_a_row():
    plan = MemOpt()([*mixed(4), tied("more", 9, 4, 4)], World(4))
    table = plan.table()
    assert list(zip(table.column("block"), table.column("factor"), strict=True)) == list(
        plan.factors
    )


def test_one_rank_is_one_rank():
    plan = MemOpt()([linear("one", 3, 2, 1)], World(1))
    assert plan.table().footer == "1 block with 2 factors on 1 rank, 0 exchanges per update"
