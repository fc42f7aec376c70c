"""Predicted against measured steps on slow links: `python -m benchmarks.slow_links`.

Every rank is a process in a network namespace of its own, with an address of its own and a link of
a given rate to a switch (a bridge in one more namespace); `tc` sets the rate in both directions,
and the delay where the kernel can. So messages really take the time that a slow network takes.

Every placement trains twice, once with links as fast as the computer and once with slow ones. The
slow links are measured by their collectives alone, as `natgrad plan --calibrate` does it and before
anything trains on them. From the first training, the plan and these links follows what the second
should take::

    predicted = fast step + (slow - fast) of DDP's own all-reduce + what `simulate` says of the link

Needs Linux, root, and `ip` and `tc` (Debian: iproute2); elsewhere it says so and ends.
"""

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks import networks
from benchmarks.distributed import slowest
from benchmarks.ranks import DDP, KINDS, NETWORKS, PLACEMENTS, Measured, Setting, measure
from benchmarks.timing import render
from benchmarks.workloads import Workload
from natgrad.comm import connect
from natgrad.lab.calibration import CalibrationSettings, calibrate
from natgrad.placement import Cluster, MeasuredCluster, Plan, simulate

# One factor is nearly everything, and all are alike.
NETWORKS["wide"] = Workload(partial(networks.linears, (1024, 64, 64, 10)), 32, (1024,))
NETWORKS["even"] = Workload(partial(networks.linears, (384, 384, 384, 384, 10)), 32, (384,))
# Namespaces of this process alone: another one that measures has its own.
SWITCH, PREFIX = (f"natgrad-{os.getpid()}-{what}" for what in ("switch", "rank"))
PORT = 29543
ANY = 1e18  # operations a second: computations are in what was measured with fast links
# Of the links alone: of computations only as much as there must be.
# Buffers are small ones for the latency, and such that a burst of the bucket hardly shortens.
LINKS = CalibrationSettings((2,), (1 << 12, 1 << 19, 1 << 21), 2, 1e-3, layers=2, width=16)


class NoSlowLinksError(Exception):
    """Why slow links cannot be made on this computer."""


@dataclass(frozen=True)
class Line:
    """One placement and kind of step, in seconds."""

    what: str
    kind: str
    balanced: str
    fast: float
    slow: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.slow

    def cells(self) -> tuple[str, ...]:
        times = (f"{1e3 * t:.4g}" for t in (self.fast, self.slow, self.predicted))
        return self.what, self.kind, self.balanced, *times, f"{self.ratio:.2f}"


def command(*words: object) -> str:
    """Run it, or raise `NoSlowLinksError` with its own words."""
    texts = [str(word) for word in words]
    run = subprocess.run(texts, capture_output=True, text=True)
    if run.returncode:
        raise NoSlowLinksError(
            f"'{' '.join(texts)}' failed: {run.stderr.strip() or run.returncode}"
        )
    return run.stdout


def inside(name: str, *words: object) -> str:
    return command("ip", "netns", "exec", name, *words)


