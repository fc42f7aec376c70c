"""NaturalMuon's step beside those of AdamW, Muon and SOAP: `python -m benchmarks.optimizer_cost`.

    cost = seconds of a cycle of steps / their number

All optimizers train copies of one network on one batch, in one process and in turns, a cycle each:
20 steps of NaturalMuon, which at its default intervals measures in five of them and decomposes in
one, 10 of SOAP, which has a new basis in one, and 5 of those whose steps are all the same. The
median and the least of all rounds are printed, and the ratio to the faster of two Muons, by
medians, with what each keeps between steps; and NaturalMuon's cycles stage by stage.

`--clock cpu` counts the process's CPU seconds instead of those of the wall: on a busy machine the
better guess, with one thread.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad
from benchmarks.page import add_output, report
from benchmarks.timing import Row, Table
from benchmarks.workloads import WORKLOADS, Workload
from natgrad.geometry import spectral
from natgrad.inverses import decomposed
from natgrad.inverses import spectral as spectra
from natgrad.inverses.basis import Basis
from natgrad.kfac.motion import Mover
from natgrad.lab.schemes import parameter_groups, third_party
from natgrad.lengths import Rms
from natgrad.linalg import whitened_polar

CYCLE, BASES, SAME = 20, 10, 5
NATURAL, MUONS = "NaturalMuon", ("Muon", "Muon by torch")
ALL = ("AdamW", *MUONS, "SOAP", NATURAL)
GOALS = {"resnet32": 1.10, "encoder": 1.10}
MODELS = ("mlp", "resnet32", "encoder", "resnet50")
Clock = Callable[[], float]


def optimizers() -> dict[str, Callable[[nn.Module], Optimizer]]:
    """Rates are small: the weights move, and the hundredth step costs what the first one does."""
    lr = 1e-5
    made: dict[str, Callable[[nn.Module], Optimizer]] = {
        "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr),
        "Muon by torch": lambda model: third_party.torch_muon(_groups(model), lr, 0.95),
        NATURAL: lambda model: natgrad.NaturalMuon(model, lr),
    }
    if find_spec(third_party.PACKAGE) is not None:
        made["Muon"] = lambda model: third_party.muon(_groups(model), lr, 0.95, model)
        made["SOAP"] = lambda model: third_party.soap(_groups(model), lr, 0.95)
    return made


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return parameter_groups(model, 0.0)


class Trainer:
    """Calling it is one training step."""

    def __init__(self, workload: Workload, build: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = workload.network()
        self.inputs = torch.randn(workload.batch, *workload.inputs)
        self.targets = torch.randint(workload.classes, (workload.batch,))
        self.optimizer = build(self.model)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.inputs), self.targets).backward()
        self.optimizer.step()


class Stages:
    """Seconds by stage of everything that is called while it is `watching`."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds = clock, defaultdict[str, float](float)
        self._inside: list[float] = []

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """What a stage within it takes does not count for it."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                spent = self.clock() - start
                self.seconds[stage] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        return noted

    @contextmanager
    def watching(self, optimizer: Optimizer) -> Iterator[None]:
        """Of other optimizers nothing is watched."""
        if not isinstance(optimizer, natgrad.NaturalMuon):
            yield
            return
        kfac = optimizer.kfac
        places: list[tuple[Any, str, str]] = [
            (kfac.capture, "on_pair", "statistics"),
            (type(kfac.updating), "__call__", "fold"),
            (type(kfac.refreshing), "__call__", "refresh"),
            (type(kfac.preconditioning), "__call__", "copies and the rest"),
            (spectral, "polar", "polar"),
            (spectral, "half_polar", "polar"),
            (spectral, "whitened_polar", "whitening"),
            (whitened_polar, "_roots", "polar"),
            (decomposed.FactorProduct, "whiten", "whitening"),
            (spectra.SpectralProduct, "whiten", "whitening"),
            (Basis, "root", "roots of factors"),
            (Mover, "_remember", "momentum"),
            (Rms, "squares", "length"),
            (optimizer, "_adamw", "AdamW for the rest"),
        ]
        places = [(owner, name, stage) for owner, name, stage in places if hasattr(owner, name)]
        patches = [
            patch.object(owner, name, _bound(self.timed(stage, getattr(owner, name)), owner))
            for owner, name, stage in places
        ]
        with _all(patches):
            yield


def _bound(call: Callable[..., Any], owner: Any) -> Any:
    """A function in a class becomes a method again; what is not a class's is called as it is."""
    return (lambda self, *a, **k: call(self, *a, **k)) if isinstance(owner, type) else call


