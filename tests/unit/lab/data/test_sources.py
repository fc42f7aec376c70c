"""What can be brought here is said completely, and checksums are those of real files."""

import hashlib
import re

import pytest

from natgrad.lab.data.locations import find
from natgrad.lab.data.sources import ALL, TINYSHAKESPEARE


@pytest.mark.parametrize("source", ALL, ids=lambda source: source.name)
def test_complete(source):
    assert source.folders
    assert source.files
    assert bool(source.remotes) == bool(source.mirrors)
    for mirror in source.mirrors:
        assert re.fullmatch(r"https?://[\w.-]+/(\S+/)?", mirror)
    for remote in source.remotes:
        assert re.fullmatch(r"[0-9a-f]{64}", remote.sha256)
        assert remote.size > 0
    if source.remotes and not source.archive:
        local = {remote.local for remote in source.remotes}
        possible = [{f"{name}{ending}" for ending in source.endings} for name in source.files]
        assert all(len(local & names) == 1 for names in possible)
    assert bool(source.archive) == bool(source.file_size)


def test_names_are_told_apart():
    assert len({source.name for source in ALL}) == len(ALL)


def test_the_real_checksum(real):
    real(TINYSHAKESPEARE)
    data = find(TINYSHAKESPEARE)["tinyshakespeare.txt"].read_bytes()
    (remote,) = TINYSHAKESPEARE.remotes
    assert len(data) == remote.size
    assert hashlib.sha256(data).hexdigest() == remote.sha256
