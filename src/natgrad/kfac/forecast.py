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
        self._operations = {
            factor: spec.work.decompose for factor, spec in team.plan.factors.items()
        }
        everything = [(b, name) for b in team.blocks.values() for name in b.decomposes]
        self.matters = self.seconds(everything) >= min(_LONG, _LASTS)  # or nothing would be said

    def operations(self, block: Block, name: str) -> float:
        return self._operations[block.name, name]

    def seconds(self, factors: Iterable[FactorOf]) -> float:
        """Of all these, one after the other."""
        return sum(
            self._operations[block.name, name] / _RATES.get(block.device.type, _ACCELERATOR)
            for block, name in factors
        )

    def begin(self, factors: list[FactorOf]) -> "Bar | None":
        """A sentence, once and only if it is going to be long; and a bar, if it lasts and if there
        is somebody to look at it."""
        seconds = self.seconds(factors)
        if seconds >= _LONG and not self._said:
            warnings.warn(self._sentence(factors, seconds), stacklevel=6)
        self._said |= bool(factors)
        lasts = seconds >= _LASTS and self.team.rank == 0 and sys.stderr.isatty()
        return Bar(self, factors) if lasts else None

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
    """A line on standard error that is written over, and taken away at the end."""

    def __init__(self, forecast: Forecast, factors: list[FactorOf]) -> None:
        self.forecast, self.count, self.done = forecast, len(factors), 0
        self.total = sum(forecast.operations(*factor) for factor in factors)
        self.finished, self._start = 0.0, monotonic()
        self._draw()

    def add(self, block: Block, names: Iterable[str]) -> None:
        """These factors of a block are decomposed."""
        for name in names:
            self.done += 1
            self.finished += self.forecast.operations(block, name)
        self._draw()

    def _draw(self) -> None:
        share = self.finished / self.total
        filled = round(_WIDTH * share)
        passed = monotonic() - self._start
        left = f", about {seconds_text(passed / share - passed)} left" if share > 0 else ""
        bar = "#" * filled + "-" * (_WIDTH - filled)
        line = f"decomposing factors [{bar}] {self.done} of {self.count}{left}"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    def end(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
