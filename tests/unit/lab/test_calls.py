"""Words with arguments: one value in text and in TOML, and a sentence where it is none."""

import tomllib

import pytest

from natgrad.errors import SettingError
from natgrad.lab.calls import Call, from_toml, parsed, text, toml

VALUES = [
    3,
    -2.5e-4,
    True,
    Call("eigen"),
    Call("my.module:Own"),
    Call("growing", (("every", 5), ("at_most", 20))),
    Call("my_module:own", (("share", 0.5), ("names", (Call("a"), "b c", 'd "e"')))),
    Call("each", (("A", 10), ("G", Call("two-phase", (("epoch", 1.5),))))),
]


@pytest.mark.parametrize("value", VALUES, ids=text)
def test_every_value_reads_back(value):
    assert parsed(text(value), "it") == value
    written = toml(value)
    assert from_toml(tomllib.loads(f"it = {written}")["it"], "it") == value
    if written.startswith("{"):
        assert parsed(written, "it") == value


def test_both_forms_are_one():
    for given in ("growing(every=5,at_most=7)", " growing( every = 5 , at_most = 7 ) "):
        assert text(parsed(given, "it")) == "growing(every=5, at_most=7)"
    given = {"growing": {"every": 5, "at_most": 7}}
    assert text(from_toml(given, "it")) == "growing(every=5, at_most=7)"
    assert parsed("growing()", "it") == Call("growing")


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("growing(every=5", "as it ends too soon"),
        ("growing(5)", "at '5)'"),
        ("growing(every=5, every=6)", "at 'every=6)'"),
        ("growing every", "at 'every'"),
        ("", "as it ends too soon"),
        ("1x", "at '1x'"),
        (")", "at ')'"),
    ],
)
def test_what_cannot_be_read(given, where):
    with pytest.raises(SettingError) as error:
        parsed(given, "refresh_every")
    assert str(error.value) == (
        f"refresh_every is {given!r}, which cannot be read {where}: write a number, a word, or a "
        "word with its arguments, such as growing(every=5)."
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"growing": 5},
            "it is a table with the keys growing but must have one word with a table of its "
            "arguments: write such as {growing = {every = 5}}.",
        ),
        (
            {"a": {}, "b": {}},
            "it is a table with the keys a, b but must have one word with a table of its "
            "arguments: write such as {growing = {every = 5}}.",
        ),
        (
            None,
            "it is None but must be a number, a text or a table with one word: write such as "
            "{growing = {every = 5}}.",
        ),
    ],
)
def test_tables_that_are_none(given, message):
    with pytest.raises(SettingError) as error:
        from_toml(given, "it")
    assert str(error.value) == message
    if isinstance(given, dict) and len(given) == 1:
        with pytest.raises(SettingError, match="is no table of TOML"):
            parsed("{growing", "it")
