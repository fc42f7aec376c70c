"""Folders of their own in place of the user's, and the real data where there are some."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from natgrad.errors import DataError
from natgrad.lab.data import locations as module
from natgrad.lab.data.sources import Source


@dataclass(frozen=True)
class Places:
    data: Path
    cache: Path
    debian: Path


@pytest.fixture
def places(tmp_path, monkeypatch):
    found = Places(tmp_path / "data", tmp_path / "cache", tmp_path / "debian")
    monkeypatch.setenv("NATGRAD_DATA", str(found.data))
    monkeypatch.setenv("NATGRAD_CACHE", str(found.cache))
    monkeypatch.setattr(module, "DEBIAN", found.debian)
    return found


@pytest.fixture
def real():
    """``real(source)`` skips where the data set is not on this machine."""

    def need(source: Source) -> None:
        try:
            module.find(source)
        except DataError:
            pytest.skip(f"{source.title} is not here (NATGRAD_DATA={os.getenv('NATGRAD_DATA')})")

    return need
