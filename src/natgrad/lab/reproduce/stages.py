"""Stages of a step of K-FAC-opt and of K-FAC-lw, measured beside predicted (Pauloski 2022, fig.
7)."""

from collections.abc import Sequence
from typing import Any

from natgrad import CommOpt, Eigen, MemOpt
from natgrad.lab.models.spreading import Layout
from natgrad.lab.report.cluster_shapes import (
    PAULOSKI,
    Counted,
    broadcasts,
    methods,
    one_by_one,
)
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.reproduce.rank_profiles import RankJob, measured
from natgrad.tables import Column, Table, bytes_text

OPT, LW = "K-FAC-opt", "K-FAC-lw"
RANKS, GPUS = 4, 64
EVERY = 500  # steps between decompositions, as the paper has them on 64 GPUs
STATISTICS = ("A", "G", "norm", "fold")
PRINTED = 3.4  # seconds of eigendecompositions on their way, over those of gradients

# What a stage is: CPU seconds of stages of the stopwatch in a kind of step, or bytes of a purpose;
# and what the simulator calls it.
SECONDS = {
    "factors": ("update", STATISTICS, None),
    "eigendecompositions": ("refresh", ("refresh",), "decompose"),
    "preconditioning": ("stale", ("apply",), "precondition"),
}
BYTES = {
    "factors on their way": ("update", "factors", "reduce"),
    "eigendecompositions on their way": ("refresh", "inverses", "share"),
    "gradients on their way": ("stale", "gradients", "give_back"),
}


