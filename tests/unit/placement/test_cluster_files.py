"""A measured cluster survives its file to the last bit; any other file is refused in a sentence."""

import json
import math
from dataclasses import replace

import pytest

from natgrad.errors import SettingError
from natgrad.placement import (
    Circumstances,
    Cluster,
    CollectiveSeconds,
    Link,
    MeasuredCluster,
    Passing,
    read_cluster,
    write_cluster,
)
from unit.placement.test_measured_cost import COST

FOUND = MeasuredCluster(
    Cluster(COST.flops, 1e8 / 3, 1e-5 / 7, overhead=0.1 + 0.2),
    replace(COST, carried=Passing(1e-5 / 3, 1e-9 / 7), folded=Passing(0.0, 1e-10)),
    (CollectiveSeconds("exchange", 2, 64, 1e-4 / 3), CollectiveSeconds("total", 2, 8, math.pi)),
    Circumstances("2030-01-02T03:04:05+00:00", "cpu", 2, 1, "2.0"),
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.json"
    write_cluster(FOUND, path)
    return path


@pytest.mark.parametrize(
    "found",
    [
        FOUND,
        replace(FOUND, collectives=()),
        replace(FOUND, cluster=Cluster(COST.flops, memory=2.0**35, node=4, inside=Link(1e-6, 1e9))),
    ],
    ids=["links", "alone", "nodes"],
)
def test_what_is_read_is_what_was_written(tmp_path, found):
    path = tmp_path / "cluster.json"
    write_cluster(found, path)
    assert read_cluster(path) == found
    once = path.read_text(encoding="utf-8")
    write_cluster(read_cluster(path), path)
    assert path.read_text(encoding="utf-8") == once


def test_the_residual_is_the_largest():
    assert FOUND.residual == max(abs(one.residual(FOUND.cluster)) for one in FOUND.collectives) > 0
    assert replace(FOUND, collectives=()).residual == 0


def refused(path):
    with pytest.raises(SettingError) as error:
        read_cluster(path)
    return str(error.value)


def anew(path):
    return f": write it anew with natgrad plan --calibrate {path}."


def test_no_file(tmp_path):
    path = tmp_path / "nothing.json"
    assert refused(path) == (
        f"The cluster file {path} cannot be read (No such file or directory): name one that "
        f"exists, or write it with natgrad plan --calibrate {path}."
    )


@pytest.mark.parametrize("content", [b"", b"{'a': 1}", b"\xff\xfe"])
def test_no_json(file, content):
    file.write_bytes(content)
    said = refused(file)
    assert said.startswith(f"The cluster file {file} is no JSON (")
    assert said.endswith(f"){anew(file)}")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ((), "cluster"),
        ((), "version"),
        (("cluster",), "bandwidth"),
        (("cost", "eigen"), "first"),
        (("cost", "carried"), "each"),
        (("collectives", 1), "seconds"),
        (("measured",), "threads"),
    ],
)
def test_fields_that_are_missing_or_unknown(file, place, name):
    for change, words in (("take", "lacks the field"), ("add", "has a field")):
        write_cluster(FOUND, file)
        whole = inner = json.loads(file.read_text(encoding="utf-8"))
        for key in place:
            inner = inner[key]
        if change == "take":
            del inner[name]
        else:
            inner["speed"] = 1
        file.write_text(json.dumps(whole), encoding="utf-8")
        where = ".".join(map(str, place)).replace("collectives.1", "collectives[1]")
        full = f"{where}." if where else ""
        end = f"{full}{name}" if change == "take" else f"{full}speed, which is unknown"
        assert refused(file) == f"The cluster file {file} {words} {end}{anew(file)}"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (
            ("cluster", "bandwidth"),
            -1.0,
            "Cluster.bandwidth is -1.0 but must be finite and above 0",
        ),
        (("cluster", "latency"), math.nan, "Cluster.latency is nan but must be finite and above 0"),
        (("cluster", "flops"), "1", "Cluster.flops is '1' but must be finite and above 0"),
        (
            ("cost", "product", "first", 0),
            math.inf,
            "SecondsBySize.first is inf but must be finite and above 0",
        ),
        (
            ("cost", "folded", "start"),
            -1.0,
            "Passing.start is -1.0 but must be finite and at least 0",
        ),
        (("cluster", "rings"), 2, "Cluster.rings is 2 but must be True or False"),
        (
            ("cluster", "node"),
            4,
            "Cluster.node is 4 but Cluster.inside is None, so that nothing connects the ranks of a "
            "node",
        ),
        (
            ("measured", "ranks"),
            0,
            "Circumstances.ranks is 0 but must be a whole number of at least 1",
        ),
        (("measured", "when"), 7, "Circumstances.when is 7 but must be a text"),
        (
            ("collectives", 0, "kind"),
            "shout",
            "CollectiveSeconds.kind is 'shout' but must be one of exchange, total, "
            "reduce_scatter, all_gather",
        ),
        (
            ("cluster", "flops"),
            5.0,
            "MeasuredCluster.cluster has 5.0 flops and its cost 1000000000.0 but both must be the "
            "same",
        ),
    ],
)
def test_impossible_values(file, place, value, said):
    change(file, place, value)
    assert refused(file) == (
        f"The cluster file {file} has an impossible value ({said}){anew(file)}"
    )


def change(file, place, value):
    whole = inner = json.loads(file.read_text(encoding="utf-8"))
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    file.write_text(json.dumps(whole), encoding="utf-8")


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (("cluster",), "has 3 for cluster but must have an object there"),
        (("cost", "eigen", "sizes"), "has 3 for cost.eigen.sizes but must have a list there"),
        (("collectives",), "has 3 for collectives but must have a list there"),
    ],
)
def test_other_things_in_their_place(file, place, what):
    change(file, place, 3)
    assert refused(file) == f"The cluster file {file} {what}{anew(file)}"


def test_no_object_at_all(file):
    file.write_text("[]", encoding="utf-8")
    assert refused(file) == (
        f"The cluster file {file} has [] for all but must have an object there{anew(file)}"
    )


def test_another_version(file):
    change(file, ("version",), 4)
    assert refused(file) == (
        f"The cluster file {file} has version 4 but this natgrad reads version 3{anew(file)}"
    )


def test_a_place_that_cannot_be_written_to(tmp_path):
    path = tmp_path / "nowhere" / "cluster.json"
    with pytest.raises(SettingError) as error:
        write_cluster(FOUND, path)
    assert str(error.value) == (
        f"The cluster file {path} cannot be written (No such file or directory): name a file in a "
        "folder that exists and that you may write to."
    )
