"""``python -m fuzz.faults``: a thousand faults, and how each of them ended.

    messages      a communicator delays, drops, repeats, cuts or spoils one message of a training
    folders       one byte of what KFAC.save wrote is flipped, lost or zero, at every kind of place
    run states    the same of a checkpoint of ``natgrad train``
    full disks    the file system takes no more than so many bytes while something is saved

An outcome is *right* (the same numbers as without the fault), *refused* (an error of natgrad that
says what happened), *other error* (loud, but not natgrad's sentence), or *silent*, which is a
failure, as is *hangs*. That messages arrive as they were sent is the promise of the transport: a
number that became NaN on its way is refused, or has its step dropped, by all ranks or, where only
one has received it, by that one, which then has other weights. It never comes to the weights.
"""

import argparse
import copy
import random
import resource
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from fuzz.threads import KINDS, Fault, ThreadRank, together
from natgrad.comm import Alone
from natgrad.errors import NatgradError
from natgrad.lab.train.state import Checkpoints

Outcome = tuple[str, str]  # what was done, how it ended
PLACEMENTS = (natgrad.CommOpt(), natgrad.MemOpt(), natgrad.ReduceScatter())
RIGHT, REFUSED, OTHER, SILENT, HANGS = "right", "refused", "other error", "silent", "hangs"
ALIKE, ONE_RANK = "step dropped by all ranks", "step dropped by one rank"
NOT_A_NUMBER = "NaN in the weights"


# Messages.

_ONE_GENERATOR = threading.Lock()  # torch's own, which all threads share


def trained(comm: ThreadRank, placement: Any) -> list[torch.Tensor]:
    """Two steps of a small network on this rank's samples."""
    with _ONE_GENERATOR, torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = natgrad.KFAC(
        model,
        optimizer,
        update_every=1,
        refresh_every=1,
        distributed=natgrad.Distributed(placement=placement, group=comm),
    )
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        x = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(4) % 3).backward()
        kfac.step()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def of_messages(
    chance: random.Random, kinds: Sequence[str] = KINDS, *, once: bool = False
) -> Iterator[Outcome]:
    """Every kind of fault at every collective of every rank, in a random order."""
    plans = []
    for placement in PLACEMENTS:
        good, calls, _ = together(2, None, lambda comm, p=placement: trained(comm, p))
        assert all(isinstance(one, list) for one in good), good
        plans += [
            (placement, good, Fault(kind, rank, call))
            for kind in kinds
            for rank in range(2)
            for call in range(calls[rank])
        ]
    while True:
        chance.shuffle(plans)
        for placement, good, fault in plans:
            found, _, harmed = together(2, fault, lambda comm, p=placement: trained(comm, p))
            if harmed:  # not an empty one
                yield f"message {fault.kind}", judged(found, good, fault)
        if once:
            return


def judged(found: list[Any], good: list[Any], fault: Fault) -> str:
    errors = [one for one in found if isinstance(one, Exception)]
    if any(isinstance(one, TimeoutError) and str(one) == "hangs" for one in errors):
        return HANGS
    if errors:
        return REFUSED if any(isinstance(one, NatgradError) for one in errors) else OTHER
    if all(_same(one, other) for one, other in zip(found, good, strict=True)):
        return RIGHT
    # A number that is none is dropped with its batch, on all ranks alike.
    if fault.kind != "damaged":
        return SILENT
    if not all(bool(t.isfinite().all()) for one in found for t in one):
        return NOT_A_NUMBER
    return ALIKE if _same(found[0], found[1]) else ONE_RANK


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Files.