class StageProfile(Item):
    """Bytes are counted and computations are in CPU seconds, both on real processes; seconds of
    the paper's machine are predicted."""

    name = "stages"
    title = "Stages of a step: K-FAC-opt and K-FAC-lw"
    papers = "Pauloski 2022, sec. 6.4.1 and fig. 7; Yokota's slides, breakdown of ResNet-50"
    printed = (
        "a figure of the stages of ResNet-50 on 64 V100; in words: factors, eigendecompositions "
        "and scaling take alike (within 2%), sending eigendecompositions takes 3.4 times as long "
        "as sending gradients but is done 1/500 as often, and K-FAC-opt preconditions longer."
    )
    cluster = (
        "natgrad plan --network resnet50 --ranks 64 --cluster v100-112x4 --batch 32 "
        "--placement comm --timeline stages.svg (and --placement mem)"
    )

    remark = (
        "Measured: ResNet-20 on 4 processes of one machine, 8 images each, in CPU seconds of the "
        "thread that trains; time on the way is not in them, so that bytes are compared instead. "
        "Predicted: ResNet-50 on 64 V100, in fused buckets, and the ratio of the paper also with a "
        "broadcast for each tensor, as its program has them. Why some do not hold: on a machine "
        "that does other things as well CPU seconds of the same work differ by more than 2%; and "
        "what is sent is packed in the stage that it belongs to, so that K-FAC-opt has longer "
        "eigendecompositions, and K-FAC-lw preconditioning that is hardly shorter with matrices as "
        "small as these. Predicted seconds of ResNet-50 are without packing: alike for "
        "eigendecompositions, and 6.5 times as long for preconditioning. Of the ratio 3.4 the page "
        "on [planning](planning.md#against-the-papers) has more."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        ranks = 2 if smoke else RANKS
        tell(f"steps of {ranks} processes under {OPT} and {LW}")
        placements = ((OPT, CommOpt()), (LW, MemOpt()))
        rounds, depth = (1, 0) if smoke else (6, 20)
        of_ranks = measured(RankJob(placements, rounds, 8, depth, seed), ranks)
        found: dict[str, dict[str, float]] = {}
        for name, _ in placements:
            each = [one[name] for one in of_ranks]
            found[name] = {
                stage: sum(one["seconds"][kind].get(part, 0.0) for one in each for part in parts)
                for stage, (kind, parts, _) in SECONDS.items()
            }
            found[name] |= {
                stage: max(one["sent"][kind].get(purpose, 0.0) for one in each)
                for stage, (kind, purpose, _) in BYTES.items()
            }
            found[name]["slowest"] = max(one["seconds"]["stale"]["apply"] for one in each)
            found[name]["work"] = max(one["work"] for one in each)
        tell("predictions")
        return {"measured": found, "predicted": predicted("resnet20" if smoke else "resnet50")}

    def findings(self) -> tuple[Finding, ...]:
        def of(result: Result, stage: str) -> tuple[float, float]:
            found = result["measured"]
            return float(found[OPT][stage]), float(found[LW][stage])

        def alike(stage: str) -> Any:
            def margin(result: Result) -> float:
                opt, lw = of(result, stage)
                return 0.02 - abs(opt / lw - 1)

            return margin

        def ratio(result: Result, which: str) -> float:
            return float(result["predicted"][which])

        def more_bytes(result: Result) -> float:
            shares, _ = of(result, "eigendecompositions on their way")
            _, gradients = of(result, "gradients on their way")
            return shares / gradients - 1

        def often(result: Result) -> float:
            opt, lw = (
                result["measured"][name]["gradients on their way"]
                + result["measured"][name]["eigendecompositions on their way"] / EVERY
                for name in (OPT, LW)
            )
            return 1 - float(opt) / float(lw)

        def longer(result: Result) -> float:
            opt, lw = of(result, "slowest")
            return opt / lw - 1

        share = "by a share of"
        return (
            Finding("factors take the same CPU time (within 2%)", alike("factors"), "room of"),
            Finding(
                "eigendecompositions take the same CPU time (within 2%)",
                alike("eigendecompositions"),
                "room of",
            ),
            Finding(
                "eigendecompositions, sent by K-FAC-opt, are more bytes than gradients, sent by "
                "K-FAC-lw",
                more_bytes,
                share,
            ),
            Finding(
                f"predicted on 64 V100, they take {PRINTED} times as long (within 0.5), broadcast "
                "tensor by tensor",
                lambda result: 0.5 - abs(ratio(result, "tensor by tensor") - PRINTED),
                "room of",
            ),
            Finding(
                f"with decompositions at every {EVERY}th step K-FAC-opt sends less than K-FAC-lw",
                often,
                share,
            ),
            Finding(
                "K-FAC-opt preconditions longer, as every process does all of it (CPU seconds of "
                "the slowest)",
                longer,
                share,
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for stage, (_, _, name) in {**SECONDS, **BYTES}.items():
            cells = []
            for method in (OPT, LW):
                values = [r["measured"][method][stage] for r in results]
                if stage in SECONDS:
                    cells.append(middle([1e3 * v for v in values], ".1f") + " ms CPU")
                else:
                    cells.append(bytes_text(round(max(values))))
            for method in (OPT, LW):
                seconds = results[0]["predicted"][method].get(name)
                cells.append("" if seconds is None else f"{1e3 * seconds:.1f} ms")
            rows.append((stage, *cells))
        for which in ("in fused buckets", "tensor by tensor"):
            text = f"{results[0]['predicted'][which]:.1f}"
            rows.append((f"eigendecompositions over gradients, {which}", "", "", text, ""))
        names = (f"{OPT}, measured", f"{LW}, measured", f"{OPT}, predicted", f"{LW}, predicted")
        columns = (Column("stage"), *(Column(name, "right") for name in names))
        footer = (
            "CPU milliseconds of all processes together, the least of all steps, and bytes of the "
            "process that sends most, each in a step in which the stage is due; median over seeds, "
            "with the least and the most; predicted for 64 V100"
        )
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        found = results[0]["predicted"]
        names = [name for _, _, name in (*SECONDS.values(), *BYTES.values()) if name]
        titles = [title for title, (_, _, name) in (*SECONDS.items(), *BYTES.items()) if name]
        for index, method in enumerate((OPT, LW)):
            places = [place + 0.4 * index for place in range(len(names))]
            axes.barh(places, [1e3 * found[method][n] for n in names], 0.35, label=method)
        axes.set_yticks([place + 0.2 for place in range(len(names))], titles)
        axes.invert_yaxis()
        axes.set_xscale("symlog")
        axes.set_xlabel("predicted ms on 64 V100, of a step in which the stage is due")
        axes.legend(frameon=False)


def predicted(network: str) -> dict[str, Any]:
    """Seconds of the stages of both methods on the paper's machine, and how much longer
    eigendecompositions of K-FAC-opt travel than gradients of K-FAC-lw.

    Arguments:
        network: by name.
    """
    counted = Counted(network, Eigen())
    found: dict[str, Any] = {}
    for name, one in methods().items():
        times = counted.placed(one(), GPUS, Layout.DDP, (EVERY // 10, EVERY), PAULOSKI).times
        assert times.stages is not None
        found[name] = {
            stage: getattr(times.stages, stage)
            for stage in ("reduce", "decompose", "share", "precondition", "give_back")
        }
    share, gradients = broadcasts(counted)
    found["in fused buckets"] = share / gradients
    share, gradients = one_by_one(counted.kfac.plan.blocks)
    found["tensor by tensor"] = share / gradients
    return found
