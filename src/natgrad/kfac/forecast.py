"""How long decompositions will take, said before the first one, and a bar while they last.

A factor of 9,217 columns takes minutes, and a program that stands still for minutes without a word
looks broken. The plan knows the operations of every factor; how many of them a second makes is a
rule of thumb here, right to a factor of two or three: enough to tell seconds from minutes.
"""

import sys
import warnings
from collections.abc import Iterable
from time import monotonic

from natgrad.capture.blocks import Block
from natgrad.kfac.ranks.team import Team
from natgrad.tables import bytes_text, seconds_text

# Operations a second, of one process.
_RATES = {"cpu": 1e11}
_ACCELERATOR = 1e12
_LONG = 30.0  # seconds that are worth a sentence
_LASTS = 3.0  # seconds that are worth a bar
_WIDTH = 30

FactorOf = tuple[Block, str]


class Forecast:
    """Of the decompositions of one rank."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._said = False

    def operations(self, block: Block, name: str) -> float:
        return self.team.plan.factors[block.name, name].work.decompose

    def seconds(self, factors: Iterable[FactorOf]) -> float:
        """Of all these, one after the other."""
        return sum(
            self.operations(block, name) / _RATES.get(block.device.type, _ACCELERATOR)
            for block, name in factors
        )

    def announce(self, factors: list[FactorOf]) -> None:
        """Once, and only if it is going to be long."""
        if self._said or not factors:
            return
        self._said = True
        seconds = self.seconds(factors)
        if seconds >= _LONG:
            warnings.warn(self._sentence(factors, seconds), stacklevel=6)

    def _sentence(self, factors: list[FactorOf], seconds: float) -> str:
        block, name = max(factors, key=lambda factor: self.operations(*factor))
        dim = block.forms[name].spec.dim
        share = self.seconds([(block, name)]) / seconds
        kept = self.team.plan.memory(self.team.rank).total
        return (
            f"The first decompositions will take about {seconds_text(seconds)}, {share:.0%} of it "
            f"factor {name} of {block.kind} {block.name!r} with {dim:,} x {dim:,} entries, and "
            f"K-FAC {bytes_text(kept)} of memory. Pass max_dim={max(1, dim // 2):,} to keep wide "
            "factors in blocks, inverse=natgrad.Cholesky() or natgrad.inverses.LowRank(), or "
            "refresh_every=natgrad.schedules.Staggered(...) to spread them over steps."
        )


class Bar:
    """A line on standard error that is written over: in a terminal, on the first rank, and only if
    it lasts. ``with`` takes it away again."""

    def __init__(self, forecast: Forecast, factors: list[FactorOf]) -> None:
        self.forecast = forecast
        lasts = forecast.seconds(factors) >= _LASTS
        self.shown = lasts and forecast.team.rank == 0 and sys.stderr.isatty()
        self.count, self.done = len(factors), 0
        self.total = sum(forecast.operations(*factor) for factor in factors) if self.shown else 0.0
        self.finished = 0.0

    def __enter__(self) -> "Bar":
        self._start = monotonic()
        self._draw()
        return self

    def add(self, block: Block, names: Iterable[str]) -> None:
        """These factors of a block are decomposed."""
        if self.shown:
            for name in names:
                self.done += 1
                self.finished += self.forecast.operations(block, name)
            self._draw()

    def _draw(self) -> None:
        if not self.shown:
            return
        share = self.finished / self.total if self.total else 1.0
        filled = round(_WIDTH * share)
        passed = monotonic() - self._start
        left = f", about {seconds_text(passed / share - passed)} left" if share > 0 else ""
        bar = "#" * filled + "-" * (_WIDTH - filled)
        line = f"decomposing factors [{bar}] {self.done} of {self.count}{left}"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    def __exit__(self, *error: object) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