def made() -> tuple[natgrad.KFAC, dict[str, Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return natgrad.KFAC(model, optimizer), {"model": model, "optimizer": optimizer, "step": 0}


def saved(folder: Path) -> None:
    kfac, beside = made()
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        beside["optimizer"].zero_grad()
        x = torch.randn(16, 6, generator=generator)
        F.cross_entropy(beside["model"](x), torch.arange(16) % 3).backward()
        kfac.step()
        beside["optimizer"].step()
    kfac.save(folder, {**beside, "step": 2})


def everything(kfac: natgrad.KFAC, beside: dict[str, Any]) -> Any:
    parts = (beside["model"].state_dict(), beside["optimizer"].state_dict(), beside["step"])
    return copy.deepcopy([kfac.state_dict(), *parts])


def damaged(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """At the beginning, the end, or anywhere: headers, tensors and tables are in these places."""
    place = chance.choice(
        [
            min(len(data) - 1, chance.randrange(64)),
            max(0, len(data) - 1 - chance.randrange(64)),
            chance.randrange(len(data)),
        ]
    )
    kind = chance.choice(["flipped", "cut", "zeroed", "gone"])
    wrong = bytearray(data)
    if kind == "flipped":
        wrong[place] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        wrong = wrong[:place]
    elif kind == "zeroed":
        wrong[place : place + 32] = bytes(len(wrong[place : place + 32]))
    else:
        wrong = bytearray()
    return kind, bytes(wrong)


def of_folders(chance: random.Random) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "saved"
        saved(folder)
        files = {path: path.read_bytes() for path in sorted(folder.iterdir())}
        kfac, beside = made()
        before = everything(kfac, beside)
        while True:
            path = chance.choice(list(files))
            kind, wrong = damaged(files[path], chance)
            if wrong == files[path]:
                continue
            path.write_bytes(wrong)
            try:
                kfac.load(folder, beside)
                how = SILENT
                kfac, beside = made()
            except NatgradError:
                how = REFUSED if equal(everything(kfac, beside), before) else SILENT
            except Exception:
                how = OTHER
            path.write_bytes(files[path])
            yield f"folder {kind}", how


def of_run_states(chance: random.Random) -> Iterator[Outcome]:
    """The last of two checkpoints is damaged: the one before is taken, with a warning."""
    while True:
        with tempfile.TemporaryDirectory() as parent:
            kept = Checkpoints(Path(parent) / "checkpoints", 2, Alone())
            for step in (1, 2):
                kept.save(step, {"x": torch.full((40,), float(step))}, [step])
            last = max(kept.folder.iterdir())
            files = {path: path.read_bytes() for path in sorted(last.iterdir())}
            for _ in range(50):
                path = chance.choice(list(files))
                kind, wrong = damaged(files[path], chance)
                if wrong == files[path]:
                    continue
                path.write_bytes(wrong)
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    try:
                        state, shares = kept.load()
                        step = state["step"]
                        whole = bool((state["x"] == step).all()) and shares == [[step]]
                        how = REFUSED if step == 1 and told and whole else SILENT
                    except NatgradError:
                        how = REFUSED
                    except Exception:
                        how = OTHER
                path.write_bytes(files[path])
                yield f"run state {kind}", how


def of_full_disks(chance: random.Random) -> Iterator[Outcome]:
    """A limit on the size of files, as a full disk is one on all of them: the last checkpoint stays
    as it was."""
    kfac, beside = made()
    with tempfile.TemporaryDirectory() as parent:
        folder, runs = Path(parent) / "saved", Path(parent) / "runs"
        saved(folder)
        kept = Checkpoints(runs, 2, Alone())
        kept.save(1, {"x": torch.ones(400)}, None)
        largest = max(path.stat().st_size for path in folder.iterdir())
        while True:
            limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            run_state = chance.random() < 0.5
            room = chance.randrange(1500 if run_state else largest)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            try:
                if run_state:
                    kept.save(2, {"x": torch.zeros(400)}, None)
                else:
                    kfac.save(folder, beside)
                how = RIGHT  # it is smaller than the one before
            except NatgradError:
                how = REFUSED
            except Exception:
                how = OTHER
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            again, its = made()
            again.load(folder, its)
            loaded = kept.load()
            steps = its["step"], None if loaded is None else loaded[0]["step"]
            if how == RIGHT and not run_state:
                how = RIGHT if steps == (0, 1) else SILENT
                saved(folder)
            elif steps != (2, 1):
                how = SILENT
            yield f"full disk, {'run state' if run_state else 'folder'}", how


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


CLASSES: dict[str, tuple[Callable[[random.Random], Iterator[Outcome]], float]] = {
    "messages": (of_messages, 0.3),
    "folders": (of_folders, 0.35),
    "run states": (of_run_states, 0.25),
    "full disks": (of_full_disks, 0.1),
}


def injected(number: int, seed: int) -> dict[str, Counter[str]]:
    """So many faults of all classes, by their shares; each with how it ended."""
    found: dict[str, Counter[str]] = {}
    for name, (source, share) in CLASSES.items():
        faults, start = source(random.Random(f"{name} {seed}")), time.monotonic()
        for _ in range(max(1, round(number * share))):
            what, how = next(faults)
            found.setdefault(what, Counter())[how] += 1
        faults.close()  # type: ignore[attr-defined]
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def fine(what: str, how: str) -> bool:
    """Whether a fault may end so."""
    loud = how == OTHER and what == "message truncated"
    by_transport = how in (ALIKE, ONE_RANK) and what == "message damaged"
    return how in (RIGHT, REFUSED) or loud or by_transport


def table(found: dict[str, Counter[str]]) -> str:
    ends = sorted({how for counts in found.values() for how in counts})
    rows = ["| fault | injected | " + " | ".join(ends) + " |", "|---|---:|" + "---:|" * len(ends)]
    total = Counter({how: sum(counts[how] for counts in found.values()) for how in ends})
    for what, counts in [*sorted(found.items()), ("all", total)]:
        cells = " | ".join(str(counts[how]) for how in ends)
        rows.append(f"| {what} | {counts.total()} | {cells} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = injected(given.count, given.seed)
    print(table(found))
    return int(not all(fine(what, how) for what, counts in found.items() for how in counts))


if __name__ == "__main__":
    sys.exit(main())
