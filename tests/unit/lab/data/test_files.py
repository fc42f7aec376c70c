"""Compressed files are unpacked as far as is sensible, and no further."""

import gzip
import tracemalloc

import pytest

from natgrad.errors import NatgradError
from natgrad.lab.data import files


def test_a_file_that_would_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_UNASKED", 1 << 20)
    path = tmp_path / "zeros.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)))
    tracemalloc.start()
    with pytest.raises(NatgradError, match=r"more than .* when decompressed, 100 times its size"):
        files.read(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 23
    tracemalloc.stop()


def test_what_compresses_well_is_read(tmp_path):
    path = tmp_path / "words.gz"
    text = b"the same words again and again " * 50_000
    path.write_bytes(gzip.compress(text))
    assert files.read(path) == text