@contextmanager
def _all(patches: list[Any]) -> Iterator[None]:
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()


def measure(
    workload: Workload, rounds: int, clock: Clock, names: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, Trainer], Stages]:
    """Seconds of a step in every round and what was trained, by optimizer; NaturalMuon's stages."""
    made = optimizers()
    trainers = {name: Trainer(workload, made[name]) for name in names if name in made}
    for trainer in trainers.values():
        trainer()
        trainer()
    # The next cycle of NaturalMuon has all kinds of steps, wherever it begins.
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    stages = Stages(clock)
    for _ in range(rounds):
        for name, trainer in trainers.items():
            steps = {NATURAL: CYCLE, "SOAP": BASES}.get(name, SAME)
            with stages.watching(trainer.optimizer):
                start = clock()
                for _ in range(steps):
                    trainer()
                seconds[name].append((clock() - start) / steps)
            print(f"{name}: {1000 * seconds[name][-1]:.1f} ms", file=sys.stderr, flush=True)
    return seconds, trainers, stages


def stage_rows(stages: Stages, seconds: Sequence[float]) -> list[Row]:
    """Milliseconds of a step, a mean over all cycles; what is left is forward and backward.
    ``seconds``: of a step, in every round."""
    total, found = sum(seconds) * CYCLE, dict(stages.seconds)
    found["forward, backward, update of weights"] = total - sum(found.values())
    return [
        Row(stage, 1000 * spent / CYCLE / len(seconds), unit="ms", note=f"{spent / total:.1%}")
        for stage, spent in sorted(found.items(), key=lambda pair: -pair[1])
    ]


def state_megabytes(optimizer: Optimizer) -> float:
    """Of all that is kept between steps."""
    if isinstance(optimizer, natgrad.NaturalMuon):
        rest = sum(_bytes(state) for state in optimizer.state.values())
        kept: Any = optimizer.kfac.memory()
        return float(rest + sum(kept.total.values())) / 2**20
    state = optimizer.state_dict()
    return _bytes({k: v for k, v in state.items() if k != "param_groups"}) / 2**20


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def tables(name: str, rounds: int, clock: Clock, names: Sequence[str] = ALL) -> list[Table]:
    workload = WORKLOADS[name]
    seconds, trainers, stages = measure(workload, rounds, clock, names)
    muon = min(median(seconds[key]) for key in MUONS if key in seconds)
    cost = Table(
        f"{name}, {workload}: a step, beside the faster Muon", note_name="median, least, kept"
    )
    for key, each in seconds.items():
        goal = GOALS.get(name) if key == NATURAL else None
        kept = state_megabytes(trainers[key].optimizer)
        note = f"{1000 * median(each):.1f} ms, {1000 * min(each):.1f} ms, {kept:.1f} MB"
        cost.rows.append(Row(key, median(each) / muon, goal=goal, unit="x", note=note))
    if NATURAL not in seconds:
        return [cost]
    spent = Table(f"{name}: stages of NaturalMuon's step", note_name="share")
    spent.rows += stage_rows(stages, seconds[NATURAL])
    return [cost, spent]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--rounds", type=int, default=5, help="for ResNet-50 one of them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    add_output(parser)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.perf_counter if asked.clock == "wall" else time.process_time
    found = []
    for name in asked.models:
        rounds = asked.rounds if name != "resnet50" else 1
        found += tables(name, rounds, clock, asked.optimizers)
    report(found, asked)


if __name__ == "__main__":
    main()
