"""Memory against traffic and iteration time over the fractions of `Hybrid` (KAISA's slides)."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from natgrad import Eigen, Hybrid
from natgrad.lab.models.spreading import Layout
from natgrad.lab.report.cluster_shapes import KAISA, Counted
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell
from natgrad.lab.reproduce.rank_profiles import RankJob, measured
from natgrad.tables import Column, Table, bytes_text

RANKS, GPUS = 4, 64
EVERY = (5, 50)  # BERT's updates and decompositions (Pauloski 2022, sec. 6.3.3)
ALIKE = 1e-4  # relative, in float32


class Fractions(Item):
    """Two halves: real processes, of which bytes are counted, and BERT-Large on KAISA's machine,
    which is planned."""

    name = "fractions"
    title = "Memory, traffic and iteration time over the fractions of Hybrid"
    papers = "KAISA's slides (Pauloski 2021), hybrid placement, and figure (f)"
    printed = (
        "figures of iteration time and memory by grad_worker_frac, (f) of BERT-Large's phase 2 in "
        "float16; a tunable trade of memory against communication."
    )
    cluster = (
        "natgrad plan --network bert-large --ranks 64 --cluster a100-24x8 --batch 12 "
        "--update-every 5 --refresh-every 50 --sweep-fractions fractions.svg"
    )
    chance = False

    remark = (
        "Measured: ResNet-20, 4 processes connected by gloo, 8 images each; memory is what is kept "
        "of factors and decompositions, on the process with most, and bytes are those that the "
        "process with most sends for K-FAC. Predicted: seconds of an average training step and "
        "bytes of BERT-Large on 64 A100, 12 samples of 512 tokens each; no time was measured. Not "
        "all fractions are faster than those before them, unlike in the paper: in the simulator "
        "preconditioned gradients travel in even slices of fused buckets, which costs little, "
        "while more GPUs that precondition a layer all repeat its products."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        ranks = 2 if smoke else RANKS
        shares = [Fraction(1, 2**k) for k in range(ranks.bit_length() - 1, -1, -1)]
        tell(f"steps of {ranks} processes at fractions {', '.join(map(str, shares))}")
        placements = tuple((str(share), Hybrid(float(share))) for share in shares)
        job = RankJob(placements, rounds=1, batch=8, depth=0 if smoke else 20, seed=seed)
        of_ranks = measured(job, ranks)
        found = {str(share): _summed([one[str(share)] for one in of_ranks]) for share in shares}
        weights = {str(share): of_ranks[0][str(share)]["weights"] for share in shares}
        first = weights[str(shares[0])]
        size = max(map(abs, first))
        apart = max(abs(a - b) for w in weights.values() for a, b in zip(w, first, strict=True))
        return {
            "ranks": ranks,
            "measured": found,
            "apart": apart / size,
            "planned": _planned(smoke, tell),
        }

    def findings(self) -> tuple[Finding, ...]:
        def grows(of: str, by: str) -> Any:
            def margin(result: Result) -> float:
                values = [float(one[by]) for one in result[of].values()]
                return min(1 - less / more for less, more in pairwise(values))

            return margin

        def falls(of: str, by: str) -> Any:
            def margin(result: Result) -> float:
                values = [float(one[by]) for one in result[of].values()]
                return min(1 - after / before for before, after in pairwise(values))

            return margin

        def exact(result: Result) -> float:
            each = result["measured"].values()
            pairs = [(one[name], one[f"planned_{name}"]) for one in each for name in MEASURED]
            return 1.0 - max(abs(float(a) - float(b)) for a, b in pairs)

        share = "by a share of at least"
        return (
            Finding(
                f"all fractions give the same weights (to {ALIKE:g})",
                lambda result: ALIKE - float(result["apart"]),
                "room of",
            ),
            Finding(
                "the larger the fraction, the more memory K-FAC takes",
                grows("measured", "kept"),
                share,
            ),
            Finding(
                "and the less is sent in a step that decomposes nothing",
                falls("measured", "stale"),
                share,
            ),
            Finding("the plan predicts all of these to the byte", exact, "to a byte, with room of"),
            Finding(
                "predicted for BERT-Large: the larger the fraction, the more memory",
                grows("planned", "kept"),
                share,
            ),
            Finding(
                "and the shorter an average iteration, at every fraction",
                falls("planned", "seconds"),
                share,
            ),
            Finding(
                "the largest fraction has a shorter iteration than the smallest",
                _ends,
                "shorter by a share of",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        (result,) = results
        rows = [
            (
                f"{result['ranks']} processes, {share}",
                *(f"{_bytes(of[n])} ({_bytes(of[f'planned_{n}'])})" for n in MEASURED),
                "",
            )
            for share, of in result["measured"].items()
        ]
        rows += [
            (
                f"planned, {share}",
                f"({_bytes(of['kept'])})",
                f"({_bytes(of['stale'])})",
                f"({_bytes(of['refresh'])})",
                f"({1e3 * of['seconds']:.1f} ms)",
            )
            for share, of in result["planned"].items()
        ]
        names = ("memory", "sent, nothing decomposed", "sent, all decomposed", "iteration")
        columns = (Column("fraction"), *(Column(name, "right") for name in names))
        footer = "measured, and (as planned); of the process with most"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        (result,) = results
        other = axes.twinx()
        names = list(result["planned"])
        memory = [of["kept"] / 2**30 for of in result["planned"].values()]
        seconds = [1e3 * of["seconds"] for of in result["planned"].values()]
        axes.plot(names, seconds, "o-", color="C0", label="iteration")
        other.plot(names, memory, "s--", color="C1", label="memory")
        axes.set_xlabel("fraction of GPUs that precondition a layer")
        axes.set_ylabel("predicted ms")
        other.set_ylabel("predicted GiB for K-FAC")
        lines = [*axes.get_lines(), *other.get_lines()]
        axes.legend(lines, [line.get_label() for line in lines], frameon=False)


MEASURED = ("kept", "stale", "refresh")


def _summed(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the process with most, counted and planned."""
    found = {"kept": max(one["kept"] for one in ranks)}
    found["planned_kept"] = max(one["planned_kept"] for one in ranks)
    for kind in ("stale", "refresh"):
        found[kind] = max(sum(one["sent"][kind].values()) for one in ranks)
        found[f"planned_{kind}"] = max(sum(one["planned"][kind].values()) for one in ranks)
    return found


def _planned(smoke: bool, tell: Tell) -> dict[str, dict[str, float]]:
    gpus = 4 if smoke else GPUS
    name = "resnet20" if smoke else "bert-large"
    network = Counted(name, Eigen(), batch=12)
    found = {}
    for power in range(gpus.bit_length() - 1, -1, -1):
        share = Fraction(1, 2**power)
        tell(f"a plan of {name} on {gpus} GPUs at fraction {share}")
        placement = Hybrid(float(share), cluster=KAISA)
        model = network.placed(placement, gpus, Layout.DDP, EVERY, KAISA)
        plan = model.plan
        sent = [plan.sent(rank) for rank in (0, gpus - 1)]
        found[str(share)] = {
            "seconds": model.average(*EVERY),
            "kept": float(max(_kept(plan.memory(rank)) for rank in range(gpus))),
            "stale": max(one.gradients for one in sent),
            "refresh": max(one.gradients + one.factors + one.inverses for one in sent),
        }
    return found


def _kept(memory: Any) -> int:
    return int(memory.factors + memory.inverses)


def _ends(result: Result) -> float:
    first, *_, last = result["planned"].values()
    return 1 - float(last["seconds"]) / float(first["seconds"])


def _bytes(number: float) -> str:
    return bytes_text(round(number))