@contextmanager
def switched(ranks: int) -> Iterator[list[str]]:
    """A namespace for each rank, connected by a switch; all are gone afterwards."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        raise NoSlowLinksError(
            f"slow links need Linux with {' and '.join(missing) or 'namespaces'}"
        )
    if os.geteuid():
        raise NoSlowLinksError("only root may make network namespaces")
    names = [f"{PREFIX}{rank}" for rank in range(ranks)]
    try:
        command("ip", "netns", "add", SWITCH)
        inside(SWITCH, "ip", "link", "add", "bridge0", "type", "bridge")
        inside(SWITCH, "ip", "link", "set", "bridge0", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            command("ip", "netns", "add", name)
            inside(name, "ip", "link", "set", "lo", "up")
            end = ("type", "veth", "peer", "name", port, "netns", SWITCH)
            inside(name, "ip", "link", "add", "link0", *end)
            inside(SWITCH, "ip", "link", "set", port, "master", "bridge0")
            inside(SWITCH, "ip", "link", "set", port, "up")
            inside(name, "ip", "addr", "add", f"{address(rank)}/24", "dev", "link0")
            inside(name, "ip", "link", "set", "link0", "up")
        yield names
    finally:
        for name in (*names, SWITCH):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def slow_down(names: Sequence[str], rate: float, delay: float) -> None:
    """``rate`` bytes a second in each direction, and ``delay`` seconds where that can be."""
    ends = [(name, "link0") for name in names]
    ends += [(SWITCH, f"port{rank}") for rank in range(len(names))]
    for name, link in ends:
        # A burst of some packets; a queue of a second, so that none is dropped.
        limit = ("rate", f"{round(8 * rate)}bit", "burst", "32kb", "latency", "1s")
        inside(name, "tc", "qdisc", "add", "dev", link, "root", "handle", "1:", "tbf", *limit)
        if delay:
            wait = ("netem", "delay", f"{1e6 * delay / 2:.0f}us")
            inside(name, "tc", "qdisc", "add", "dev", link, "parent", "1:1", *wait)


def train(
    names: Sequence[str], setting: Setting, *, calibrated: bool = False
) -> tuple[list[Measured], MeasuredCluster | None]:
    """What every rank measured, and the links, if they are to be ``calibrated`` first."""
    with TemporaryDirectory(prefix="natgrad-links-") as folder:
        ranks = len(names)
        files = [Path(folder) / str(rank) for rank in range(ranks)]
        words = [int(calibrated), setting.network, setting.batch, setting.repeats]
        words += setting.placements
        own = [sys.executable, "-m", "benchmarks.slow_links", "--rank"]
        runs = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    *own,
                    *map(str, (rank, ranks, files[rank], *words)),
                ],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        said = [run.communicate(timeout=1800)[1] for run in runs]
        for run, text in zip(runs, said, strict=True):
            if run.returncode:
                raise RuntimeError(f"A rank ended with {run.returncode}: {text[-2000:]}")
        both = [pickle.loads(file.read_bytes()) for file in files]
        return [found for found, _ in both], both[0][1]


def be_a_rank(words: Sequence[str]) -> None:
    rank, ranks, file, calibrated, network, batch, repeats, *placements = words
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address(0)}:{PORT}",
        rank=int(rank),
        world_size=int(ranks),
    )
    links = calibrate(connect(), torch.device("cpu"), LINKS) if int(calibrated) else None
    found = measure(Setting(network, int(batch), int(repeats), tuple(placements)))
    Path(file).write_bytes(pickle.dumps((found, links)))
    dist.barrier()
    time.sleep(0.2)  # gloo may still free what the last collective used
    dist.destroy_process_group()


def link_seconds(plan: Plan, kind: str, links: Cluster) -> float:
    """What the link takes of a step of this kind, until the slowest rank is done."""
    times = simulate(plan, replace(links, flops=ANY))
    clocks = [times.apply]
    clocks += [times.update] * (kind != "stale") + [times.refresh] * (kind == "both")
    return sum(max(clock) for clock in clocks)


def lines(
    setting: Setting, fast: list[Measured], slow: list[Measured], links: Cluster
) -> Iterator[Line]:
    for name, plan in slow[0].plan.items():
        for kind in KINDS:
            before, after = (min(slowest(found, name, kind)) for found in (fast, slow))
            ddp = 0.0
            if name != "ReduceScatter()":  # which sums gradients itself
                without, with_it = (min(slowest(found, DDP, kind)) for found in (slow, fast))
                ddp = without - with_it
            predicted = before + ddp + link_seconds(plan, kind, links)
            label = f"{setting.network}, {len(slow)} ranks: {name}"
            yield Line(label, kind, ", ".join(plan.routes.balanced), before, after, predicted)


def described(links: MeasuredCluster) -> str:
    found = links.cluster
    return (
        f"{8 * found.bandwidth / 1e6:.3g} Mbit/s, latency {1e6 * found.latency:.3g} µs, duplex "
        f"{found.duplex:.2f}, reduce-scatters are {'' if found.exchanged_sums else 'no '}"
        f"all-to-alls, largest error of the fit {100 * links.residual:.0f}%"
    )


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=["wide", "even"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s (default 100)")
    parser.add_argument("--delay", type=float, default=0.0, help="ms there and back (default 0)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    rate, delay = given.rate * 1e6 / 8, given.delay / 1e3
    found: list[Line] = []
    notes: list[str] = []
    try:
        for network in given.networks:
            for ranks in given.ranks:
                print(f"{network}, {ranks} ranks", file=sys.stderr, flush=True)
                setting = Setting(network, 32, given.repeats, tuple(given.placements))
                with switched(ranks) as names:
                    fast, _ = train(names, setting)
                    slow_down(names, rate, delay)
                    slow, measured = train(names, setting, calibrated=True)
                assert measured is not None
                notes.append(f"{network}, {ranks} ranks: {described(measured)}")
                found += lines(setting, fast, slow, measured.cluster)
    except NoSlowLinksError as reason:
        print(f"No slow links here: {reason}.")
        return
    header = ("what", "kind", "even slices", "fast ms", "slow ms", "predicted ms", "ratio")
    title = f"Steps on links of {given.rate:g} Mbit/s, predicted and measured"
    print(render(title, header, [line.cells() for line in found], given.markdown))
    print("Links as they were measured:", *notes, sep="\n- ")
    off = max(found, key=lambda line: abs(log(line.ratio)))
    print(f"farthest off: {off.what}, {off.kind}, predicted {off.ratio:.2f} of measured")


if __name__ == "__main__":
    main()
