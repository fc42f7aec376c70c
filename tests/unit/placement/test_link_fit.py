"""The links that made some seconds are found again; others as near as they can be."""

import pytest

from natgrad.errors import SettingError
from natgrad.placement import Cluster, CollectiveSeconds, fit_links
from natgrad.placement.link_fit import KINDS

LINKS = Cluster(1e9, bandwidth=3e8, latency=7e-5, overhead=2e-5)


def ideal(cluster, ranks):
    """Collectives that take just what the cluster says."""
    found = []
    for kind in KINDS:
        for nbytes in (64 * ranks, 4096 * ranks, ranks << 20):
            one = CollectiveSeconds(kind, ranks, nbytes, 1.0)
            found.append(CollectiveSeconds(kind, ranks, nbytes, one.predicted(cluster)))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_known_links_are_recovered(ranks):
    measured = ideal(LINKS, ranks)
    found = fit_links(measured, 1e9)
    assert found.flops == 1e9
    assert found.latency == pytest.approx(7e-5, rel=1e-9)
    assert found.bandwidth == pytest.approx(3e8, rel=1e-9)
    if ranks == 2:  # nobody sends a second message
        assert found.overhead is None
    else:
        assert found.overhead == pytest.approx(2e-5, rel=1e-9)
    assert max(abs(one.residual(found)) for one in measured) < 1e-9


def test_seconds_are_the_cluster_s():
    """By hand: 3 of 4 parts of 4000 bytes leave, at 1000 bytes a second."""
    cluster = Cluster(1.0, bandwidth=1000.0, latency=0.5, overhead=0.25)
    seconds = {kind: CollectiveSeconds(kind, 4, 4000, 1.0).predicted(cluster) for kind in KINDS}
    assert seconds == {
        "exchange": 0.5 + 2 * 0.25 + 3,
        "total": 2 * (2 * 0.5 + 3),
        "reduce_scatter": 2 * 0.5 + 3,
        "all_gather": 2 * 0.5 + 3,
    }
    assert CollectiveSeconds("exchange", 4, 4000, 2.0).residual(cluster) == 1.0  # twice as long


def test_relative_errors_count():
    """One of two that disagree by a factor gets the mean of relative errors, whatever its size."""
    measured = [
        CollectiveSeconds("exchange", 2, 2 << 30, 1.0),
        CollectiveSeconds("exchange", 2, 2 << 30, 3.0),
    ]
    # min (x - 1)² + (x / 3 - 1)² is at x = (1 + 1/3) / (1 + 1/9) = 1.2
    found = fit_links(measured, 1e9)
    assert measured[0].predicted(found) == pytest.approx(1.2, rel=1e-6)


def test_no_link_is_faster_than_light():
    """Seconds that fall with the bytes would give a negative bandwidth."""
    measured = [
        CollectiveSeconds("exchange", 3, 3000, 2.0),
        CollectiveSeconds("exchange", 3, 6000, 1.0),
        CollectiveSeconds("all_gather", 3, 6000, 3.0),
    ]
    found = fit_links(measured, 1e9)
    assert found.bandwidth == pytest.approx(1e15)
    assert found.latency > 0
    assert found.overhead is not None
    assert found.overhead > 0


def test_nothing_measured():
    with pytest.raises(SettingError) as error:
        fit_links([], 1e9)
    assert str(error.value) == (
        "fit_links was given no measured collectives but needs at least one: measure some on two "
        "or more ranks, or use Cluster(flops=...)."
    )


def test_no_such_collective():
    with pytest.raises(SettingError) as error:
        CollectiveSeconds("broadcast", 2, 8, 1.0)
    assert str(error.value) == (
        "CollectiveSeconds.kind is 'broadcast' but must be one of exchange, total, "
        "reduce_scatter, all_gather: pass one of these."
    )
    with pytest.raises(SettingError, match="ranks is 1 but must be a whole number of at least 2"):
        CollectiveSeconds("total", 1, 8, 1.0)
    with pytest.raises(SettingError, match="nbytes is 0 but must be a whole number of at least 1"):
        CollectiveSeconds("total", 2, 0, 1.0)
    with pytest.raises(SettingError, match="seconds is -1 but must be finite and above 0"):
        CollectiveSeconds("total", 2, 8, -1)


@pytest.mark.parametrize("duplex", [0.0, 0.4, 1.0])
def test_links_that_take_turns_are_told_from_slow_ones(duplex):
    """From exchanges, in which both directions are busy, beside collectives that go around."""
    true = Cluster(1e12, 2e9, 3e-5, overhead=4e-6, duplex=duplex)
    measured = []
    for kind in KINDS:
        for ranks in (2, 4):
            for nbytes in (1 << 12, 1 << 18, 1 << 24):
                one = CollectiveSeconds(kind, ranks, nbytes, 1.0)
                seconds = one.predicted(true)
                measured.append(CollectiveSeconds(kind, ranks, nbytes, seconds))
    found = fit_links(measured, 1e12)
    assert found.duplex == pytest.approx(duplex, abs=1e-6)
    assert found.bandwidth == pytest.approx(2e9)
    assert found.latency == pytest.approx(3e-5)
    only = [one for one in measured if one.kind == "exchange"]
    assert fit_links(only, 1e12).duplex == 1.0  # nobody can tell


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("exchanged", [False, True])
def test_reduce_scatters_that_are_exchanges_are_known_by_their_seconds(exchanged, ranks):
    true = Cluster(1e12, 2e9, 3e-5, overhead=4e-6, duplex=0.2, exchanged_sums=exchanged)
    found = fit_links(ideal(true, ranks), 1e12)
    assert found.exchanged_sums == exchanged
    assert found.duplex == pytest.approx(0.2)
    assert found.bandwidth == pytest.approx(2e9)
