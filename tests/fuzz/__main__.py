"""``python -m fuzz``: random cases for as long as one likes, counted.

Failures are printed as Python.

    make fuzz                       a thousand cases of each kind
    make fuzz MINUTES=60            for an hour
    make fuzz EXAMPLES=10000 KIND=one_process SEED=3

A failure is made small by hypothesis and printed. Put it into ``known.py``, where it stays.
"""

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

KINDS = ("one_process", "worlds", "training_loops")
AT_A_TIME = 200  # examples under one seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--kind", choices=["all", *KINDS], default="all")
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failures = 0
    for kind in KINDS if given_.kind == "all" else (given_.kind,):
        module = import_module(f"fuzz.{kind}")
        failures += fuzz(kind, module.FUZZED, given_.minutes, given_.examples, given_.seed)
    return min(failures, 1)


def fuzz(kind: str, fuzzed: Callable[[Any], Any], minutes: float, examples: int, first: int) -> int:
    """``fuzzed(settings, seed, count)`` runs some of its cases and calls ``count()`` for each."""
    start, cases, failures, turn = time.monotonic(), [0], 0, first

    def count(number: int = 1) -> None:
        cases[0] += number

    def goes_on() -> bool:
        if minutes:
            return time.monotonic() - start < 60 * minutes
        return cases[0] < examples

    while goes_on():
        left = AT_A_TIME if minutes else min(AT_A_TIME, examples - cases[0])
        profile = settings(
            max_examples=left,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
        )
        try:
            fuzzed(profile, turn, count)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                break
            failures += 1
            print(f"{kind}: a failure under seed {turn}:", flush=True)
            traceback.print_exception(error, limit=-4, file=sys.stdout)
        turn += 1
        seconds = time.monotonic() - start
        print(f"{kind}: {cases[0]:,} cases, {failures} failures, {seconds:.0f} s", flush=True)
    return failures


def of_strategy(strategy: Any, run: Callable[..., None]) -> Callable[[Any, int, Any], None]:
    """What `fuzz` calls, of a strategy for tuples and a function of their items."""

    def fuzzed(profile: Any, turn: int, count: Callable[[], None]) -> None:
        @seed(turn)
        @profile
        @given(strategy)
        def case(drawn: tuple[Any, ...]) -> None:
            count()
            run(*drawn)

        case()

    return fuzzed


if __name__ == "__main__":
    sys.exit(main())
