"""Text files, and what is said of those that are none."""

import gzip

import pytest

from natgrad.errors import DataError
from natgrad.lab.data import text, tinyshakespeare, wikitext2
from natgrad.lab.data.sources import TINYSHAKESPEARE, WIKITEXT2
from unit.lab.data.error_text import says


def test_plain_and_compressed(tmp_path):
    content = "Zeile eins\r\nZwei: ÄÖ\n"
    (tmp_path / "a.txt").write_bytes(content.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content.encode()))
    assert text.read(tmp_path / "a.txt") == content
    assert text.read(str(tmp_path / "b.txt.gz")) == content


def test_found_in_their_places(places):
    home = places.data / "text"
    (home / "wikitext-2").mkdir(parents=True)
    (home / "tinyshakespeare.txt").write_text("To be")
    for name in ("train", "valid", "test"):
        (home / "wikitext-2" / f"{name}.txt.gz").write_bytes(gzip.compress(name.encode()))
    assert tinyshakespeare() == "To be"
    assert wikitext2() == ("train", "valid")


def test_messages(tmp_path):
    path = tmp_path / "a.txt"
    says(
        DataError,
        f"There is no text {path}: name a file that is there.",
        lambda: text.read(path),
    )
    path.write_bytes(b"abc\xff")
    says(
        DataError,
        f"{path} is no text in UTF-8 (byte 3): replace it or remove it.",
        lambda: text.read(path),
    )
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(b"abc")[:-3])
    says(
        DataError,
        f"{packed} is truncated: the compressed data end too early: remove it and copy it anew.",
        lambda: text.read(packed, WIKITEXT2),
    )
    packed.write_bytes(b"abc")
    says(
        DataError,
        f"{packed} is no gzip file or is corrupt (Not a gzipped file (b'ab')): replace it or "
        "remove it.",
        lambda: text.read(packed),
    )
    says(
        DataError,
        f"{tmp_path} cannot be read (Is a directory): remove it and run `natgrad data get "
        "tinyshakespeare`.",
        lambda: text.read(tmp_path, TINYSHAKESPEARE),
    )


def test_the_real_ones(real):
    real(TINYSHAKESPEARE)
    real(WIKITEXT2)
    assert len(tinyshakespeare()) == 1_115_394
    words = wikitext2().train.split()
    lines = wikitext2().train.count("\n")
    assert len(words) == 2_051_910
    assert len(set(words)) + (lines > 0) == 33_278  # with the end of a line as a word


@pytest.mark.parametrize("given", ["é", "日本", ""])
def test_any_script(tmp_path, given):
    (tmp_path / "a").write_text(given, encoding="utf-8")
    assert text.read(tmp_path / "a") == given
