"""Words of the command line become objects, or an error that says what to write."""

import pytest

from natgrad import Auto, CommOpt, Hybrid, Local, MemOpt, ReduceScatter
from natgrad.cli import options
from natgrad.errors import SettingError
from natgrad.placement import CLUSTERS, Cluster, Flops


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("7", 7),
        ("1e9", 10**9),
        ("512MiB", 512 << 20),
        ("2 GiB", 2 << 30),
        ("1.5KiB", 1536),
        ("40GB", 40 * 10**9),
        ("3kb", 3000),
        ("16B", 16),
    ],
)
def test_sizes(text, bytes_):
    assert options.size(text, "--x") == bytes_


@pytest.mark.parametrize("text", ["", "MiB", "0", "-1MiB", "3TiB", "1e999", "nan", "many"])
def test_no_sizes(text):
    with pytest.raises(SettingError) as error:
        options.size(text, "--bucket")
    assert str(error.value) == (
        f"--bucket is {text!r}, which is no number of bytes: write one such as 512MiB, 40GB or 1e9."
    )


@pytest.mark.parametrize(("text", "share"), [("0.25", 0.25), ("1/4", 0.25), ("1", 1.0)])
def test_fractions(text, share):
    assert options.placement("hybrid", text) == Hybrid(share)


@pytest.mark.parametrize("text", ["0", "1.5", "-1/2", "1/0", "half"])
def test_no_fractions(text):
    with pytest.raises(SettingError) as error:
        options.fraction(text)
    assert str(error.value) == (
        f"--fraction is {text!r} but must be above 0 and at most 1: write a share of the ranks "
        "such as 0.25 or 1/4."
    )


@pytest.mark.parametrize(
    ("text", "some"), [(None, None), ("0.25", 0.25), ("1/4", 0.25), ("1.0", 1.0), ("64", 64)]
)
def test_statistics(text, some):
    """A share is no whole number, and a number of samples is one."""
    found = options.statistics(text)
    assert (found, type(found)) == (some, type(some))


@pytest.mark.parametrize("text", ["0", "0.0", "1.5", "-1/4", "1/0", "-3", "nan", "some"])
def test_no_statistics(text):
    with pytest.raises(SettingError) as error:
        options.statistics(text)
    assert str(error.value) == (
        f"--statistics is {text!r} but must say which samples the curvature is measured on: write "
        "a share above 0 and at most 1.0, such as 0.25 or 1/4, or a whole number of samples of all "
        "ranks together."
    )


@pytest.mark.parametrize("text", ["0", "-1", "5e3", "all"])
def test_widest_factors(text):
    assert options.max_dim("4096") == 4096
    assert options.max_dim("none") is None
    with pytest.raises(SettingError) as error:
        options.max_dim(text)
    assert str(error.value) == (
        f"--max-dim is {text!r} but must be the most columns of a factor that is kept whole: write "
        "a whole number, at least 1, or none to keep all of them whole."
    )


@pytest.mark.parametrize("text", ["3,0", "3,x", "", "3x32"])
def test_shapes(text):
    assert options.shape("3,32,32") == (3, 32, 32)
    with pytest.raises(SettingError) as error:
        options.shape(text)
    assert str(error.value) == (
        f"--sample is {text!r}, which is no shape: write the sizes of one input, such as 3,32,32."
    )


@pytest.mark.parametrize("text", ["1e13", "1,2,3,4", "a,b,c"])
def test_clusters(text):
    assert options.cluster("2e12,1e9,1e-4") == (Cluster(2e12, 1e9, 1e-4), Flops())
    with pytest.raises(SettingError) as error:
        options.cluster(text)
    assert str(error.value) == (
        f"--cluster is {text!r} but must be three numbers, operations a second, bytes a second "
        "and seconds of latency of one rank, as in 1e13,1e10,2e-5, or a file that --calibrate "
        f"wrote, with .json at the end: write these, or name one of {', '.join(CLUSTERS)}."
    )


def test_clusters_by_name():
    assert options.cluster("v100-112x4") == (CLUSTERS["v100-112x4"], Flops())


@pytest.mark.parametrize("text", ["", "1,0", "4,x"])
def test_numbers_of_ranks(text):
    assert options.rank_counts("1,4, 16") == (1, 4, 16)
    with pytest.raises(SettingError) as error:
        options.rank_counts(text)
    assert str(error.value) == (
        f"--sweep-ranks is {text!r} but must be numbers of ranks, at least 1 each: write them as "
        "in 1,4,16,64."
    )


def test_placements():
    machines = Cluster(1e12, 1e9, 1e-5)
    assert options.placement("auto", None, 7, machines) == Auto(7, cluster=machines)
    made = {name: options.placement(name, None) for name in ("mem", "comm", "scatter")}
    assert made == {"mem": MemOpt(), "comm": CommOpt(), "scatter": ReduceScatter()}
    assert options.placement("local", None) == Local()


def test_a_fraction_belongs_to_hybrid():
    with pytest.raises(SettingError) as error:
        options.placement("comm", "1/2")
    assert str(error.value) == (
        "--fraction 1/2 belongs to --placement hybrid but --placement is comm: leave one of them "
        "out."
    )
    with pytest.raises(SettingError) as error:
        options.placement("hybrid", None)
    assert str(error.value) == (
        "--placement hybrid needs the share of ranks that precondition a layer: pass --fraction, "
        "such as 0.25."
    )
