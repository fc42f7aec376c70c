"""Long decompositions are told of before they begin, once, and short ones never."""

import io
import warnings

import pytest
import torch
from torch import nn

from natgrad import KFAC
from natgrad.kfac import forecast


class Terminal(io.StringIO):
    def isatty(self):
        return True


def steps(count=2, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 3))
    kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, **settings)
    for _ in range(count):
        model.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(5, 30)), torch.zeros(5).long()).backward()
        kfac.step()
    return kfac


def test_a_sentence_before_long_decompositions(monkeypatch):
    slow = 25 * 31**3 / 100
    monkeypatch.setitem(forecast._RATES, "cpu", slow)
    with pytest.warns(UserWarning, match="The first decompositions will take about") as found:
        steps()
    assert len(found) == 1  # not at every step
    text = str(found[0].message)
    assert "factor A of Linear '0' with 31 x 31 entries" in text
    assert "96% of it" in text
    assert "max_dim=15" in text
    assert found[0].filename == __file__


def test_none_before_short_ones(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps()
        monkeypatch.setitem(forecast._RATES, "cpu", 25 * 31**3 / 100)
        steps(max_dim=8)  # narrowed: 4 blocks of 8, a fiftieth of the operations


def test_a_bar_where_a_terminal_is_and_only_if_it_lasts(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    steps()
    assert terminal.getvalue() == ""
    monkeypatch.setitem(forecast._RATES, "cpu", 25 * 31**3 / 10)
    steps(count=1)
    text = terminal.getvalue()
    assert "0 of 4" in text
    assert "4 of 4" in text
    assert text.endswith("\r\x1b[K")  # nothing of it stays
    plain = io.StringIO()
    monkeypatch.setattr("sys.stderr", plain)
    steps(count=1)
    assert plain.getvalue() == ""


def test_what_is_just_long_enough_matters(monkeypatch):
    """A forecast that does not matter is not asked for a bar, so that both have the same limit."""
    kfac = steps(count=1)
    team = kfac.team
    everything = [(b, name) for b in team.blocks.values() for name in b.decomposes]
    seconds = forecast.Forecast(team).seconds(everything)
    for limit, matters in ((seconds, True), (1.001 * seconds, False)):
        monkeypatch.setattr(forecast, "_LASTS", limit)
        assert forecast.Forecast(team).matters is matters
