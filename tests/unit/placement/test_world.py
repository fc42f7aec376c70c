import re
from dataclasses import fields

import pytest

from natgrad.errors import SettingError
from natgrad.placement import Cluster, World

WHOLE = [f.name for f in fields(World) if f.type is int]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("given", [0, 2.0, True, "4"], ids=repr)
def test_sizes_are_whole_numbers(name, given):
    says = f"World.{name} is {given!r} but must be a whole number of at least 1: pass such an int."
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        World(**{"size": 1, name: given})


@pytest.mark.parametrize("name", ["flops", "bandwidth", "latency", "memory", "overhead"])
@pytest.mark.parametrize("given", [0, -1.0, float("nan"), float("inf"), "fast"], ids=repr)
def test_speeds_are_positive(name, given):
    says = f"Cluster.{name} is {given!r} but must be finite and above 0: pass such a number."
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        Cluster(**{name: given})


def test_ranks():
    assert World(3).ranks == range(3)
