"""What a step of each contender costs, side by side in one process.

    cost = median over rounds of (seconds of a cycle of steps / steps of the cycle)

A cycle has every kind of step that an optimizer takes (NaturalMuon measures every fourth and
decomposes every twentieth, SOAP has a new basis every tenth), so a median of single steps would
leave out the dear ones. Contenders take turns, a cycle each, so that a slow moment of the machine
hits all of them.
"""

from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import torch

from natgrad.comm.alone import Alone
from natgrad.lab.compare import ComparisonSetup
from natgrad.lab.train.training import Training

CYCLE = 20


class Stepping:
    """A run that goes on for ever over its first batches."""

    def __init__(self, setup: ComparisonSetup, key: str, cycle: int) -> None:
        one = next(one for one in setup.contenders if one.key == key)
        settings = one.settings_for(setup.task, one.lr / 10, setup.tuning_seed)
        self.run = Training(settings, Alone(), torch.device("cpu"))
        few = [batches for _, batches in islice(self.run.batches(0), cycle)]
        self.kept: list[Any] = [few[i % len(few)] for i in range(cycle)]

    def cycle(self) -> float:
        """Seconds of a step. All of them have one number: with the first, rates that warm up."""
        start = perf_counter()
        for batch in self.kept:
            self.run.step(self.run.steps // 2, batch)
        return (perf_counter() - start) / len(self.kept)


def costs(setup: ComparisonSetup, rounds: int, cycle: int = CYCLE) -> dict[str, float]:
    """Seconds of a step, by contender."""
    before = torch.get_num_threads()
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    try:
        keys = [one.key for one in setup.contenders if not one.missing()]
        running = {key: Stepping(setup, key, cycle) for key in keys}
        for one in running.values():
            one.cycle()  # what is loaded and decomposed for the first time
        seen: dict[str, list[float]] = {key: [] for key in keys}
        for _ in range(rounds):
            for key, one in running.items():
                seen[key].append(one.cycle())
    finally:
        torch.set_num_threads(before)
    return {key: median(seconds) for key, seconds in seen.items()}
