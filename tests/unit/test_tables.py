import sys
from dataclasses import replace

import pytest

from natgrad.tables import Column, Table, bytes_text, seconds_text


@pytest.fixture
def table():
    return Table(
        title="coverage",
        columns=(Column("module"), Column("parameters", "right")),
        rows=(("blocks[0].fc", "4,160"), ("<head>", "10")),
        footer="2 of 2 covered",
    )


@pytest.fixture
def terminal(monkeypatch):
    def of_width(columns):
        monkeypatch.setenv("COLUMNS", str(columns))

    return of_width


@pytest.fixture
def no_rich(monkeypatch):
    for name in ("rich", "rich.box", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)


PLAIN = """\
coverage
module        parameters
------------  ----------
blocks[0].fc       4,160
<head>                10
2 of 2 covered"""


def test_without_rich_the_text_is_plain_and_aligned(table, no_rich):
    assert str(table) == PLAIN


def test_with_rich_the_text_is_drawn_without_colours(table, terminal):
    pytest.importorskip("rich")
    terminal(80)
    text = str(table)
    assert "─" in text
    assert "\x1b" not in text
    assert all(part in text for part in ("coverage", "blocks[0].fc", "4,160", "2 of 2 covered"))
    right_edges = {len(line) for line in text.splitlines() if line.endswith(("4,160", "10"))}
    assert len(right_edges) == 1


def test_a_table_wider_than_the_terminal_folds_and_loses_nothing(terminal):
    pytest.importorskip("rich")
    terminal(50)
    name = "encoder." * 10 + "weight"
    text = str(Table("", (Column("module"), Column("why")), ((name, "tied"),)))
    assert max(map(len, text.splitlines())) <= 50
    assert name in "".join(line.split()[0] for line in text.splitlines() if line.strip())


def test_a_very_narrow_terminal_gets_plain_text(table, terminal):
    terminal(20)
    assert str(table) == PLAIN


def test_a_very_long_table_is_not_drawn(table, terminal):
    """Drawing thousands of rows would take seconds."""
    terminal(80)
    few, many = (replace(table, rows=count * table.rows[:1]) for count in (200, 201))
    assert str(few) != few.plain()
    assert str(many) == many.plain()


def test_without_a_terminal_nothing_is_folded(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    name = "encoder." * 40 + "weight"
    assert name in str(Table("", (Column("module"),), ((name,),)))


def test_an_ascii_stdout_gets_plain_text(table, terminal, monkeypatch):
    terminal(80)
    monkeypatch.setattr("natgrad.tables._stdout_shows_unicode", lambda: False)
    assert str(table) == PLAIN


def test_rows_are_data(table):
    assert table.rows[0] == ("blocks[0].fc", "4,160")
    assert table.column("parameters") == ("4,160", "10")


def test_an_unknown_column_is_named_with_those_there_are(table):
    with pytest.raises(KeyError, match=r"no column 'bytes'; it has \['module', 'parameters'\]"):
        table.column("bytes")


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"'t' has 2 columns, but the row \('x',\) has 1 cells"):
        Table("t", (Column("a"), Column("b")), (("x",),))


def test_an_empty_table_prints_its_head(no_rich):
    assert str(Table("nothing", (Column("a"),), ())) == "nothing\na\n-"


def test_html_is_escaped_and_aligned(table):
    html = table._repr_html_()
    assert "&lt;head&gt;" in html
    assert "<head>" not in html
    assert '<td style="text-align:right">4,160</td>' in html
    assert html.count("<tr>") == 3


def test_a_subclass_prints_like_a_table(no_rich):
    class Memory(Table):
        pass

    assert str(Memory("m", (Column("a"),), (("1",),))) == "m\na\n-\n1"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (587 * 2**20, "587 MiB"),
        (3 * 2**40, "3.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12e-6, "12.0 µs"),
        (0.00123, "1.23 ms"),
        (0.5, "500 ms"),
        (9.999, "10.0 s"),
        (75, "1 min 15 s"),
        (3725, "1 h 02 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text
